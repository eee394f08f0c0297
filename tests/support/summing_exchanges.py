"""Exchanges whose communicators sum containers on the way, and a transport that records what they send."""

import numpy as np

import grace_ext
from grace_ext.exchange.buckets import Tensor
from grace_ext.exchange.engine import Exchange
from grace_ext.pipeline.spec import parse_stage
from grace_ext.transport import CollectiveHandle, Transport
from support.exchanges import arrays_of

TOPK = "topk:0.1/rice/qsgd:7"


class Recorder(Transport):
    """Passes collectives on; keeps what this rank gave, and changes what it gets as `change` says."""

    def __init__(self, transport, change=None):
        self._transport, self._change = transport, change
        self.rank, self.size, self.hosts = transport.rank, transport.size, transport.hosts
        self.given = []

    def allgather(self, name, payload):
        self.given.append(("allgather", payload.size))
        return changed(self._transport.allgather(name, payload), self._change and self._change.get("allgather"))

    def allreduce(self, name, array):
        self.given.append(("allreduce", array.nbytes))
        return self._transport.allreduce(name, array)

    def alltoall(self, name, payload, splits):
        self.given.append(("alltoall", payload.size))
        assert sum(splits) == payload.size
        return changed(self._transport.alltoall(name, payload, splits), self._change and self._change.get("alltoall"))


def changed(handle, change):
    return CollectiveHandle(lambda: change(handle.wait()) if change else handle.wait())


def make(transport, communicator, spec=TOPK, memory="residual", d=5000, weight=1.0, **options):
    exchange = Exchange(transport, memory, weight, **options)
    tensors = [Tensor("a", d - d // 3, 2), Tensor("b", d // 3, 2)]
    exchange.set_buckets(
        [
            exchange.bucket(
                "bucket",
                tensors,
                grace_ext.compressor(spec, seed=options.get("seed", 0)),
                parse_stage("communicator", communicator),
            )
        ]
    )
    return exchange


def step(exchange, given):
    (bucket,) = exchange.buckets
    exchange.start(bucket, lambda out: np.copyto(out, given))
    exchange.advance()
    out = np.full(bucket.size, 7, np.float32)
    exchange.finish(bucket, out)
    return out, exchange.end_step()


def residual_of(exchange):
    state = arrays_of(exchange)
    return np.concatenate([state["residual:a"], state["residual:b"]])
