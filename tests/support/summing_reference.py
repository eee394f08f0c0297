"""Sums on the way as one process computes them, and as the ranks of a job do: for the checks of all adapters."""

import contextlib
import os
import threading

import numpy as np

import grace_ext
from grace_ext.exchange.buckets import Tensor
from grace_ext.exchange.engine import Exchange
from grace_ext.pipeline.spec import parse_stage
from grace_ext.transport import InProcessGroup, topology


def gradients(steps: int, ranks: int, d: int) -> np.ndarray:
    """float32[steps, ranks, d], the same wherever they are made."""
    return np.random.default_rng(d).standard_normal((steps, ranks, d)).astype(np.float32)


@contextlib.contextmanager
def on_two_hosts(rank: int):
    """Inside, even ranks count as being on one host, odd ones on another."""
    before = os.environ.get(topology.HOSTNAME_VARIABLE)
    os.environ[topology.HOSTNAME_VARIABLE] = f"host{rank % 2}"
    try:
        yield
    finally:
        os.environ.pop(topology.HOSTNAME_VARIABLE)
        if before is not None:
            os.environ[topology.HOSTNAME_VARIABLE] = before


def run(transport, communicator: str, spec: str, given: np.ndarray, memory="residual", wrap=lambda transport: transport):
    """given: float32[steps, d], of this rank -> the results of all steps, and the residual after them."""
    transport = wrap(transport)
    exchange = Exchange(transport, memory, 1 / transport.size)
    exchange.set_buckets(
        [
            exchange.bucket(
                "summing",
                [Tensor("w", given.shape[1], 2)],
                grace_ext.compressor(spec),
                parse_stage("communicator", communicator),
            )
        ]
    )
    (bucket,) = exchange.buckets
    if transport.hosts is None:
        exchange.check_config_digests(transport.allgather("summing.config", exchange.config_digest()).wait())
    outs = np.empty_like(given)
    try:
        for gradient, out in zip(given, outs, strict=True):
            exchange.start(bucket, lambda room, gradient=gradient: np.copyto(room, gradient))
            exchange.advance()
            exchange.finish(bucket, out)
            exchange.end_step()
        return outs, exchange.state_dict().get("residual", {}).get("w")
    finally:
        exchange.close()


def in_one_process(communicator: str, spec: str, given: np.ndarray, memory="residual") -> list:
    """given: float32[steps, ranks, d] -> what `run` gives on each rank, on two hosts."""
    ranks = given.shape[1]
    group, results = InProcessGroup(ranks, hosts=[rank % 2 for rank in range(ranks)]), [None] * ranks

    def work(rank):
        results[rank] = run(group.transport(rank), communicator, spec, given[:, rank], memory)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


#: (communicator, spec, memory, elements)
CASES = (
    ("sharded", "topk:0.05/rice/qsgd:7", "residual", 5001),
    ("tree", "topk:0.05/rice/qsgd:7", "residual", 5001),
    ("hierarchical", "topk:0.05/rice/qsgd:7", "residual", 5001),
    ("sharded", "dense/qsgd:4", "none", 600),
    ("tree", "randomk:0.1/fp16", "none", 700),
    ("hierarchical", "dense/qsgd:4", "none", 7),
    ("sharded", "dense/deflate", "residual", 1),
)


def check_against_one_process(transport, cases=CASES) -> None:
    """Bit for bit, with a gradient that is not finite in between."""
    for communicator, spec, memory, d in cases:
        given = gradients(3, transport.size, d)
        given[1, transport.size - 1, d // 2] = np.nan
        with on_two_hosts(transport.rank):
            outs, residual = run(transport, communicator, spec, given[:, transport.rank], memory)
        expected, kept = in_one_process(communicator, spec, given, memory)[transport.rank]
        assert not np.isfinite(outs[1]).all() and np.isfinite(outs[2:]).all(), (communicator, spec)
        assert np.array_equal(outs, expected, equal_nan=True), (communicator, spec)
        assert memory == "none" or np.array_equal(residual, kept), (communicator, spec)
