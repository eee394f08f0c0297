"""Which of the codecs' work makes steps longer."""

import time
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest
from test_communicators import gradient, on_all_ranks

import grace_ext
from grace_ext.communicators.base import Pending, wait
from grace_ext.exchange.buckets import Tensor
from grace_ext.exchange.engine import Exchange
from grace_ext.exchange.overlap import Late
from grace_ext.pipeline.spec import parse_stage
from grace_ext.transport import Transport, fusion
from grace_ext.transport.metered import Metered


class Handle:
    """arrived: what poll() says."""

    def __init__(self, arrived):
        self.poll = lambda: arrived

    def wait(self):
        return self


class Silent(Transport):
    """Of a library that does not tell what has arrived."""

    rank, size = 0, 2

    def allgather(self, name, payload):
        return object()


def silent_and_fused():
    group = fusion._Group(Silent(), ["a"])
    return fusion.Member(Silent(), group).allgather("a", np.empty(0, np.uint8))


def decode(bucket, pending, seconds):
    pending.count({"decode": seconds, "exchange": 5.0})
    return bucket.name


def late_beside(future):
    """After decoding for 2 seconds while this other bucket has the same yet to come."""
    late = Late({"other": future} if future else {})
    bucket, other = SimpleNamespace(name="own"), SimpleNamespace(name="other")
    found = late.do(decode, bucket, Pending(Handle(True), 0, {"decode": 1.0}), 2.0, others=[bucket, other])
    assert found == "own" and late.seconds == 2
    return late.exposed


def done(pending):
    future = Future()
    future.set_result(pending)
    return future


def test_decoding_is_hidden_by_a_bucket_that_is_still_on_its_way():
    assert late_beside(done(Pending(Handle(arrived=False), 0, {}))) == 0


@pytest.mark.parametrize("handle", [
    pytest.param(Handle(arrived=True), id="arrived"),
    pytest.param(fusion._Part(fusion._Group(Silent(), ["a"]), "a"), id="not sent yet"),
    pytest.param(Silent().allgather("a", None), id="nobody knows"),
    pytest.param(Metered(Silent(), None).allgather("a", np.empty(0)), id="nobody knows, metered"),
    pytest.param(silent_and_fused(), id="nobody knows, fused")])
def test_decoding_is_exposed_when_nothing_else_is_under_way(handle):
    assert late_beside(done(Pending(handle, 0, {}))) == 2


def test_encoding_is_always_exposed():
    """A sum, say, that goes on to the other ranks."""
    late = Late({"other": done(Pending(Handle(arrived=False), 0, {}))})
    pending = Pending(Handle(True), 0, {"decode": 1.0, "index": 1.0})
    late.do(lambda _, pending: pending.count({"decode": 2.0, "index": 4.0}), SimpleNamespace(name="own"), pending,
            others=[SimpleNamespace(name="other")])
    assert late.seconds == 6 and late.exposed == 4


def test_a_bucket_that_was_waited_for_is_not_asked_again():
    """Horovod's handles are gone then."""
    pending = Pending(Handle(arrived=False), 0, {})
    wait(pending)
    assert late_beside(done(pending)) == 2
    pending.handle = Handle(arrived=False)  # its next collective
    assert late_beside(done(pending)) == 0


def test_buckets_that_have_not_been_started_or_failed_hide_nothing():
    failed = Future()
    failed.set_exception(ValueError())
    for future in (None, Future(), failed):
        assert late_beside(future) == 2


def test_waiting_for_the_worker_is_exposed():
    late = Late({"other": done(Pending(Handle(arrived=False), 0, {}))})
    assert late.wait(lambda: time.sleep(0.01) or 7) == 7
    assert late.seconds == late.exposed >= 0.01


@pytest.mark.parametrize("communicator", ["allgather", "sharded", "tree"])
def test_an_exchange_says_what_was_late_and_exposed(communicator):
    """The last bucket is, always."""
    def work(transport):
        exchange = Exchange(transport, "residual", 1 / transport.size)
        compressor, own = grace_ext.compressor("topk:0.1/rice/raw"), gradient(transport.rank)
        exchange.set_buckets([exchange.bucket(f"bucket{i}", [Tensor(f"t{i}", own.size, 2)], compressor,
                                              parse_stage("communicator", communicator)) for i in range(3)])
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
