"""Spec strings and dicts: the grammar, the defaults, and an answer to every mistake."""

import json

import pytest

import grace_ext
from grace_ext import ConfigError, registry
from grace_ext.pipeline import spec


@pytest.mark.parametrize(
    "text, canonical",
    [
        ("topk", "topk/auto/raw"),
        ("topk:0.01", "topk/auto/raw"),  # the default is left out
        ("topk:0.02", "topk:0.02/auto/raw"),
        ("topk:density=0.02", "topk:0.02/auto/raw"),
        ("topk:2e-2", "topk:0.02/auto/raw"),
        ("topk:1e-6/rice/raw", "topk:1e-06/rice/raw"),
        ("topk:1", "topk:1.0/auto/raw"),
        ("topk/rice", "topk/rice/raw"),
        ("topk/raw", "topk/raw/raw"),  # raw is an index codec first
        ("topk/fp16", "topk/auto/fp16"),
        ("topk/qsgd:7", "topk/auto/qsgd:7"),
        ("topk/auto/qsgd", "topk/auto/qsgd"),
        ("topk/rice/qsgd:bucket=64", "topk/rice/qsgd:bucket=64"),
        ("topk/rice/qsgd:7:bucket=64", "topk/rice/qsgd:7:bucket=64"),
        ("topk/rice/qsgd:bucket=64:bits=7", "topk/rice/qsgd:7:bucket=64"),
        (" topk:0.5/bitmap/deflate:9\n", "topk:0.5/bitmap/deflate:9"),
        ("dense", "dense/auto/raw"),
        ("dense/fp16", "dense/auto/fp16"),
    ],
)
def test_grammar(text, canonical):
    c = grace_ext.compressor(text)
    assert str(c) == canonical
    for again in (str(c), c.to_dict(), json.loads(json.dumps(c.to_dict()))):
        assert grace_ext.compressor(again) == c
        assert str(grace_ext.compressor(again)) == canonical


def test_options_have_their_types():
    c = grace_ext.compressor("topk:1/rice/qsgd:7:bucket=64")
    assert c.to_dict() == {
        "sparsifier": {"name": "topk", "density": 1.0, "per": "bucket"},
        "index": {"name": "rice"},
        "value": {"name": "qsgd", "bits": 7, "bucket": 64, "levels": 0, "norm": "max", "entropy": "none"},
    }
    assert isinstance(c.sparsifier.density, float) and isinstance(c.value.bits, int)


def test_dict_with_strings_and_omitted_stages():
    expected = grace_ext.compressor("topk:0.02/auto/qsgd:7")
    for given in (
        {"sparsifier": "topk:0.02", "value": "qsgd:7"},
        {"value": {"name": "qsgd", "bits": "7"}, "sparsifier": {"name": "topk", "density": 0.02}},
        {"sparsifier": {"name": "topk", "density": "0.02"}, "index": "auto", "value": {"name": "qsgd", "bits": 7.0}},
    ):
        assert grace_ext.compressor(given) == expected
    assert grace_ext.compressor({"sparsifier": "dense"}) == grace_ext.compressor("dense")


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "no sparsifier; known: .*dense.*topk"),
        ("/rice", "no sparsifier; known: .*dense.*topk"),
        ("topp", "unknown sparsifier 'topp'; known: .*dense.*topk"),
        ("rice/qsgd", "unknown sparsifier 'rice'; known: .*dense.*topk"),
        ("TopK", "unknown sparsifier 'TopK'"),
        ("topk/rcie", "unknown codec 'rcie'; index codecs: .*rice.*; value codecs: .*qsgd"),
        ("topk/", "unknown codec ''"),
        ("topk/rcie/qsgd", "unknown index 'rcie'; known: .*auto.*bitmap.*raw.*rice"),
        ("topk/qsgd/rice", "unknown index 'qsgd'; known: .*rice"),
        ("topk//qsgd", "unknown index ''"),
        ("topk/rice/qsdg", "unknown value 'qsdg'; known: .*deflate.*fp16.*qsgd.*raw"),
        ("topk/rice/", "unknown value ''"),
        ("topk/rice/qsgd/raw", "1 stages too many; grammar: "),
        ("topk/rice/qsgd/raw/", "2 stages too many; grammar: "),
        ("topk:densitty=0.1", "'topk' has no option 'densitty'; its options: density"),
        ("dense:0.1", "options: none"),
        ("dense:x=1", "'dense' has no option 'x'; its options: none"),
        ("topk/rice:3", "options: none"),
        ("topk/rice/qsgd:7:64", "only the first option may stand without a name; options: bits, bucket"),
        ("topk/rice/qsgd:bits=7:64", "only the first option may stand without a name"),
        ("topk/rice/qsgd:7:bits=8", "'bits' is given twice"),
        ("topk/rice/qsgd:bucket=8:bucket=8", "'bucket' is given twice"),
        ("topk:", "option 'density': '' is not a float"),
        ("topk:a lot", "option 'density': 'a lot' is not a float"),
        ("topk/qsgd:7.5", "option 'bits': '7.5' is not a int"),
        ("topk/qsgd:bits=", "option 'bits': '' is not a int"),
    ],
)
def test_mistakes_in_a_string(text, message):
    with pytest.raises(ConfigError, match=message):
        grace_ext.compressor(text)


