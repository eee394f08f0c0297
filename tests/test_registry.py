"""Adding a part: one class, one decorator; and the mistakes one can make there."""

import numpy as np
import pytest
from support import codec_conformance
from support.arrays import gauss

import grace_ext
from grace_ext import ConfigError, ContainerError
from grace_ext.index.base import IndexCodec
from grace_ext.pipeline.container import parse
from grace_ext.registry import build, by_id, lookup, names, register
from grace_ext.sparsifiers.base import Sparsifier
from grace_ext.value.base import ValueCodec


@pytest.fixture(autouse=True)
def registered(temporary_registry):
    """What the tests register is gone after them."""


def test_a_value_codec_in_a_few_lines():
    @register
    class Sign(ValueCodec):
        """One byte a value: its sign, times a scale that the sender chooses."""

        name, id = "test-sign", 200

        def __init__(self, scale: float = 1.0):
            self.scale = scale

        def encode(self, values, stream):
            return np.concatenate([np.array([self.scale], "<f4").view(np.uint8), (values > 0).astype(np.uint8)]), None

        @staticmethod
        def decode(payload, out):
            if payload.size != 4 + out.size or payload[4:].max() > 1:
                raise ContainerError("test-sign: wrong length or sign")
            with np.errstate(invalid="ignore"):
                out[:] = (2 * payload[4:].astype(np.float32) - 1) * payload[:4].view("<f4")[0]

    c = grace_ext.compressor("topk:0.1/rice/test-sign:scale=0.5")
    assert str(c) == "topk:0.1/rice/test-sign:0.5"
    gradient = gauss(1000)
    dense = grace_ext.decompress(c.compress(gradient), 1000)
    assert set(np.unique(dense)) == {-0.5, 0, 0.5}
    for gradient in codec_conformance.gradients().values():
        codec_conformance.check_compressor(c, gradient)
        codec_conformance.check_feedback(c, [gradient, gradient])


def test_a_sparsifier_in_a_few_lines():
    @register
    class EveryNth(Sparsifier):
        name = "test-every"

        def __init__(self, n: int = 2):
            self.n = n

        def select(self, dense, scope):
            chosen = (np.arange(dense.size) % self.n == 0) | ~np.isfinite(dense)  # a NaN must not stay unseen
            indices = np.flatnonzero(chosen).astype(np.uint32)
            return indices, dense[indices]

    c = grace_ext.compressor("test-every:3")
    assert grace_ext.decompress(c.compress(np.arange(7, dtype=np.float32)), 7).tolist() == [0, 0, 0, 3, 0, 0, 6]
    for gradient in codec_conformance.gradients().values():
        codec_conformance.check_sparsifier(c.sparsifier, gradient)
        codec_conformance.check_compressor(c, gradient)
        codec_conformance.check_feedback(c, [gradient, gradient])


def test_auto_considers_a_new_index_codec():
    @register
    class Everything(IndexCodec):
        """Nothing to send if all positions are taken."""

        name, id = "test-everything", 200

        def encode(self, indices, d):
            return np.zeros(0 if indices.size == d else 4 * d, np.uint8), indices

        @staticmethod
        def decode(payload, d, out):
            if payload.size or out.size != d:
                raise ContainerError("test-everything: not everything")
            out[:] = np.arange(d)

    full, part = np.ones(100, np.float32), np.eye(1, 100, dtype=np.float32)[0]
    assert parse(grace_ext.compressor("topk:1.0").compress(full)).index_id == 200
    assert parse(grace_ext.compressor("topk:1.0").compress(part)).index_id != 200
    codec_conformance.check_compressor(grace_ext.compressor("topk:1.0"), full)


def test_the_options_of_a_new_part_convert_by_their_defaults():
    @register
    class Options(IndexCodec):
        name = "test-options"

        def __init__(self, flag: bool = False, count: int = 3, share: float = 0.5, text: str = "a", maybe: int = None):
            self.flag, self.count, self.share, self.text, self.maybe = flag, count, share, text, maybe

    part = build("index", "test-options", {"flag": "True", "count": "-4", "share": "1", "text": "b", "maybe": "5"})
    assert part.options() == {"flag": True, "count": -4, "share": 1.0, "text": "b", "maybe": 5}
    assert str(part) == "test-options:true:count=-4:share=1.0:text=b:maybe=5"
    assert grace_ext.compressor(f"topk/{part}").index == part
    assert build("index", "test-options").options() == {"flag": False, "count": 3, "share": 0.5, "text": "a", "maybe": None}
    for key, value in (
        ("flag", "maybe"),
        ("flag", 2),
        ("count", "3.0"),
        ("count", 3.5),
        ("count", float("nan")),
        ("count", float("inf")),
        ("count", True),
        ("share", "x"),
        ("share", True),
        ("maybe", "x"),
    ):
        with pytest.raises(ConfigError, match=f"option '{key}': .* is not a"):
            build("index", "test-options", {key: value})


def test_an_option_that_may_be_none():
    @register
    class Optional(IndexCodec):
        name = "test-optional"

        def __init__(self, size: int | None = None):
            self.size = size

    part = build("index", "test-optional")
    assert part.options() == {"size": None} and build("index", "test-optional", part.options()) == part
    assert build("index", "test-optional", {"size": "5"}).size == 5
    with pytest.raises(ConfigError, match="option 'size': 'x' is not a int"):
        build("index", "test-optional", {"size": "x"})


def test_a_name_that_is_taken():
    with pytest.raises(ConfigError, match="value 'qsgd' is registered already, by QSGD"):
        register(type("Another", (ValueCodec,), {"name": "qsgd", "id": 201}))
    assert by_id("value", 201) is None


def test_an_id_that_is_taken():
    with pytest.raises(ConfigError, match="value id 3 of 'test-new' belongs to 'qsgd' already"):
        register(type("New", (ValueCodec,), {"name": "test-new", "id": 3}))
    assert "test-new" not in names("value")
    register(type("New", (IndexCodec,), {"name": "qsgd", "id": 202}))  # other kinds have their own names and ids
    assert lookup("index", "qsgd").id == 202 and lookup("value", "qsgd").id == 3


def test_lookup():
    assert names("value") == sorted(names("value"))
    with pytest.raises(ConfigError, match="unknown index 'x'; known: .*auto.*rice"):
        lookup("index", "x")
    assert by_id("index", 255) is None
    assert by_id("sparsifier", None) is None and by_id("index", None) is None, "no id is no codec's id"


def test_ids_fit_a_byte_and_are_unique():
    for kind in ("index", "value"):
        ids = [lookup(kind, name).id for name in names(kind) if lookup(kind, name).id is not None]
        assert len(set(ids)) == len(ids)
        assert all(0 < id_ < 200 for id_ in ids), "0 is none; from 200 on they are for tests"
