"""An exchange of one bucket, and what it keeps."""

import numpy as np

import grace_ext
from grace_ext.exchange.buckets import Tensor
from grace_ext.exchange.engine import Exchange
from grace_ext.pipeline.spec import parse_stage

TENSORS = [Tensor("a", 3000, 2), Tensor("b", 2000, 2)]


def make(transport, spec="topk:0.1/rice/qsgd:7", communicator="allgather", memory="residual", **options):
    exchange = Exchange(transport, grace_ext.memory(memory), 1 / transport.size, **options)
    exchange.set_buckets(
        [exchange.bucket("bucket", TENSORS, grace_ext.compressor(spec), parse_stage("communicator", communicator))]
    )
    return exchange


def step(exchange, given):
    bucket = exchange.buckets[0]
    exchange.start(bucket, lambda out: np.copyto(out, given))
    out = np.empty(bucket.size, np.float32)
    exchange.finish(bucket, out)
    return out, exchange.end_step()


def arrays_of(exchange) -> dict:
    """All that an exchange keeps between steps, "field:tensor" -> array."""
    return {
        f"{field}:{name}": array
        for field, kept in exchange.state_dict().items()
        if field != "step"
        for name, array in kept.items()
    }
