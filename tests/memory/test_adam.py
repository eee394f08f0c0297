"""adam, against its formulas, in real exchanges."""

import numpy as np
import pytest
from support.exchanges import arrays_of
from support.in_process_ranks import on_all_ranks
from support.memory_exchanges import RANKS, gradient, make, step

import grace_ext
from grace_ext import ConfigError
from grace_ext.exchange.buckets import Tensor
from grace_ext.exchange.row_buckets import row_bucket
from grace_ext.transport import InProcessGroup

TENSORS = [Tensor("a", 3000, 2, shape=(30, 100)), Tensor("b", 2000, 3, shape=(20, 10, 10))]


def update_size(s, found):
    """The root mean square of s / found, both [rows, columns], as if s**2 was the product of its sums by row and column."""
    square = np.square(s.astype(float).reshape(found.shape))
    return np.sqrt(np.mean(np.outer(square.sum(1), square.sum(0)) / square.sum() / np.square(found)))


def root(squares, arrivals, tensor, beta2=0.95, smoothing=0.02, clip=np.inf):
    """The root of the second moment of a matrix, float64[rows, columns], after all steps.

    squares: V's mean square of each step. arrivals: s of each step.
    """
    rows = tensor.shape[0]
    weights = np.array([beta2 ** (len(arrivals) - 1 - i) for i in range(len(arrivals))])
    moments = np.tensordot(weights, np.square(np.reshape(arrivals, (len(arrivals), rows, -1)).astype(float)), 1)
    shares = [np.sqrt((sums / sums.mean() + smoothing) / (1 + smoothing)) for sums in (moments.sum(1), moments.sum(0))]
    found = np.sqrt(weights @ squares / weights.sum()) * np.outer(*shares)
    return found * max(1, update_size(arrivals[-1], found) / clip)


def run(transport, steps, factor=1.0, spec="topk:0.1/rice/raw", memory="adam:clip=1e9", exchange=None):
    """What arrived in each step, and the denominators of each step, where gradients were scaled in between."""
    exchange = exchange or make(transport, memory, spec, tensors=TENSORS)
    outs, roots = [], []
    for i in range(steps):
        out, _ = step(exchange, gradient(transport.rank, i))
        outs.append([out[:3000], out[3000:]])
        kept = exchange.buckets[0].memory
        roots.append(
            [
                np.outer(*kept.denominator(t, lambda at, s=s: factor * s[at], 1e-3))
                for t, s in zip(TENSORS, outs[-1], strict=True)
            ]
        )
    return outs, roots, arrays_of(exchange)


def means(steps):
    """Mean squares of the mean gradients, [tensors][steps]."""
    found = [np.mean([gradient(rank, i) for rank in range(RANKS)], axis=0) for i in range(steps)]
    return [[np.mean(np.square(part)) for part in parts] for parts in ([g[:3000] for g in found], [g[3000:] for g in found])]


@pytest.mark.parametrize("spec", ["topk:0.1/rice/raw", "randomk:0.2", "powersgd:4"])
def test_the_denominator_is_that_of_its_formulas(spec):
    results = on_all_ranks(lambda transport: run(transport, 6, spec=spec), RANKS)
    outs, roots, _ = results[0]
    for number, tensor in enumerate(TENSORS):
        expected = root(means(6)[number], [out[number] for out in outs], tensor)
        found = roots[-1][number]
        # The sketch tells V within sqrt(2 / 8 / 6) or so of itself; the shares of rows and columns are exact.
        ratios = found / expected
        np.testing.assert_allclose(ratios, ratios.mean(), rtol=1e-4)
        assert 0.6 < ratios.mean() < 1.4
    for others in results:
        for theirs, ours in zip((*others[0], *others[1]), (*outs, *roots), strict=True):
            assert all(map(np.array_equal, theirs, ours))


def test_large_updates_are_cut_down():
    clip = 0.05
    free, cut = (
        on_all_ranks(lambda transport, m=memory: run(transport, 4, memory=m), RANKS)[0]
        for memory in ("adam:clip=1e9", f"adam:clip={clip}")
    )
    for out, wide, narrow in zip(free[0], free[1], cut[1], strict=True):
        for s, before, after in zip(out, wide, narrow, strict=True):
            update = update_size(s, before)
            np.testing.assert_allclose(after, before * max(1, update / clip), rtol=1e-4)
            assert update > clip


def test_sums_of_some_steps_are_not_cut_down():
    """Where all elements wait for two steps, the update's root mean square is that number's root."""

    def last(transport, memory):
        exchange = make(transport, memory, "threshold:1.5/rice/raw", tensors=TENSORS)
        steady = np.random.default_rng(1).uniform(0.9, 1.1, 5000).astype(np.float32)
        for _ in range(30):
            out, _ = step(exchange, steady)
        kept = exchange.buckets[0].memory
        return out[:3000], np.outer(*kept.denominator(TENSORS[0], lambda at: out[at], 1e-3))

    (s, free), (_, root) = (
        on_all_ranks(lambda transport, m=memory: last(transport, m), RANKS)[0] for memory in ("adam:clip=1e9", "adam")
    )
    assert 1.2 < update_size(s, free) < 2
    np.testing.assert_array_equal(root, free)


