"""Published methods by name."""

import numpy as np
import pytest
from support import codec_conformance
from support.arrays import gauss

import grace_ext
from grace_ext import ConfigError
from grace_ext.pipeline.container import parse
from grace_ext.pipeline.presets import PRESETS

#: The largest relative error that each leaves on the values it sends, of a normal gradient's top 1 %.
LOSSLESS = ("dr-bf-p0", "dr-bf-p1", "dr-bf-p2", "dr-rle", "dr-huffman", "dr-deflate")


@pytest.mark.parametrize("name", PRESETS)
def test_contract(name):
    c = grace_ext.compressor(name)
    assert grace_ext.compressor(str(c)) == c
    for gradient in codec_conformance.gradients().values():
        if not c.index.remaps_values:
            codec_conformance.check_compressor(c, gradient)
    for d in (1, 700, 30_000):
        codec_conformance.check_feedback(c, [gauss(d), gauss(d, 1)])


@pytest.mark.parametrize("name", PRESETS)
def test_it_is_what_its_name_says(name):
    """On a gradient that is large enough, the sections are written by the codecs that the preset names."""
    gradient = gauss(300_000)
    c = grace_ext.compressor(name)
    parsed = parse(c.compress(gradient))
    assert parsed.value_id == c.value.id and (c.index.id is None or c.dense or parsed.index_id == c.index.id)
    assert (parsed.transform is not None) == (c.transform is not None)
    sent = grace_ext.decompress(c.compress(gradient), gradient.size)
    if name in LOSSLESS:
        assert np.array_equal(sent[sent != 0], gradient[sent != 0])
    assert sent @ gradient > (0 if c.index.remaps_values else 0.2) * np.linalg.norm(sent) * np.linalg.norm(gradient) - 20


@pytest.mark.parametrize("name, paper", [("dr-fit-poly", 0.1039), ("dr-fit-dexp", 0.1039)])
def test_the_fits_send_as_little_as_in_table_4_of_the_paper(name, paper):
    """The share of float32 that the top 10 % of a model as large as that of docs/federated.md need, which the paper has of its own."""
    gradient = gauss(535_818)
    blob = grace_ext.compressor(f"{name}:0.1").compress(gradient)
    assert 0.1 < blob.size / gradient.nbytes < 0.1005 < paper


def test_another_density():
    assert grace_ext.compressor("dr-rle:0.1") == grace_ext.compressor("topk:0.1/rle/raw")
    assert grace_ext.compressor(" dr-bf-p2-qsgd ").sparsifier.density == 0.01
    for wrong, message in (
        ("dr-rle:2", "topk: density=2"),
        ("dr-rle:", "density"),
        ("3lc:0.1", "takes no density"),
        ("dr-rle/raw", "unknown sparsifier 'dr-rle'"),
    ):
        with pytest.raises(ConfigError, match=message):
            grace_ext.compressor(wrong)
