"""Communicators that sum containers on the way, against the same computed in one place with plain loops."""

import functools

import numpy as np
import pytest
from support.exchanges import arrays_of
from support.in_process_ranks import gradient, on_all_ranks
from support.summing_exchanges import TOPK, Recorder, make, residual_of, step

import grace_ext
from grace_ext import ConfigError, ContainerError, ExchangeError
from grace_ext.communicators.slices import equal_slices, in_slice
from grace_ext.exchange.shadow import shadow_step
from grace_ext.observe.advice import CodecCostCheck
from grace_ext.pipeline.spec import parse_stage

all_of_them = pytest.mark.parametrize("communicator", ["sharded", "tree", "hierarchical"])
both = pytest.mark.parametrize("communicator", ["sharded", "tree"])


def sharded(sent, gradients, residual):
    """One step in plain loops. sent(array, name, rank) -> what receivers decode; gradients, residual: float32[ranks, d] ->
    the sum, and the next residuals."""
    out, following = np.zeros_like(gradients[0]), np.zeros_like(residual)
    ranks, d = gradients.shape
    for owner in range(ranks):
        part = slice(d * owner // ranks, d * (owner + 1) // ranks)
        summed = gradients[owner, part] + residual[owner, part]
        for rank in range(ranks):
            if rank != owner:
                array = gradients[rank, part] + residual[rank, part]
                arrived = sent(array, f"a[{owner}]", rank)
                summed += arrived
                following[rank, part] = array - arrived
        out[part] = sent(summed, f"a[{owner}]", -2 - owner)
        following[owner, part] = summed - out[part]
    return out, following


def tree(sent, gradients, residual):
    """The same along a tree."""
    sums, following = gradients.copy(), np.zeros_like(residual)
    ranks, distance = len(gradients), 1

    def send(rank):
        summed = sums[rank] + residual[rank]
        arrived = sent(summed, "a", rank)
        following[rank] = summed - arrived
        return arrived

    while distance < ranks:
        for rank in range(distance, ranks, 2 * distance):
            sums[rank - distance] += send(rank)
        distance *= 2
    return send(0), following


def reference(communicator, spec, gradients, weight, memory):
    """gradients: float32[steps, ranks, d] -> the results of the steps, and the residuals of the ranks after them."""
    compressor, outs, residual = grace_ext.compressor(spec), [], np.zeros_like(gradients[0])
    for i, given in enumerate(gradients):

        def sent(array, name, rank, i=i):
            return grace_ext.decompress(compressor.compress(array, name=name, step=i, rank=rank), array.size)

        out, residual = {"sharded": sharded, "tree": tree}[communicator](sent, given, residual)
        outs.append(np.float32(weight) * out)
        residual = residual if memory else 0 * residual
    return outs, residual


@pytest.mark.parametrize("d", [5000, 4999, 7])
@pytest.mark.parametrize(
    "spec, memory, ranks",
    [
        (TOPK, "residual", 5),
        (TOPK, "none", 4),
        ("topk:0.1/rice/raw", "residual", 1),
        ("topk:0.9/bitmap", "residual", 2),
        ("dense/qsgd:4", "residual", 4),
        ("dense/fp16", "none", 3),
        ("randomk:0.1/fp16", "residual", 3),
        ("topk:0.05/bloom/raw", "residual", 3),
        ("threshold:1.5", "residual", 3),
        ("dense/onebit", "residual", 3),
    ],
)
@both
def test_it_is_what_plain_loops_give(communicator, spec, memory, ranks, d):
    gradients = np.stack([[gradient(10 * rank + i, d) for rank in range(ranks)] for i in range(4)])

    def work(transport):
        exchange = make(transport, communicator, spec, memory, d, weight=0.3)
        outs = [step(exchange, given)[0] for given in gradients[:, transport.rank]]
        return outs, residual_of(exchange) if memory == "residual" else 0

    expected, residuals = reference(communicator, spec, gradients, 0.3, memory == "residual")
    for (outs, residual), own in zip(on_all_ranks(work, ranks), residuals, strict=True):
        np.testing.assert_array_equal(outs, expected)
        np.testing.assert_array_equal(residual, own if memory == "residual" else 0)


@pytest.mark.parametrize("d", [0, 1, 3])
@all_of_them
def test_fewer_elements_than_ranks(communicator, d):
    def work(transport):
        exchange = make(transport, communicator, "dense/deflate", "none", d)
        return step(exchange, np.arange(1, d + 1, dtype=np.float32))

    for out, finite in on_all_ranks(work, 4):
        assert out.tolist() == [4.0 * i for i in range(1, d + 1)] and finite


def test_tensors_have_their_share_within_slices():
    """1000 large elements and 500 small ones, in two slices: of each tensor a tenth is sent in each."""
    parts = slice(0, 750), slice(750, 1000), slice(1000, 1500)

    def work(transport):
        exchange = make(transport, "sharded", "topk:0.1:per=tensor/rice/raw", d=1500)
        given = gradient(transport.rank, 1500)
        given[1000:] *= 1e-3
        out, _ = step(exchange, given)
        return out, residual_of(exchange)

    results = on_all_ranks(work, 2)
    for out, residual in results:
        assert [np.count_nonzero(out[part]) for part in parts] == [75, 25, 50]
        assert [np.count_nonzero(residual[part] == 0) for part in parts] == [75, 25, 50]


def test_slices_are_equal_parts_of_all():
    for d in (0, 1, 7, 64, 1001):
        for ranks in (1, 2, 3, 8, 65):
            sizes = [part.stop - part.start for part in equal_slices(d, ranks)]
            assert sum(sizes) == d and max(sizes) - min(sizes) <= 1
            assert [i for part in equal_slices(d, ranks) for i in range(d)[part]] == list(range(d))


def test_a_slice_of_vectors_is_that_of_their_array():
    array = np.arange(30, dtype=np.float32)
    vectors = np.split(array, [4, 4, 5, 17])
    for part in (slice(0, 30), slice(3, 5), slice(4, 4), slice(6, 11), slice(17, 30)):
        views = in_slice(vectors, part)
        assert all(view.size and np.may_share_memory(view, array) for view in views)
        assert np.array_equal(np.concatenate([array[:0], *views]), in_slice(array, part))


@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize(
    "memory", ["residual", "residual:bits=8", "momentum:0.5", "adam", "muon", "dgc:masking=false", "none"]
)
def test_sharded_reads_and_writes_vectors_as_one_array(memory, ranks):
    """Gradients that lie in several vectors, and results that go there: the bits are those of one array."""

    def run(transport, in_parts):
        exchange = make(transport, "sharded", "topk:0.04/rice/qsgd:7", memory, weight=0.3)
        (bucket,), outs = exchange.buckets, []
        assert bucket.takes_parts == (memory != "none")
        for i in range(4):
            given = gradient(10 * transport.rank + i)
            given[77 * i] = np.inf if i == 2 and transport.rank == 0 else 0
            parts = np.split(given, [sum(bucket.sizes[:1])])
            exchange.start(bucket, (lambda out, parts=parts: parts) if in_parts else lambda out, g=given: np.copyto(out, g))
            out = given if in_parts else np.empty_like(given)
            exchange.finish(bucket, parts if in_parts and not bucket.memory.sees_results else out)
            assert exchange.end_step() == (i != 2)
            outs.append(out)
        return outs, arrays_of(exchange)

    for (outs, kept), (expected, state) in on_all_ranks(
        lambda transport: (run(transport, True), run(transport, False)), ranks
    ):
        assert all(map(functools.partial(np.array_equal, equal_nan=True), expected, outs))
        assert state.keys() == kept.keys() and all(np.array_equal(state[key], kept[key]) for key in state)


@pytest.mark.parametrize(
    "spec, memory",
    [
        (TOPK, "residual"),
        ("topk:0.02:per=tensor/rice/raw", "residual"),
        ("randomk:0.05", "residual"),
        ("dense/qsgd:4", "residual"),
        ("dct:16/topk:0.1/rice/qsgd:7", "residual"),
        (TOPK, "dgc:0.0:masking=false"),
    ],
)
@all_of_them
def test_nothing_is_lost(communicator, spec, memory):
    """What all ranks owe together is what was given and did not come yet."""

    def work(transport):
        exchange = make(transport, communicator, spec, memory)
        received = sum(step(exchange, gradient(100 * transport.rank + i))[0].astype(np.float64) for i in range(20))
        return received, residual_of(exchange)

    results = on_all_ranks(work, 4)
    given = sum(gradient(100 * rank + i).astype(np.float64) for rank in range(4) for i in range(20))
    owed = sum(residual.astype(np.float64) for _, residual in results)
    assert np.abs(owed).max() > 0.1
    for received, _ in results:
        np.testing.assert_allclose(received + owed, given, atol=1e-3)


@all_of_them
def test_what_is_owed_outlives_a_change_of_ranks(communicator):
    """By redistribution, as when a job goes on with another number of ranks."""

    def first(transport):
        exchange = make(transport, communicator)
        received = sum(step(exchange, gradient(100 * transport.rank + i))[0] for i in range(5))
        return received, exchange

    before = on_all_ranks(first, 4)
    states = [exchange.state_dict()["residual"] for _, exchange in before]
    memory = grace_ext.memory("residual")
    shares = {name: memory.redistribute([{"residual": state[name]} for state in states], 2) for name in ("a", "b")}

    def second(transport):
        exchange = make(transport, communicator)
        exchange.load_state_dict({"residual": {name: share["residual"] for name, share in shares.items()}})
        return sum(step(exchange, np.zeros(5000, np.float32))[0] for _ in range(60))

    given = sum(gradient(100 * rank + i).astype(np.float64) for rank in range(4) for i in range(5))
    for later in on_all_ranks(second, 2):
        np.testing.assert_allclose(before[0][0] + later, given, atol=0.02)


@all_of_them
def test_random_positions_are_those_of_the_sum(communicator):
    """So what a rank sends is in the result of the same step."""
    gradients = [gradient(rank) for rank in range(4)]
    expected = gradients[0] + gradients[1] + gradients[2] + gradients[3]
    for out, _ in on_all_ranks(
        lambda transport: step(make(transport, communicator, "randomk:0.1"), gradients[transport.rank]), 4
    ):
        assert np.count_nonzero(out) == 500
        np.testing.assert_allclose(out[out != 0], expected[out != 0], atol=1e-5)


def test_bytes_of_slices_do_not_grow_with_the_ranks():
    """Handed to collectives: as much with 8 ranks as with 4. On the links: 2 (n - 1) / n times that."""

    def work(transport):
        recorder = Recorder(transport)
        exchange = make(recorder, "sharded", "topk:0.01/rice/qsgd:7", d=200_000)
        step(exchange, gradient(transport.rank, 200_000))
        assert exchange.stats()["bytes_out"] == sum(size for _, size in recorder.given)
        times = {"alltoall": 1, "allgather": transport.size - 1}
        return exchange.stats()["bytes_out"], sum(times[kind] * size for kind, size in recorder.given)

    handed, sent = {}, {}
    for ranks in (2, 4, 8):
        handed[ranks], sent[ranks] = np.max(on_all_ranks(work, ranks), axis=0)
        assert abs(sent[ranks] / handed[ranks] - 2 * (ranks - 1) / ranks) < 0.05
    container = grace_ext.compressor("topk:0.01/rice/qsgd:7").compress(gradient(0, 200_000)).size
    assert handed[8] <= 1.05 * handed[4] <= 1.1 * container
    assert sent[8] <= 1.2 * sent[4] < 0.4 * 7 * container  # an allgather: 7 containers


def test_each_rank_of_a_tree_sends_one_container():
    def work(transport):
        recorder = Recorder(transport)
        step(make(recorder, "tree"), gradient(transport.rank))
        return recorder.given

    for ranks in (1, 2, 5, 8):
        for given in on_all_ranks(work, ranks):
            assert [kind for kind, _ in given] == (ranks - 1).bit_length() * ["alltoall"] + ["allgather"]
            assert sum(size > 0 for _, size in given) == 1


@pytest.mark.parametrize("at", [0, 17, 2600, 4999])
@pytest.mark.parametrize("memory", ["residual", "none"])
@pytest.mark.parametrize("spec", [TOPK, "randomk:0.01", "dct/topk:0.1/raw", "threshold:100.0"])
@all_of_them
def test_a_non_finite_gradient_reaches_all_ranks_and_no_memory(communicator, spec, memory, at):
    """Wherever in the gradient of whichever rank: its own slice or another's."""

    def work(transport):
        exchange = make(transport, communicator, spec, memory)
        step(exchange, gradient(transport.rank))
        before = arrays_of(exchange)
        given = gradient(5 + transport.rank)
        if transport.rank == 1:
            given[at] = np.inf if at % 2 else np.nan
        out, finite = step(exchange, given)
        assert not finite and np.isnan(out).all()
        after = arrays_of(exchange)
        assert before.keys() == after.keys() and all(np.array_equal(before[name], after[name]) for name in before)
        assert step(exchange, gradient(9))[1]

    on_all_ranks(work, 4)


@all_of_them
def test_a_sum_that_overflows_is_not_finite(communicator):
    given = np.full(5000, 3e38, np.float32)
    for out, finite in on_all_ranks(lambda transport: step(make(transport, communicator), given), 3):
        assert not finite and np.isnan(out).all()


@all_of_them
def test_ranks_that_joined_pass_on_sums(communicator):
    """Rank r gives r gradients. The residuals of those that joined stay, and nothing that the others send gets lost."""

    def work(transport):
        exchange = make(transport, communicator, "topk:0.02/rice/qsgd:7", joinable=True)
        received = [step(exchange, gradient(10 * transport.rank + i))[0] for i in range(transport.rank)]
        before = arrays_of(exchange)

        def room(bucket):
            received.append(np.empty(bucket.size, np.float32))
            return received[-1]

        while shadow_step(exchange, room):
            pass
        after = arrays_of(exchange)
        assert all(np.array_equal(before.get(name, 0 * after[name]), after[name]) for name in after)
        return np.array(received), residual_of(exchange) if transport.rank else 0, exchange.step

    results = on_all_ranks(work, 4)
    given = sum(gradient(10 * rank + i).astype(np.float64) for rank in range(4) for i in range(rank))
    owed = sum(residual for _, residual, _ in results)
    for received, _, steps in results:
        assert steps == 3
        np.testing.assert_array_equal(received, results[0][0])
        np.testing.assert_allclose(received.sum(axis=0) + owed, given, atol=1e-3)


@all_of_them
def test_joining_before_any_step(communicator):
    assert on_all_ranks(lambda transport: shadow_step(make(transport, communicator, joinable=True), None), 3) == [False] * 3


@pytest.mark.parametrize("what", ["alltoall", "allgather"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda array: array[:-1],
        lambda array: np.append(array, np.uint8(1)),
        lambda array: array[::-1].copy(),
        lambda array: np.append(array, array),
    ],
)
@both
def test_damaged_containers_are_told_to_all(communicator, what, damage):
    """Also what only one rank has seen; nobody waits in vain, and no memory changes."""

    def work(transport):
        hit = transport.rank == 2 or what == "allgather"
        exchange = make(Recorder(transport, {what: damage} if hit else None), communicator)
        error = ContainerError if hit else ExchangeError
        with pytest.raises(error, match=None if hit else "rank 2 got something other"):
            step(exchange, gradient(transport.rank))
        exchange.abort()
        assert not residual_of(exchange).any()

    on_all_ranks(work, 4)


@both
def test_what_cannot_be_summed_on_the_way_is_refused(communicator):
    def bucket(spec, memory):
        on_all_ranks(lambda transport: make(transport, communicator, spec, memory), 1)

    for spec, memory, message in (
        ("randomk:0.1:unbiased=true", "none", "unbiased=false"),
        (TOPK, "ef21", "use communicator allgather"),
        (TOPK, "dgc", "dgc:masking=false"),
    ):
        with pytest.raises(ConfigError, match=message):
            bucket(spec, memory)
    bucket("powersgd:2", "residual")  # goes by allreduce, as with every communicator
    with pytest.raises(ConfigError, match="factors"):
        parse_stage("communicator", communicator).check(grace_ext.compressor("powersgd:2"))


def test_statistics_count_all_containers_and_both_collectives():
    def work(transport):
        exchange = make(transport, "sharded")
        for i in range(3):
            step(exchange, gradient(i))
        cost = CodecCostCheck(transport)
        exchange.start(exchange.buckets[0], lambda out: np.copyto(out, gradient(3)))
        exchange.finish(exchange.buckets[0], np.empty(5000, np.float32))
        cost.add(exchange.buckets[0], pending := exchange.pending(exchange.buckets[0]))
        assert cost._step[2] == 2 * 3 / 4 * pending.wire_bytes
        exchange.end_step()
        return exchange.stats()

    for stats in on_all_ranks(work, 4):
        assert stats["index_codecs"] == {"rice": 4 * 4}
        assert {"select", "index", "value", "container", "residual", "exchange", "decode"} <= stats["seconds"].keys()
