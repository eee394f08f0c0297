"""The dictionaries of GRACE and DeepReduce."""

import re

import pytest

import grace_ext
from grace_ext import ConfigError, from_params

GRACE = [
    ({}, "dense/raw", "none", "allreduce"),
    (
        {"compressor": "topk", "compress_ratio": 0.01, "memory": "residual", "communicator": "allgather", "world_size": 8},
        "topk:0.01",
        "residual",
        "allgather",
    ),
    ({"compressor": "topk"}, "topk:0.3", "none", "allgather"),
    ({"compressor": "randomk", "compress_ratio": 0.1, "communicator": "allreduce"}, "randomk:0.1", "none", "allreduce"),
    ({"compressor": "fp16", "communicator": "broadcast"}, "dense/fp16", "none", "allgather"),
    ({"compressor": "dgc", "compress_ratio": 0.05, "memory": "residual"}, "dgc:0.05", "residual", "allgather"),
    ({"compressor": "dgc", "compress_ratio": 0.05, "memory": "dgc", "momentum": 0.8}, "dgc:0.05", "dgc:0.8", "allgather"),
    ({"compressor": "qsgd", "quantum_num": 64}, "dense/qsgd:levels=64:norm=l2", "none", "allgather"),
    ({"compressor": "qsgd"}, "dense/qsgd:levels=256:norm=l2", "none", "allgather"),
    ({"compressor": "threshold", "threshold": 0.01}, "threshold:0.01", "none", "allgather"),
    ({"compressor": "threshold", "threshold": 0.0}, "nonzero", "none", "allgather"),
    ({"compressor": "powersgd", "memory": "powersgd", "compress_rank": 4}, "powersgd:4", "residual", "allreduce"),
    ({"compressor": "sketch", "quantiles": 32}, "dense/sketchml:32", "none", "allgather"),
    ({"compressor": "3lc", "sparsity_multiplier": 1.5}, "dense/threelc:1.5", "none", "allgather"),
    ({"compressor": "signsgd", "communicator": "allgather"}, "dense/sign:one", "none", "majority"),
    ({"compressor": "signum"}, "dense/sign:one", "signum:0.9", "majority"),
    ({"compressor": "signum", "momentum": 0.5, "memory": "none"}, "dense/sign:one", "signum:0.5", "majority"),
    ({"compressor": "efsignsgd", "memory": "efsignsgd", "lr": 0.1}, "dense/sign", "residual", "allgather"),
    ({"compressor": "adaq", "compress_ratio": 0.05}, "adaq:0.05/onebit:0", "none", "allgather"),
    ({"compressor": "inceptionn"}, "dense/inceptionn", "none", "allgather"),
    (
        {"compressor": "inceptionn", "error_bound": 1e-4, "memory": "residual"},
        "dense/inceptionn:1e-4",
        "residual",
        "allgather",
    ),
    (
        {"compressor": "SKCompressCPU", "num_quantiles": 128, "sparsifier": "threshold", "threshold": 0.0},
        "nonzero/huffman/sketchml:128:entropy=huffman",
        "none",
        "allgather",
    ),
] + [({"compressor": name}, f"dense/{name}", "none", "allgather") for name in ("terngrad", "onebit", "natural")]


def test_names_of_methods_may_have_capitals():
    params = {"compressor": "TopK", "compress_ratio": 0.01, "deepreduce": "value", "value": "gzip"}
    assert from_params(params) == from_params(params | {"compressor": "topk"})
    assert (
        from_params({"compressor": "None", "deepreduce": "value", "value": "gzip"})["compression"] == "nonzero/auto/deflate"
    )


def test_all_tensors_are_voted_on():
    """A small tensor would be sent as it is otherwise, whose mean is in other units than the signs of the others."""
    for method in ("signsgd", "signum"):
        assert from_params({"compressor": method})["rules"] == {"*": "dense/sign:one"}
    assert "rules" not in from_params({"compressor": "topk"})


TOPK = {"compressor": "topk", "compress_ratio": 0.01, "memory": "residual", "communicator": "allgather"}


