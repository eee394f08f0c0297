"""Exchanges under the communicator `auto`."""

import numpy as np

import grace_ext
from grace_ext.exchange.buckets import Tensor
from grace_ext.exchange.engine import Exchange
from grace_ext.pipeline.spec import parse_stage

TENSORS = [Tensor("a", 3000, 2), Tensor("b", 2000, 2)]


COMPRESSED, FLOAT32, FP16 = "allgather", "float32", "fp16"


def make(transport, spec="topk:0.05/rice/raw", memory="residual"):
    exchange = Exchange(transport, memory, 1 / transport.size)
    exchange.set_buckets(
        [
            exchange.bucket(f"bucket.{t.name}", [t], grace_ext.compressor(spec), parse_stage("communicator", "auto"))
            for t in TENSORS
        ]
    )
    return exchange


def step(exchange, given):
    """(float32[d], whether all was finite)"""
    parts = np.split(given, np.cumsum([bucket.size for bucket in exchange.buckets])[:-1])
    for bucket, part in zip(exchange.buckets, parts, strict=True):
        exchange.start(bucket, lambda out, part=part: np.copyto(out, part))
    out = [np.empty(bucket.size, np.float32) for bucket in exchange.buckets]
    for bucket, room in zip(exchange.buckets, out, strict=True):
        exchange.finish(bucket, room)
    return np.concatenate(out), exchange.end_step()
