"""The cost model against bytes really counted, and against algorithms carried out message by message."""

import math

import numpy as np
import pytest
from support.in_process_ranks import gradient, on_all_ranks

import grace_ext
from grace_ext import ConfigError
from grace_ext._util.rng import Stream
from grace_ext.pipeline import spec
from grace_ext.policy import codec_timing
from grace_ext.policy import cost_model as cost
from grace_ext.transport import CollectiveHandle, Transport

FREE = {"encode": lambda elements: 0.0, "decode": lambda elements, containers: 0.0}
LINK = cost.Link(setup=1e-3, alpha=1e-4, beta=1e-8)
LINKS = dict.fromkeys(("allgather", "allreduce", "alltoall"), LINK)


class Counting(Transport):
    """Passes collectives on and counts bytes: what this rank hands over, and what comes from others."""

    def __init__(self, transport):
        self._transport, self.rank, self.size = transport, transport.rank, transport.size
        self.payload, self.received, self.names = 0, 0, []

    def _passed(self, name, handle, payload, own):
        self.names.append(name)
        self.payload += payload
        result = handle.wait()
        self.received += result.size - own if name != "allreduce" else 0
        return CollectiveHandle.finished(result)

    def allgather(self, name, payload):
        return self._passed("allgather", self._transport.allgather(name, payload), payload.size, payload.size)

    def alltoall(self, name, payload, splits):
        handle = self._transport.alltoall(name, payload, splits)
        return self._passed("alltoall", handle, payload.size, splits[self.rank])

    def allreduce(self, name, array):
        return self._passed("allreduce", self._transport.allreduce(name, array), array.nbytes, 0)


def size_of(name):
    """The size of this compressor's containers depends on the number of elements alone."""
    compressor = grace_ext.compressor(name)
    return lambda elements, summed: compressor.compress(gradient(99, elements)).size


@pytest.mark.parametrize("d", [5000, 4999, 3])
@pytest.mark.parametrize("ranks", range(2, 9))
@pytest.mark.parametrize(
    "communicator, name",
    [
        ("allgather", "topk:0.1/raw/raw"),
        ("sharded", "topk:0.1/raw/raw"),
        ("tree", "topk:0.1/raw/raw"),
        ("sharded", "dense/fp16"),
        ("allreduce", "dense/fp16"),
    ],
)
def test_bytes_are_those_of_the_communicators(communicator, name, ranks, d):
    compressor, one = grace_ext.compressor(name), spec.parse_stage("communicator", communicator)

    def work(transport):
        counting = Counting(transport)
        pending = one.start(counting, "bucket", compressor, gradient(transport.rank, d), None, Stream(rank=transport.rank))
        one.finish(pending, counting, np.empty(d, np.float32), 1.0)
        assert pending.wire_bytes == counting.payload
        return counting

    size = (lambda elements, summed: 2 * elements) if communicator == "allreduce" else size_of(name)
    step = cost.step_of(communicator, ranks, d, cost.Codec(size, **FREE))
    counted = on_all_ranks(work, ranks)
    assert cost.bytes_of(step, "payload").tolist() == [rank.payload for rank in counted]
    collectives = [part.name for part in step if isinstance(part, cost.Collective)]
    assert all(rank.names == collectives for rank in counted)
    if communicator != "allreduce":
        assert cost.bytes_of(step, "received").tolist() == [rank.received for rank in counted]
    assert cost.bytes_of(step, "sent").sum() == pytest.approx(cost.bytes_of(step, "received").sum())


@pytest.mark.parametrize("ranks", range(2, 9))
def test_a_ring_allgather_is_its_messages(ranks):
    payloads = np.random.default_rng(ranks).integers(0, 100, ranks)
    sent, received = np.zeros(ranks), np.zeros(ranks)
    for round in range(ranks - 1):
        for rank in range(ranks):  # passes on what it got in the round before
            message = payloads[(rank - round) % ranks]
            sent[rank] += message
            received[(rank + 1) % ranks] += message
    part = cost.ring_allgather(payloads)
    assert part.sent.tolist() == sent.tolist() and part.received.tolist() == received.tolist()
    assert part.rounds == ranks - 1 and part.path == (ranks - 1) * payloads.max()


