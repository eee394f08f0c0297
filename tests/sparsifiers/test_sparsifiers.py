"""What any sparsifier refuses and sees."""

import numpy as np
import pytest
from support.arrays import gauss

import grace_ext
from grace_ext import ConfigError
from grace_ext._util.rng import Stream
from grace_ext.exchange.buckets import Bucket, Tensor
from grace_ext.memory.none import NoMemory
from grace_ext.pipeline.container import parse
from grace_ext.pipeline.spec import parse_stage


@pytest.mark.parametrize(
    "text, message",
    [
        ("topk:0.1:per=layer", "allowed: bucket, tensor, chunk"),
        ("threshold:0", "above 0"),
        ("threshold:-1", "above 0"),
        ("threshold:1e-60", "above 0"),
        ("threshold:inf", "finite"),
        ("threshold:nan", "finite"),
        ("threshold:1e39", "finite"),
        ("dgc:0", "density=0.0; allowed"),
        ("dgc:1.5", "density=1.5; allowed"),
        ("dgc:sample=0", "sample=0.0; allowed"),
        ("dgc:sample=2", "sample=2.0; allowed"),
        ("randomk:0", "density=0.0; allowed"),
        ("randomk:nan", "density=nan; allowed"),
        ("randomk:unbiased=maybe", "not a bool"),
        ("topk:0.1:per=chunk/raw", "needs a transform before it"),
        ("topk:0.1/shared", "'topk'"),
        ("dense/shared/raw", "'dense'"),
    ],
)
def test_what_is_not_allowed(text, message):
    with pytest.raises(ConfigError, match=message):
        grace_ext.compressor(text)


def test_the_bucket_tells_its_sizes():
    tensors = [Tensor("a", 100, 2), Tensor("b", 300, 2)]
    bucket = Bucket(
        "b",
        tensors,
        grace_ext.compressor("topk:0.01:per=tensor/raw/raw"),
        parse_stage("communicator", "allgather"),
        NoMemory(),
    )
    transport = grace_ext.communicators.InProcessGroup(1).transport(0)
    out = np.empty(400, np.float32)
    pending = bucket.start(transport, lambda into: np.copyto(into, np.arange(1, 401, dtype=np.float32)), Stream())
    assert bucket.finish(pending, transport, out, 1.0)
    assert np.flatnonzero(out).tolist() == [99, 397, 398, 399]


@pytest.mark.parametrize("text", ["dgc:0.01", "randomk:0.001", "threshold:100", "nonzero"])
def test_one_bad_value_far_from_the_sample(text):
    for bad in (np.nan, np.inf, -np.inf):
        for at in (0, 123_457, 299_999):
            dense = gauss(300_000)
            dense[at] = bad
            assert parse(grace_ext.compressor(text).compress(dense)).non_finite
            memory = grace_ext.memory("residual")
            state, room = memory.begin("w", dense.size)
            assert grace_ext.compressor(text).encode_compensated(dense, state, room, Stream()).non_finite