@pytest.mark.parametrize("factor", [0.5, 2.0**-15])
def test_clipped_gradients_count_as_clipped(factor):
    """Whoever makes every gradient smaller before the step, as by half, gets the same step."""
    (outs, whole, _), (_, clipped, _) = (
        on_all_ranks(lambda transport, f=part: run(transport, 5, f, memory="adam"), RANKS)[0] for part in (1.0, factor)
    )
    assert len(outs) == 5
    for wide, narrow in zip(whole, clipped, strict=True):
        for one, other in zip(wide, narrow, strict=True):
            np.testing.assert_allclose(other, factor * one, rtol=1e-5)


def test_the_sum_over_ranks_and_a_weight_scale_the_root_as_the_result():
    plain, tripled = (
        on_all_ranks(lambda t, w=weight: run(t, 3, exchange=make(t, "adam", tensors=TENSORS, weight=w)), RANKS)[0]
        for weight in (1 / RANKS, 1.0)
    )
    for one, other in zip(plain[1][-1], tripled[1][-1], strict=True):
        np.testing.assert_allclose(other, RANKS * one, rtol=1e-5)


def test_moments_of_all_ranks_are_the_same_and_follow_their_tensors():
    states = [arrays for _, _, arrays in on_all_ranks(lambda transport: run(transport, 3), RANKS)]
    shared = {key: array for key, array in states[0].items() if key.startswith("second_moment")}
    assert {key: array.size for key, array in shared.items()} == {"second_moment:a": 133, "second_moment:b": 123}
    assert all(np.array_equal(array, state[key]) for state in states for key, array in shared.items())


def test_a_rank_that_has_joined_adds_nothing():
    def work(transport):
        exchange = make(transport, "adam", tensors=TENSORS)
        if transport.rank == 2:
            exchange.begin_step(gradients=False)
            exchange.start_empty(exchange.buckets[0])
            exchange.finish(exchange.buckets[0], np.empty(5000, np.float32))
            exchange.end_step()
        else:
            step(exchange, gradient(transport.rank, 0))
        return arrays_of(exchange)["second_moment:a"]

    assert len({array.tobytes() for array in on_all_ranks(work, RANKS)}) == 1


def test_without_an_arrival_there_is_no_step():
    exchange = make(InProcessGroup(1).transport(0), "adam", tensors=TENSORS)
    rows, columns = exchange.buckets[0].memory.denominator(TENSORS[0], lambda position: 0.0, 1e-3)
    assert np.isinf(rows).all() and columns.tolist() == [1.0] * 100


@pytest.mark.parametrize("density", [0.04, 0.05, 0.1, 0.5])
def test_the_first_moment_is_as_long_as_the_density_and_loses_nothing(density):
    """Its mean delay is 9 times the density, in steps, and there is none below a density of 5 %, whatever a schedule says."""

    def work(transport):
        exchange = make(
            transport, "adam", f"topk:{density}/raw/raw", tensors=TENSORS, schedule={"density": "hyperbolic:steps=3"}
        )
        given, sent, moment = np.zeros(5000), np.zeros(5000), np.zeros(5000)
        for i in range(6):
            own = gradient(transport.rank, i)
            given += own
            sent += step(exchange, own)[0]
            moment = factor * moment + (1 - factor) * own
            state = arrays_of(exchange)
            held, residual = (
                np.concatenate([state.get(f"{field}:{t.name}", np.zeros(t.size)) for t in TENSORS])
                for field in ("held", "residual")
            )
            np.testing.assert_allclose(held, factor / (1 - factor) * moment, rtol=1e-4, atol=1e-5)
            assert held.any() == (density >= 0.05)
        return sent, given - held - residual

    factor = 9 * density / (1 + 9 * density) if density >= 0.05 else 0.0
    results = on_all_ranks(work, RANKS)
    for sent, _ in results:
        np.testing.assert_allclose(sent, np.mean([rest for _, rest in results], axis=0), atol=1e-4)


def test_residuals_follow_a_falling_learning_rate():
    exchange = make(InProcessGroup(1).transport(0), "adam", tensors=TENSORS)
    # Falls of less than 1 % wait, a rate that rises or is 0 changes nothing, and no residual grows by more than 10 times.
    rates = ((1.0, 1), (0.995, 1), (0.98, 1 / 0.98), (0.0, 1), (2.0, 1), (0.02, 10), (0.01, 2))
    for i, (rate, factor) in enumerate(rates):
        out, _ = step(exchange, gradient(0, i))
        before = arrays_of(exchange)
        exchange.buckets[0].memory.denominator(TENSORS[0], lambda at, s=out: s[at], rate)
        after = arrays_of(exchange)
        assert before["residual:a"].any()
        np.testing.assert_allclose(after["residual:a"], before["residual:a"] * np.float32(factor), rtol=1e-6)
        assert np.array_equal(after["residual:b"], before["residual:b"])