DEEPREDUCE = [
    ({"deepreduce": "index", "index": "bloom", "micro-benchmark": True}, "bloom:leftmost:fpr=0.001/raw"),
    ({"deepreduce": "index", "index": "bloom", "policy": "p0", "fpr": 0.01}, "bloom:p0:fpr=0.01/raw"),
    ({"deepreduce": "index", "index": "rle"}, "rle/raw"),
    ({"deepreduce": "index", "index": "huffman"}, "huffman:bytes/raw"),
    ({"deepreduce": "index", "index": "rlhff"}, "huffman/raw"),
    ({"deepreduce": "value"}, "auto/polyfit"),
    ({"deepreduce": "value", "value": "polyfit_cpu", "poly_degree": 3}, "auto/polyfit:3"),
    ({"deepreduce": "value", "value": "gzip"}, "auto/deflate"),
    ({"deepreduce": "value", "value": "doubleexp"}, "auto/dexp"),
    ({"deepreduce": "value", "value": "qsgd", "bucket_size": 128}, "auto/qsgd:levels=127:norm=l2:bucket=128"),
    ({"deepreduce": "both"}, "bloom:leftmost:fpr=0.001/polyfit"),
    (
        {"deepreduce": "both", "index": "bloom", "policy": "random", "fpr": 0.01, "value": "qsgd"},
        "bloom:p1:fpr=0.01/qsgd:levels=127:norm=l2",
    ),
]


@pytest.mark.parametrize(("params", "spec", "memory", "communicator"), GRACE)
def test_params_of_grace(params, spec, memory, communicator):
    before = dict(params)
    found = from_params(params)
    assert params == before
    assert str(grace_ext.compressor(found["compression"])) == str(grace_ext.compressor(spec))
    assert (found["memory"], found["communicator"]) == (memory, communicator)


@pytest.mark.parametrize(("params", "spec"), DEEPREDUCE)
def test_params_of_deepreduce(params, spec):
    found = from_params({**TOPK, **params})
    assert grace_ext.compressor(found["compression"]) == grace_ext.compressor(f"topk:0.01/{spec}")
    assert found["memory"] == "residual" and found["communicator"] == "allgather"


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ("topk", "params is a dictionary, not str"),
        ({"compressor": "signmean"}, "compressor='signmean' is not there; known: 3lc, adaq, dgc"),
        ({"compressor": "signsgd", "communicator": "allreduce"}, "majority of signs, which an allreduce cannot"),
        ({"compressor": "signsgd", "memory": "residual"}, "memory='residual'; allowed: none"),
        ({"compressor": "signum", "memory": "dgc"}, "memory='dgc'; allowed: none"),
        ({"compressor": "efsignsgd", "lr": 0.1}, "memory=None; allowed: efsignsgd"),
        ({"compressor": "adaq", "compress_ratio": 0.1, "deepreduce": "value"}, "needs one of topk, randomk"),
        ({"compressor": ["topk"]}, "is not there"),
        ({"compressor": "topk", "compres_ratio": 0.1}, "compres_ratio: unknown, or without a meaning"),
        ({"compressor": "fp16", "compress_ratio": 0.1}, "compress_ratio: unknown, or without a meaning"),
        ({**TOPK, "deepreduce": "index", "index": "rle", "fpr": 0.1}, "fpr: unknown, or without a meaning"),
        ({**TOPK, "deepreduce": "indices"}, "deepreduce='indices'; allowed: None, index, value, both"),
        ({**TOPK, "deepreduce": "index", "index": "golomb"}, "index='golomb'; allowed: bloom, bloom_cpu, rle"),
        ({**TOPK, "deepreduce": "index", "policy": "p9"}, "policy='p9'; allowed: naive"),
        ({**TOPK, "deepreduce": "value", "value": ["qsgd"]}, re.escape("value=['qsgd']; allowed: polyfit")),
        ({"compressor": "fp16", "deepreduce": "value"}, "deepreduce='value' needs one of topk, randomk"),
        ({"memory": "efsignsgd"}, "memory='efsignsgd'; allowed: none, residual, powersgd, dgc"),
        ({"communicator": "ring"}, "communicator='ring'; allowed: None, allreduce, allgather, broadcast"),
        ({"compressor": "topk", "compress_ratio": 3}, "topk: density=3"),
    ],
)
def test_params_that_cannot_be(params, message):
    with pytest.raises(ConfigError, match=message):
        from_params(params)