@pytest.mark.parametrize("ranks", range(2, 9))
def test_a_ring_allreduce_is_its_messages(ranks):
    sums, messages = [[rank + 10.0 * i for i in range(ranks)] for rank in range(ranks)], 0
    expected = np.sum(sums, axis=0)
    for round in range(2 * (ranks - 1)):
        moved = [(rank, (rank - round) % ranks, sums[rank][(rank - round) % ranks]) for rank in range(ranks)]
        for rank, i, value in moved:
            target = sums[(rank + 1) % ranks]
            target[i] = target[i] + value if round < ranks - 1 else value
        messages += 1
    assert all(row == expected.tolist() for row in sums)
    part = cost.ring_allreduce(ranks, 8.0 * ranks)  # 8 bytes a message
    assert part.rounds == messages and part.path == part.sent[0] == part.received[0] == 8 * messages


def codec():
    return cost.Codec(
        lambda elements, summed: 20 + elements / 50,
        lambda elements: 1e-5 + 1e-9 * elements,
        lambda elements, containers: 1e-10 * elements + 1e-5 * containers,
    )


def test_bytes_of_sharded_do_not_grow_with_the_ranks_and_those_of_allgather_do():
    d = 10**6
    steps = {name: [cost.step_of(name, ranks, d, codec()) for ranks in (4, 8, 64)] for name in cost.STEPS}
    payload = {name: [cost.bytes_of(one, "payload").max() for one in each] for name, each in steps.items()}
    sent = {name: [cost.bytes_of(one, "sent").mean() for one in each] for name, each in steps.items()}
    # What a rank hands over is its whole container and 20 bytes of each slice's header more.
    assert payload["sharded"] == pytest.approx([d / 50 + 20 * ranks for ranks in (4, 8, 64)])
    assert sent["sharded"][1] / sent["sharded"][0] == pytest.approx((2 * 7 / 8) / (2 * 3 / 4), rel=0.01)
    assert sent["allgather"][1] / sent["allgather"][0] == pytest.approx(7 / 3)
    assert sent["sharded"][2] < 2.2 * d / 50 < 62 * d / 50 < sent["allgather"][2]


@pytest.mark.parametrize("communicator", cost.STEPS)
def test_time_grows_with_ranks_and_latency(communicator):
    steps = [cost.step_of(communicator, ranks, 10**6, codec()) for ranks in (2, 4, 16, 128, 1024)]
    seconds = [cost.codec_seconds(one) + cost.wire_seconds(one, LINKS) for one in steps]
    assert seconds == sorted(seconds) and len(set(seconds)) == 5
    # Messages one after the other: some for each rank, in every communicator.
    slower = dict.fromkeys(LINKS, cost.Link(LINK.setup, LINK.alpha + 1e-3, LINK.beta))
    rounds = sum(part.rounds for part in steps[-1] if isinstance(part, cost.Collective))
    assert rounds >= 1023
    assert cost.wire_seconds(steps[-1], slower) - cost.wire_seconds(steps[-1], LINKS) == pytest.approx(1e-3 * rounds)


def test_the_way_through_a_tree_takes_each_level_after_the_other():
    step = cost.step_of(
        "tree",
        8,
        1000,
        cost.Codec(lambda elements, summed: 100.0 * summed, lambda elements: 1.0, lambda elements, containers: 0.25),
    )
    collectives = [part for part in step if isinstance(part, cost.Collective)]
    assert [part.sent.tolist() for part in collectives[:3]] == [
        [0, 100, 0, 100, 0, 100, 0, 100],
        [0, 0, 200, 0, 0, 0, 200, 0],
        [0, 0, 0, 0, 400, 0, 0, 0],
    ]
    assert [part.path for part in collectives] == [100, 200, 400, 7 * 800]
    assert cost.codec_seconds(step) == 4 * 1.0 + 4 * 0.25
    # Four ranks encode at a time, then two, one, one; all decode the last container.
    assert cost.codec_seconds(step, cores=2) == (2 + 1 + 1 + 1) + 0.25 * (2 + 1 + 1 + 4)