@pytest.mark.parametrize(
    "text",
    [
        "topk:0",
        "topk:-0.1",
        "topk:1.01",
        "topk:nan",
        "topk:inf",
        "dense/qsgd:1",
        "dense/qsgd:9",
        "dense/qsgd:bucket=4",
        "dense/qsgd:bucket=100",
        "dense/qsgd:bucket=65536",
        "dense/deflate:0",
        "dense/deflate:10",
    ],
)
def test_values_out_of_range(text):
    with pytest.raises(ConfigError, match="=.*; allowed: "):
        grace_ext.compressor(text)


@pytest.mark.parametrize(
    "given, message",
    [
        ({}, "no sparsifier"),
        ({"value": "qsgd"}, "no sparsifier"),
        ({"sparsifier": "topk", "values": "qsgd"}, "unknown keys \\['values'\\]; keys: transform, sparsifier, index, value"),
        ({"sparsifier": {"density": 0.1}}, "unknown sparsifier None; known: .*topk"),
        ({"sparsifier": {"name": ["topk"]}}, "unknown sparsifier"),
        ({"sparsifier": {"name": "topk", "density": "much"}}, "is not a float"),
        ({"sparsifier": {"name": "topk", "density": None}}, "None is not a float"),
        ({"sparsifier": {"name": "topk", "densitty": 0.1}}, "no option 'densitty'"),
        ({"sparsifier": "topk", "value": {"name": "qsgd", "bits": 7.5}}, "7.5 is not a int"),
        ({"sparsifier": "topk", "value": {"name": "qsgd", "bits": True}}, "True is not a int"),
        ({"sparsifier": {"name": "topk", "density": True}}, "True is not a float"),
        ({"sparsifier": "topk", "index": None}, "index: expected a string, got NoneType; known: auto, "),
        ({"sparsifier": "topk", "index": 3}, "index: expected a string"),
        ({"sparsifier": "topk", "transform": 3}, "transform: expected a string, got int"),
        (None, "a spec is a string or a dict, not NoneType; grammar: "),
        (0.01, "a spec is a string or a dict, not float"),
        (["topk"], "a spec is a string or a dict, not list"),
    ],
)
def test_mistakes_in_a_dict(given, message):
    with pytest.raises(ConfigError, match=message):
        grace_ext.compressor(given)


def test_a_compressor_is_returned_as_it_is():
    c = grace_ext.compressor("topk", seed=4)
    assert grace_ext.compressor(c) is c


def test_equality_and_hash():
    a, b = grace_ext.compressor("topk:0.01/auto/raw"), grace_ext.compressor("topk")
    assert a == b and hash(a) == hash(b)
    for other in (
        grace_ext.compressor("topk", seed=1),
        grace_ext.compressor("topk:0.02"),
        grace_ext.compressor("topk/rice"),
        "topk",
        None,
    ):
        assert a != other


def test_every_part_round_trips_on_its_own():
    for kind in ("sparsifier", "index", "value", "memory", "communicator", "outer"):
        assert registry.names(kind)
        for name in registry.names(kind):
            needed = {"warmup_steps": 500} if name == "onebit_adam" else {}
            stage = registry.build(kind, name, needed)
            assert spec.parse_stage(kind, str(stage)) == stage
            assert str(stage) == ":".join([name, *map(str, needed.values())]), "defaults are left out"


def test_what_a_compressor_says_of_itself():
    for text, linear, lossless, dense in (
        ("dense", "float32", True, True),
        ("dense/fp16", "float16", False, True),
        ("dense/qsgd", None, False, True),
        ("topk", None, True, False),
    ):
        c = grace_ext.compressor(text)
        assert (c.reducible_dtype, c.lossless, c.dense) == (linear, lossless, dense)
