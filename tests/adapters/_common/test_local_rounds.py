"""What a preset of local steps fills in."""

import pytest

import grace_ext
from grace_ext import ConfigError
from grace_ext.adapters._common.local_rounds import RoundSettings
from grace_ext.means import ClippedMean, Median, SenderMean, WeightedMean


def options(preset, compression=None, **more):
    settings = RoundSettings(preset, 30, None, None, 1, 0, 0.0, "average")
    return settings.options(compression, None, more)


@pytest.mark.parametrize(
    "preset, compression, small",
    [
        ("sparseloco", None, "dense/lloyd:0.3"),
        ("sparseloco", "topk:0.01/rice/raw", "dense/raw"),
        ("diloco", None, "dense/raw"),
    ],
)
def test_small_tensors_follow_the_preset_unless_a_compression_is_given(preset, compression, small):
    rules = options(preset, compression).make_rules()
    assert rules.choose("bias", 128, 1) == grace_ext.compressor(small)


def test_a_rule_comes_before_the_preset():
    rules = options("sparseloco", rules={"bias": "dense/fp16"}).make_rules()
    assert rules.choose("bias", 128, 1) == grace_ext.compressor("dense/fp16")


@pytest.mark.parametrize(
    "preset, given, mean",
    [
        ("sparseloco", None, SenderMean),
        ("sparseloco", WeightedMean(), WeightedMean),
        ("sparseloco", ClippedMean(), ClippedMean),
        ("diloco", None, WeightedMean),
        ("muloco", None, WeightedMean),
        ("fedavg", None, WeightedMean),
    ],
)
def test_the_mean_follows_the_preset_unless_one_is_given(preset, given, mean):
    assert type(RoundSettings(preset, 30, None, None, 1, 0, 0.0, "average", mean=given).mean) is mean


def test_a_mean_that_does_not_go_with_the_weights_is_refused():
    with pytest.raises(ConfigError, match="takes no weights"):
        RoundSettings("sparseloco", 30, None, None, 1, 0, 0.0, "average", "samples", mean=Median())
