"""Exchanges of two tensors under a memory."""

import numpy as np

import grace_ext
from grace_ext.exchange.bucketing import group_tensors
from grace_ext.exchange.buckets import Tensor
from grace_ext.exchange.engine import Exchange
from grace_ext.pipeline.spec import parse_stage
from support.arrays import gauss

TENSORS = [Tensor("a", 3000, 2), Tensor("b", 2000, 2)]


SIZE, RANKS = 5000, 3


def gradient(rank, step):
    return gauss(SIZE, 100 * rank + step)


def make(transport, memory, spec="topk:0.1/rice/raw", weight=None, tensors=TENSORS, schedule=None, communicator="allgather"):
    exchange = Exchange(transport, memory, weight or 1 / transport.size, schedule=schedule)
    lists = group_tensors(tensors, exchange.memory_of, 2**30)
    exchange.set_buckets(
        [
            exchange.bucket(f"bucket{i}", members, grace_ext.compressor(spec), parse_stage("communicator", communicator))
            for i, members in enumerate(lists)
        ]
    )
    return exchange


def step(exchange, given):
    """given: the tensors of all buckets, joined -> the same of the result, and whether it was finite."""
    for bucket, part in _parts(exchange, given):
        exchange.start(bucket, lambda out, part=part: np.copyto(out, part))
    outs = [np.empty(bucket.size, np.float32) for bucket in exchange.buckets]
    for bucket, out in zip(exchange.buckets, outs, strict=True):
        exchange.finish(bucket, out)
    return np.concatenate(outs), exchange.end_step()


def _parts(exchange, given):
    start = 0
    for bucket in exchange.buckets:
        yield bucket, given[start : start + bucket.size]
        start += bucket.size


def topk(array, k):
    """A copy with only the k largest magnitudes."""
    kept = np.zeros_like(array)
    largest = np.argsort(-np.abs(array), kind="stable")[:k]
    kept[largest] = array[largest]
    return kept
