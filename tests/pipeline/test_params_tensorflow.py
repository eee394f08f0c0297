"""The dictionaries of DeepReduce for TensorFlow."""

import pytest

import grace_ext
from grace_ext import ConfigError, from_params

BLOOM = {"compress_method": "bloom", "bloom_fpr": 0.01, "compress_ratio": 0.01}
TENSORFLOW = [
    (BLOOM, "topk:0.01/bloom:leftmost:fpr=0.01/raw", "none"),
    (BLOOM | {"bloom_policy": "policy_zero", "horovod_size": 8}, "topk:0.01/bloom:p0:fpr=0.01/raw", "none"),
    (BLOOM | {"bloom_policy": "randomK", "bloom_verbosity": 0}, "topk:0.01/bloom:p1:fpr=0.01/raw", "none"),
    (BLOOM | {"bloom_policy": "conflict_sets"}, "topk:0.01/bloom:p2:fpr=0.01/raw", "none"),
    (BLOOM | {"bloom_false_positives_aware": False}, "topk:0.01/bloom:naive:fpr=0.01/raw", "none"),
    (BLOOM | {"bloom_on": "randomk"}, "randomk:0.01/bloom:leftmost:fpr=0.01/raw", "none"),
    (
        {"compress_method": "bloom", "bloom_fpr": 0.1, "bloom_on": "threshold", "threshold_val": 0.5},
        "threshold:0.5/bloom:leftmost:fpr=0.1/raw",
        "none",
    ),
    ({"compress_method": "doubleexp", "compress_ratio": 0.1, "use_memory": True}, "topk:0.1/auto/dexp", "residual:1.0"),
    (
        {"compress_method": "polyseg", "polynomial_degree": 4, "model_name": "vgg16", "use_memory": True, "beta": 0.9},
        "topk:0.3/auto/polyfit:3",
        "residual:0.9",
    ),
    ({"compress_method": "polyseg", "polynomial_degree": 1, "approximation_mode": "all"}, "dense/polyfit:0", "none"),
]


@pytest.mark.parametrize(("params", "spec", "memory"), TENSORFLOW)
def test_params_of_deepreduce_for_tensorflow(params, spec, memory):
    found = from_params(params)
    assert grace_ext.compressor(found["compression"]) == grace_ext.compressor(spec)
    assert found["memory"] == memory and found["communicator"] == "allgather"


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"compress_method": "zip"}, "compress_method='zip'; allowed: bloom, doubleexp, polyseg"),
        ({"compress_method": "bloom"}, "bloom_fpr is missing"),
        (BLOOM | {"bloom_policy": "p0"}, "bloom_policy='p0'; allowed: leftmostK"),
        (BLOOM | {"bloom_policy": "randomK", "bloom_false_positives_aware": False}, "allowed: leftmostK"),
        (BLOOM | {"compressor": "topk"}, "compressor: unknown, or without a meaning"),
        (BLOOM | {"use_memory": True, "gamma": 0.1}, "gamma=0.1; allowed: 1"),
        (BLOOM | {"average": False}, "average=False; allowed: True"),
        ({"compress_method": "polyseg"}, "polynomial_degree=None; allowed: integers from 1 on"),
    ],
)
def test_params_that_cannot_be(params, message):
    with pytest.raises(ConfigError, match=message):
        from_params(params)