def test_a_rank_of_sharded_encodes_each_slice_once_and_the_others_are_what_it_sums():
    step = cost.step_of(
        "sharded",
        4,
        1001,
        cost.Codec(
            lambda elements, summed: elements,
            lambda elements: elements,
            lambda elements, containers: 1e4 * elements + 1e7 * containers,
        ),
    )
    sending, summing, all_sums = (part.seconds for part in step if isinstance(part, cost.Work))
    assert sending == 1001 - 250
    assert summing == 1e4 * 251 + 1e7 * 3 + 251
    assert all_sums == 1e4 * 1001 + 1e7 * 4


def test_ranks_take_turns_on_cores():
    step = cost.step_of("allgather", 8, 1000, codec())
    assert cost.codec_seconds(step, cores=2) == pytest.approx(4 * cost.codec_seconds(step))
    assert cost.codec_seconds(step, cores=8) == cost.codec_seconds(step, cores=100) == cost.codec_seconds(step)


@pytest.mark.parametrize("link", [LINK, cost.Link(0, 1e-4, 1e-8), cost.Link(1e-3, 0, 1e-8), cost.Link(1e-3, 1e-4, 0)])
def test_a_fit_finds_the_link_that_made_the_samples(link):
    samples = [(rounds, path, link.seconds(rounds, path)) for rounds in (1, 3) for path in (0, 10**3, 10**5, 10**7)]
    found = cost.fit(samples)
    assert [found.setup, found.alpha, found.beta] == pytest.approx([link.setup, link.alpha, link.beta], rel=1e-6, abs=1e-15)


def test_a_fit_has_no_negative_coefficient():
    samples = [(1, 0, 2e-3), (3, 0, 1e-3), (1, 10**6, 1e-2), (3, 10**6, 1e-2)]  # more rounds took less time
    found = cost.fit(samples)
    assert found.alpha == 0 and found.setup > 0 and found.beta > 0

    def error(link):
        return math.fsum((link.seconds(rounds, path) / seconds - 1) ** 2 for rounds, path, seconds in samples)

    for factor in (0.99, 1.01):
        assert error(found) < error(cost.Link(factor * found.setup, 0, found.beta))
        assert error(found) < error(cost.Link(found.setup, 0, factor * found.beta))
    assert error(found) < error(cost.Link(found.setup, 1e-5, found.beta))


@pytest.mark.parametrize("arguments", [("gossip", 4, 100), ("sharded", 1, 100), ("tree", 4, 0)])
def test_what_cannot_be_modelled_is_said(arguments):
    with pytest.raises(ConfigError, match="no cost model|at least 2 and 1"):
        cost.step_of(*arguments, codec())


def test_a_curve_goes_through_its_points():
    curve = codec_timing.Curve({10: 1.0, 1000: 100.0})
    assert [curve(x) for x in (10, 100, 1000)] == pytest.approx([1, 10, 100])
    assert curve(1) == pytest.approx(1) and curve(5000) == pytest.approx(500)
    assert codec_timing.Curve({1: 1.0, 4: 2.0}, grows=False)(99) == pytest.approx(2)


@pytest.mark.parametrize("name, grows", [("topk:0.01/raw/raw", False), ("threshold:3", True)])
def test_measured_sizes_are_those_of_containers(name, grows):
    d, compressor = 2**16, grace_ext.compressor(name)
    measured = codec_timing.measure_codec(compressor, [gradient(rank, d) for rank in range(4)], slices_of=(1, 8, 64))
    if grows:  # the more gradients are summed, the more elements exceed the threshold
        assert 1 < measured.size(d, 2) / measured.size(d, 1) < measured.size(d, 4) / measured.size(d, 1)
        assert measured.size(d, 8) == measured.size(d, 4)  # nothing is known of more
    else:
        for count in (1, 8, 64):
            assert measured.size(d // count, 3) == pytest.approx(compressor.compress(gradient(5, d // count)).size)
    assert measured.encode(d) > 0 and measured.encode(d // 64) > 0 and measured.decode(d, 8) > measured.decode(d, 7) > 0


def test_measured_values_of_an_allreduce():
    measured = codec_timing.measure_reducible_codec(grace_ext.compressor("dense/fp16"), gradient(0, 1001))
    assert measured.size(1001, 1) == 2002 and measured.encode(1001) > 0 and measured.decode(1001, 1) > 0
