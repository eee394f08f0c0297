"""Rules choose a spec for each tensor."""

import pytest

import grace_ext
from grace_ext import ConfigError
from grace_ext.policy import DEFAULT_ROWS_SPEC, DEFAULT_SPEC, Rules


def test_rules():
    rules = Rules("topk:0.02", {"*.bias": "dense/fp16", "emb*": "topk:0.5/bitmap", ">=1000000": "topk:0.001"})
    assert str(rules.choose("fc.bias", 5, 1)) == "dense/auto/fp16"
    assert str(rules.choose("embedding", 10, 2)) == "topk:0.5/bitmap/raw"
    assert rules.choose("fc.weight", 1_000_000, 2).sparsifier.density == 0.001
    assert rules.choose("fc.weight", 999_999, 2).sparsifier.density == 0.02
    assert rules.choose("norm.weight", 5000, 1).reducible_dtype == "float32"
    assert rules.choose("small", 1024, 2).reducible_dtype == "float32"
    assert str(rules.choose("embedding", 5000, 2, as_rows=True)) == "topk:0.5/bitmap/raw"
    assert rules.choose("table", 5000, 2, as_rows=True).sparsifier.density == 0.02
    assert Rules().choose("table", 5000, 2, as_rows=True) == grace_ext.compressor(DEFAULT_ROWS_SPEC)
    assert Rules().choose("table", 5000, 2) == grace_ext.compressor(DEFAULT_SPEC)
    assert Rules().choose("biases", 5000, 1, as_rows=True).reducible_dtype == "float32"
    for wrong in ("<=many", "<", "", 3):
        with pytest.raises(ConfigError, match="size"):
            Rules(rules={wrong: "dense"})
    with pytest.raises(ConfigError, match="known: "):
        Rules(rules={"*": "topkk"})
