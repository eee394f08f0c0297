"""Communicator `reduce_scatter`, against the same computed in one place with plain loops."""

import dataclasses

import numpy as np
import pytest
from support.exchanges import arrays_of
from support.in_process_ranks import on_all_ranks
from support.summing_exchanges import Recorder

import grace_ext
from grace_ext import ConfigError, ContainerError
from grace_ext.communicators.reduce_scatter import ReduceScatter
from grace_ext.exchange.buckets import Bucket, Tensor
from grace_ext.exchange.engine import Exchange
from grace_ext.pipeline.decoder import decompress
from grace_ext.rng import Stream

RANKS, SIZE = 4, 700  # elements of a slice


def make(transport, spec, memory="residual", weight=1.0):
    exchange = Exchange(transport, memory, weight)
    owners = [rank for rank in range(transport.size) if rank != transport.rank]
    tensors = [Tensor(f"a@{owner}", SIZE, 2, common_name=f"a@{i}") for i, owner in enumerate(owners)]
    compressor = grace_ext.compressor(spec)
    chosen = exchange.memory_of(tensors[0]).for_compressor(compressor)
    exchange.set_buckets([Bucket("bucket", tensors, compressor, ReduceScatter(), chosen)])
    return exchange


def step(exchange, gradient):
    """gradient: float32[ranks, SIZE] of this rank -> its slice of the sum, and whether all was finite."""
    (bucket,) = exchange.buckets
    exchange.start(bucket, lambda out: np.copyto(out, np.delete(gradient, exchange.transport.rank, 0).reshape(-1)))
    out = gradient[exchange.transport.rank].copy()
    exchange.finish(bucket, out)
    return out, exchange.end_step()


def gradients(steps=3):
    """float32[steps, sender, owner, SIZE]"""
    return np.random.default_rng(0).standard_normal((steps, RANKS, RANKS, SIZE)).astype(np.float32)


def reference(spec, given, weight):
    """The sums, float32[steps, owner, SIZE], and the residuals after the last, float32[sender, owner, SIZE]."""
    compressor, residual, sums = grace_ext.compressor(spec), np.zeros_like(given[0]), []
    for i, gradient in enumerate(given):
        summed = np.array([gradient[owner, owner] for owner in range(RANKS)])
        for sender in range(RANKS):
            stream = Stream(0, "a@0", i, sender)
            for owner in (rank for rank in range(RANKS) if rank != sender):
                array = gradient[sender, owner] + residual[sender, owner]
                own = dataclasses.replace(stream, name=f"a@0[{owner}]")
                arrived = decompress(compressor.encode(array, own).blob, SIZE)
                residual[sender, owner] = array - arrived
                summed[owner] += arrived
        sums.append(summed * np.float32(weight))
    return np.array(sums), residual


@pytest.mark.parametrize("weight", [1.0, 0.25])
@pytest.mark.parametrize("spec", ["dense/qsgd:4", "topk:0.05/rice/qsgd:7", "dense/raw"])
def test_each_rank_gets_the_sum_of_its_slice(spec, weight):
    given = gradients()

    def work(transport):
        exchange = make(transport, spec, weight=weight)
        results = [step(exchange, one[transport.rank])[0] for one in given]
        return results, arrays_of(exchange)

    sums, residual = reference(spec, given, weight)
    for owner, (results, kept) in enumerate(on_all_ranks(work, RANKS)):
        np.testing.assert_array_equal(results, sums[:, owner])
        for other in (rank for rank in range(RANKS) if rank != owner and spec != "dense/raw"):
            np.testing.assert_array_equal(kept[f"residual:a@{other}"], residual[owner, other])
        assert spec != "dense/raw" or not any(name.startswith("residual") for name in kept)


def test_all_ranks_learn_of_a_gradient_that_is_not_finite_for_one_owner():
    given = gradients(2)
    given[1, 2, 0, 5] = np.nan

    def work(transport):
        exchange = make(transport, "dense/qsgd:4")
        step(exchange, given[0, transport.rank])
        before = arrays_of(exchange)
        out, finite = step(exchange, given[1, transport.rank])
        return before, arrays_of(exchange), out, finite

    for before, after, out, finite in on_all_ranks(work, RANKS):
        assert not finite and np.isnan(out).all()
        assert all(np.array_equal(before[name], after[name]) for name in before if name.startswith("residual"))


def test_only_containers_of_the_others_slices_are_sent():
    given = gradients(1)[0]

    def work(transport):
        recorder = Recorder(transport)
        exchange = make(recorder, "dense/qsgd:4")
        step(exchange, given[transport.rank])
        return recorder.given

    (one,) = {size for given in on_all_ranks(work, RANKS) for _, size in given}
    assert one <= (RANKS - 1) * (SIZE / 2 + 4 * 2 + 20)


def test_a_damaged_container_is_refused():
    given = gradients(1)[0]

    def work(transport):
        exchange = make(Recorder(transport, {"alltoall": lambda received: received[:-1]}), "dense/qsgd:4")
        with pytest.raises(ContainerError):
            step(exchange, given[transport.rank, :2])

    on_all_ranks(work, 2)


def test_factors_are_refused():
    with pytest.raises(ConfigError, match="cannot carry"):
        ReduceScatter().check(grace_ext.compressor("powersgd:2"))