@pytest.mark.filterwarnings("error")
def test_squares_beyond_float32_end_no_rank_by_a_warning():
    def work(transport):
        exchange = make(transport, "adam", tensors=TENSORS)
        for value in (1e30, np.float32(3e38), np.inf):
            given = gradient(transport.rank, 0)
            given[[5, 13, 4000]] = value
            out, _ = step(exchange, given)
            memory = exchange.buckets[0].memory
            assert all(np.isfinite(array).all() for array in arrays_of(exchange).values())
            for tensor, part in zip(TENSORS, (out[:3000], out[3000:]), strict=True):
                memory.denominator(tensor, lambda at, s=part: s[at], 1e-3)

    on_all_ranks(work, RANKS)


def test_zeros_and_empty_tensors():
    tensors = [Tensor("a", 3000, 2, shape=(30, 100)), Tensor("none", 0, 2, shape=(0, 7))]
    exchange = make(InProcessGroup(1).transport(0), "adam", tensors=tensors)
    for given in (np.zeros(3000, np.float32), gradient(0, 0)[:3000]):
        out, finite = step(exchange, given)
        roots = [
            np.outer(*exchange.buckets[0].memory.denominator(tensor, lambda at, s=out: s[at], 1e-3)) for tensor in tensors
        ]
        assert finite and np.isfinite(roots[0]).all() and roots[1].size == 0
    assert roots[0].min() > 0


def test_the_elements_of_a_result_tell_as_much_as_the_result():
    def work(transport, sparse):
        exchange, roots = make(transport, "adam", "topk:0.02/rice/raw", tensors=TENSORS), []
        memory = exchange.buckets[0].memory
        assert memory.works_at_positions(exchange.buckets[0].compressor)
        if sparse:
            memory.on_received = lambda name, out, scale: (
                memory.on_received_at(name, (at := np.flatnonzero(out).astype(np.uint32)), out[at], scale),
                memory._sums.pop(name),
            )
        for i in range(4):
            out, _ = step(exchange, gradient(transport.rank, i))
            parts = np.split(out, [3000])
            roots += [memory.denominator(t, part.item, 1e-3) for t, part in zip(TENSORS, parts, strict=True)]
        return [one.tobytes() for pair in roots for one in pair], arrays_of(exchange)["second_moment:a"].tobytes()

    dense, sparse = (on_all_ranks(lambda transport, s=s: work(transport, s), RANKS) for s in (False, True))
    assert dense == sparse


@pytest.mark.parametrize("memory, spec", [("adam", "topk:0.05"), ("muon", "dense/qsgd:4")])
def test_what_needs_the_whole_gradient_says_so(memory, spec):
    exchange = make(InProcessGroup(1).transport(0), memory, spec, tensors=TENSORS)
    assert not exchange.buckets[0].memory.works_at_positions(exchange.buckets[0].compressor)


def test_what_is_sent_whole_has_a_residual_or_nothing():
    for spec, memory in (("dense/qsgd:7", "residual:0.9"), ("dense/raw", "none"), ("topk:0.1", "adam:0.9")):
        exchange = make(InProcessGroup(1).transport(0), "adam:decay=0.9", spec, tensors=TENSORS)
        assert str(exchange.buckets[0].memory) == memory


def test_tables_whose_gradients_come_as_rows_have_a_residual():
    memory = grace_ext.memory("adam:decay=0.9")
    found = [
        row_bucket(name, Tensor(name, 5000, 2, shape=(500, 10)), grace_ext.compressor("topk:0.1"), memory) for name in "ab"
    ]
    assert [str(bucket.memory) for bucket in found] == ["residual:0.9"] * 2 and found[0].memory is found[1].memory
    with pytest.raises(ConfigError, match="keeps no state by rows"):
        row_bucket(
            "c", Tensor("c", 5000, 2, shape=(500, 10)), grace_ext.compressor("topk:0.1"), grace_ext.memory("momentum")
        )


def test_its_options():
    for spec, message in (
        ("adam:beta2=1", "beta2=1"),
        ("adam:beta2=0", "beta2=0"),
        ("adam:smoothing=0", "smoothing=0"),
        ("adam:clip=0", "clip=0"),
        ("adam:clip=inf", "clip=inf"),
        ("adam:0", "decay=0"),
    ):
        with pytest.raises(ConfigError, match=message):
            grace_ext.memory(spec)
    with pytest.raises(ConfigError, match="needs an optimizer whose step it can change.*not SGD"):
        grace_ext.memory("adam").check_optimizer("SGD", 0.0, None)
    grace_ext.memory("adam").check_optimizer("Adam", 0.9, "adam")
