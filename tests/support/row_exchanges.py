"""Exchanges of a table whose gradients come as rows."""

import numpy as np

import grace_ext
from grace_ext.exchange.buckets import Tensor
from grace_ext.exchange.engine import Exchange
from grace_ext.exchange.row_buckets import RowGradient, row_bucket

SHAPE = (300, 3, 8)


ROWS, WIDTH = 300, 24


def make(transport, spec, shape=SHAPE, memory="residual", **options):
    exchange = Exchange(transport, grace_ext.memory(memory), 1 / transport.size, **options)
    tensor = Tensor("emb", int(np.prod(shape)), len(shape), shape=shape)
    exchange.set_buckets([row_bucket("bucket", tensor, grace_ext.compressor(spec), exchange.memory_of(tensor))])
    return exchange


def step(exchange, given):
    """(the result, whether all was finite)."""
    out = RowGradient()
    exchange.start(exchange.buckets[0], lambda: given)
    exchange.finish(exchange.buckets[0], out)
    return out, exchange.end_step()


def rows_of(seed, n=40, width=WIDTH, rows=ROWS):
    """With duplicates."""
    rng = np.random.default_rng(seed)
    return RowGradient(rng.zipf(1.3, n) % rows, rng.standard_normal((n, width)).astype(np.float32))
