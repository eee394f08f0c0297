"""Which of the codecs' work makes steps longer."""

import time
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest
from support.in_process_ranks import gradient, on_all_ranks

import grace_ext
from grace_ext.communicators.base import Pending, wait
from grace_ext.exchange import fusion
from grace_ext.exchange.buckets import Tensor
from grace_ext.exchange.engine import Exchange
from grace_ext.exchange.scheduler import Scheduler
from grace_ext.pipeline.spec import parse_stage
from grace_ext.transport import CollectiveHandle, Transport
from grace_ext.transport.metered import MeteredTransport


def handle(arrived):
    """arrived: what poll() says."""
    return CollectiveHandle(lambda: None, lambda: arrived)


class Silent(Transport):
    """Of a library that does not tell what has arrived."""

    rank, size = 0, 2

    def allgather(self, name, payload):
        return CollectiveHandle(lambda: None)


def silent_and_fused():
    group = fusion._Group(2, ["a"])
    return fusion.FusedTransport(Silent(), group).allgather("a", np.empty(0, np.uint8))


def meter_of(future=None):
    """Of a step whose bucket "other" is that future's."""
    scheduler = Scheduler(None, None, None, None)
    if future:
        scheduler._started["other"] = future
    return scheduler.overlap


def decode(bucket, pending, seconds):
    pending.add_seconds({"decode": seconds, "exchange": 5.0})
    return bucket.name


def late_beside(future):
    """After decoding for 2 seconds while this other bucket has the same yet to come."""
    meter = meter_of(future)
    bucket, other = SimpleNamespace(name="own"), SimpleNamespace(name="other")
    found = meter.decode(decode, bucket, Pending(handle(True), 0, {"decode": 1.0}), 2.0, others=[bucket, other])
    assert found == "own" and meter.late == 2
    return meter.exposed


def done(pending):
    future = Future()
    future.set_result(pending)
    return future


def test_decoding_is_hidden_by_a_bucket_that_is_still_on_its_way():
    assert late_beside(done(Pending(handle(arrived=False), 0, {}))) == 0


@pytest.mark.parametrize(
    "own",
    [
        pytest.param(handle(arrived=True), id="arrived"),
        pytest.param(fusion._Group(2, ["a"]).handle_of("a"), id="not sent yet"),
        pytest.param(Silent().allgather("a", None), id="nobody knows"),
        pytest.param(MeteredTransport(Silent(), None).allgather("a", np.empty(0)), id="nobody knows, metered"),
        pytest.param(silent_and_fused(), id="nobody knows, fused"),
    ],
)
def test_decoding_is_exposed_when_nothing_else_is_under_way(own):
    assert late_beside(done(Pending(own, 0, {}))) == 2


def test_encoding_is_always_exposed():
    """A sum, say, that goes on to the other ranks."""
    meter = meter_of(done(Pending(handle(arrived=False), 0, {})))
    pending = Pending(handle(True), 0, {"decode": 1.0, "index": 1.0})
    meter.decode(
        lambda _, pending: pending.add_seconds({"decode": 2.0, "index": 4.0}),
        SimpleNamespace(name="own"),
        pending,
        others=[SimpleNamespace(name="other")],
    )
    assert meter.late == 6 and meter.exposed == 4


def test_a_bucket_that_was_waited_for_is_not_asked_again():
    """Horovod's handles are gone then."""
    pending = Pending(handle(arrived=False), 0, {})
    wait(pending)
    assert late_beside(done(pending)) == 2
    pending.handle = handle(arrived=False)  # its next collective
    assert late_beside(done(pending)) == 0


def test_buckets_that_have_not_been_started_or_failed_hide_nothing():
    failed = Future()
    failed.set_exception(ValueError())
    for future in (None, Future(), failed):
        assert late_beside(future) == 2


def test_waiting_for_the_worker_is_exposed():
    meter = meter_of(done(Pending(handle(arrived=False), 0, {})))
    assert meter.wait_for(lambda: time.sleep(0.01) or 7) == 7
    assert meter.late == meter.exposed >= 0.01


@pytest.mark.parametrize("communicator", ["allgather", "sharded", "tree"])
def test_an_exchange_says_what_was_late_and_exposed(communicator):
    """The last bucket is, always."""

    def work(transport):
        exchange = Exchange(transport, "residual", 1 / transport.size)
        compressor, own = grace_ext.compressor("topk:0.1/rice/raw"), gradient(transport.rank)
        exchange.set_buckets(
            [
                exchange.bucket(
                    f"bucket{i}", [Tensor(f"t{i}", own.size, 2)], compressor, parse_stage("communicator", communicator)
                )
                for i in range(3)
            ]
        )
        for _ in range(3):
            for bucket in exchange.buckets:
                exchange.start(bucket, lambda to: own)
            exchange.advance()
            for bucket in exchange.buckets:
                exchange.finish(bucket, own.copy())
            exchange.end_step()
        return exchange.stats()

    for stats in on_all_ranks(work):
        for counted in (stats, stats["last_step"]):
            assert 0 < counted["exposed_seconds"] <= counted["late_seconds"]
        assert stats["last_step"]["late_seconds"] < stats["late_seconds"]
