"""Exchanges of tensors that a low-rank method compresses."""

import numpy as np

import grace_ext
from grace_ext.exchange.buckets import Tensor
from grace_ext.exchange.engine import Exchange
from grace_ext.pipeline.spec import parse_stage

SHAPES = {"conv": (16, 4, 3, 3), "bias": (7,), "wide": (8, 90), "tall": (120, 12), "small": (3, 3)}
TENSORS = [Tensor(name, int(np.prod(shape)), len(shape), shape=shape) for name, shape in SHAPES.items()]


def make(transport, spec="powersgd:2", memory="residual", tensors=TENSORS, seed=0):
    exchange = Exchange(transport, grace_ext.memory(memory), 1 / transport.size, seed)
    exchange.set_buckets(
        [exchange.bucket("bucket", tensors, grace_ext.compressor(spec, seed), parse_stage("communicator", "allgather"))]
    )
    return exchange


def step(exchange, given, advance=True):
    bucket = exchange.buckets[0]
    exchange.start(bucket, lambda out: np.copyto(out, given))
    if advance:
        exchange.advance()
    out = np.empty(bucket.size, np.float32)
    exchange.finish(bucket, out)
    return out, exchange.end_step()
