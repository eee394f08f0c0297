"""onebit_adam and zeroone_adam, against a readable reference, in real exchanges."""

import numpy as np
import pytest
from support.arrays import same_bits
from support.exchanges import arrays_of
from support.in_process_ranks import on_all_ranks
from support.memory_exchanges import RANKS, SIZE, gradient, make, step
from support.reference_kernels.compressed_adam import CompressedAdam

import grace_ext
from grace_ext import ConfigError, ExchangeError
from grace_ext.exchange import checkpoint
from grace_ext.exchange.buckets import Tensor
from grace_ext.exchange.row_buckets import row_bucket
from grace_ext.exchange.shadow import shadow_step
from grace_ext.transport import InProcessGroup

ONE = [Tensor("a", SIZE, 2, shape=(50, 100))]
#: A memory -> in which of the first 12 steps it is exact, its beta1, beta2 and variance_floor.
EXACT = {
    "onebit_adam:3": ({0, 1, 2}, 0.9, 0.999, 0.1),
    "onebit_adam:4:beta1=0.8:beta2=0.9:variance_floor=0": ({0, 1, 2, 3}, 0.8, 0.9, 0.0),
    "onebit_adam:2:beta1=0": ({0, 1}, 0.0, 0.999, 0.1),
    "zeroone_adam:2": ({0, 1, 2, 4, 6, 10}, 0.9, 0.999, 0.1),
    "zeroone_adam:1:variance_floor=0.5": ({0, 1, 3, 7}, 0.9, 0.999, 0.5),
}


def own(rank, i):
    """Gradients whose elements differ in size, and whose mean does not vanish."""
    return (gradient(rank, i) + gradient(9, 9)) * np.linspace(0.01, 1, SIZE, dtype=np.float32)


def steps_of(exchange, rank, numbers, changed=lambda result: result, penalty=None):
    """What the exchange gives and the moments in each of these steps, by tensor."""
    for i in numbers:
        out, finite = step(exchange, own(rank, i))
        assert finite
        start, found = 0, []
        for bucket in exchange.buckets:
            for tensor in bucket.tensors:
                part = changed(out[start : start + tensor.size])
                found.append(bucket.memory.moments(tensor, part, penalty))
                start += tensor.size
        yield out, found


@pytest.mark.parametrize("spec", ["dense/onebit", "topk:0.1/rice/raw"])
@pytest.mark.parametrize("memory", EXACT)
def test_it_is_its_algorithm_step_by_step(memory, spec):
    exact, beta1, beta2, floor = EXACT[memory]
    penalty = np.linspace(-0.1, 0.1, SIZE, dtype=np.float32)

    def halved(result):
        return result * np.float32(0.5)

    def work(transport):
        exchange = make(transport, memory, spec, tensors=ONE)
        sent = []
        for _, found in steps_of(exchange, transport.rank, range(12), halved, penalty):
            sent.append((exchange.statistics.last.report()["compressed"]["ratio"], *found[0]))
        return sent, arrays_of(exchange)

    compressor = grace_ext.compressor(spec)
    reference = CompressedAdam(
        SIZE,
        RANKS,
        exact,
        lambda row: grace_ext.decompress(compressor.compress(row.astype(np.float32)), size=SIZE).astype(float),
        beta1,
        beta2,
        floor,
    )
    results = on_all_ranks(work, RANKS)
    for i, (ratio, first, root) in enumerate(results[0][0]):
        m, v = reference.step([own(rank, i) for rank in range(RANKS)], halved, penalty)
        assert (ratio == 1) == (i in exact), (i, ratio)
        np.testing.assert_allclose(first, m, rtol=0, atol=1e-4 * np.abs(m).max(), err_msg=f"step {i}")
        np.testing.assert_allclose(root, v, rtol=1e-4, err_msg=f"step {i}")
    for rank, (_, state) in enumerate(results):
        np.testing.assert_allclose(state["residual:a"], reference.residuals[rank], rtol=0, atol=1e-4)
        assert same_bits(state["moments:a"], results[0][1]["moments:a"])
    assert results[0][1]["moments:a"].size == 3 + 2 * SIZE


@pytest.mark.parametrize(
    "spec, communicator",
    [
        ("dense/deflate", "allgather"),
        ("dense/deflate", "sharded"),
        ("dense/deflate", "hierarchical"),
        ("randomk:1", "allreduce"),
    ],
)
def test_without_loss_it_is_adam_with_a_variance_that_freezes(spec, communicator):
    def work(transport):
        exchange = make(transport, "onebit_adam:3:variance_floor=0", spec, communicator=communicator)
        return [found for _, found in steps_of(exchange, transport.rank, range(8))]

    m = v = np.zeros(SIZE)
    results = on_all_ranks(work, RANKS)
    for i, (a, b) in enumerate(results[0]):
        g = np.mean([own(rank, i) for rank in range(RANKS)], axis=0).astype(float)
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * g * g if i < 3 else v
        root = np.sqrt(v / (1 - 0.999 ** min(i + 1, 3)))
        np.testing.assert_allclose(np.concatenate([a[0], b[0]]), m / (1 - 0.9 ** (i + 1)), rtol=0, atol=1e-5)
        np.testing.assert_allclose(np.concatenate([a[1], b[1]]), root, rtol=1e-4)
    for others in results[1:]:
        for theirs, ours in zip(others, results[0], strict=True):
            assert all(
                same_bits(x, y) for one, other in zip(theirs, ours, strict=True) for x, y in zip(one, other, strict=True)
            )


def test_the_sum_over_ranks_scales_both_moments_as_the_result():
    def work(transport, weight):
        exchange = make(transport, "zeroone_adam:2", "dense/onebit", weight=weight)
        return [found for _, found in steps_of(exchange, transport.rank, range(7))]

    mean, summed = (on_all_ranks(lambda t, w=weight: work(t, w), RANKS)[0] for weight in (1 / RANKS, 1.0))
    for one, other in zip(mean, summed, strict=True):
        for pair, scaled in zip(one, other, strict=True):
            for array, larger in zip(pair, scaled, strict=True):
                np.testing.assert_allclose(larger, RANKS * array, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("memory", ["onebit_adam:2", "zeroone_adam:1"])
@pytest.mark.parametrize("number", [1, 2, 5])
def test_a_training_goes_on_from_its_state_bit_by_bit(memory, number):
    def work(transport):
        exchange = make(transport, memory, "dense/onebit")
        list(steps_of(exchange, transport.rank, range(number)))
        other = make(transport, memory, "dense/onebit")
        other.load_state_dict(exchange.state_dict())
        pairs = zip(
            steps_of(exchange, transport.rank, range(number, 9)),
            steps_of(other, transport.rank, range(number, 9)),
            strict=True,
        )
        for (out, found), (theirs, moments) in pairs:
            assert same_bits(out, theirs)
            assert all(
                same_bits(x, y) for one, two in zip(found, moments, strict=True) for x, y in zip(one, two, strict=True)
            )
        mine, others = arrays_of(exchange), arrays_of(other)
        assert mine.keys() == others.keys() and all(same_bits(mine[key], others[key]) for key in mine)

    on_all_ranks(work, RANKS)


@pytest.mark.parametrize("number", [1, 4])
def test_another_number_of_ranks_takes_over(number):
    """The moments are the same, and the residuals are shared out."""

    def begin(transport):
        exchange = make(transport, "onebit_adam:2", "dense/onebit")
        list(steps_of(exchange, transport.rank, range(number)))
        return exchange.state_dict()

    states = on_all_ranks(begin, RANKS)

    def go_on(transport):
        exchange = make(transport, "onebit_adam:2", "dense/onebit")
        exchange.load_state_dict({"step": number, **checkpoint.redistribute(exchange, states, transport.size)})
        kept = exchange.state_dict()
        for name in "ab":
            assert same_bits(kept["moments"][name], states[0]["moments"][name])
            total = np.sum([state["residual"][name] for state in states], axis=0) if number > 2 else np.zeros(1)
            np.testing.assert_allclose(kept.get("residual", {}).get(name, 0), total / transport.size, rtol=0, atol=1e-6)
        return [found for _, found in steps_of(exchange, transport.rank, range(number, number + 3))]

    one, other = on_all_ranks(go_on, 2)
    for found, theirs in zip(one, other, strict=True):
        assert all(
            same_bits(x, y) for ours, pair in zip(found, theirs, strict=True) for x, y in zip(ours, pair, strict=True)
        )


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("number", [0, 1, 4])
def test_a_gradient_that_is_not_finite_on_one_rank_leaves_all_states(number):
    def work(transport):
        exchange = make(transport, "onebit_adam:2", "dense/onebit")
        list(steps_of(exchange, transport.rank, range(number)))
        before = arrays_of(exchange)
        for bad in (np.nan, np.inf):
            given = own(transport.rank, number)
            if transport.rank == 1:
                given[[17, 4000]] = bad
            out, finite = step(exchange, given)
            assert not finite and not np.isfinite(out).all()
            memory = exchange.buckets[0].memory
            for tensor, part in zip(exchange.buckets[0].tensors, (out[:3000], out[3000:]), strict=True):
                assert np.isinf(memory.moments(tensor, part)[1]).all()
            after = arrays_of(exchange)
            assert before.keys() == after.keys() and all(same_bits(before[key], after[key]) for key in before)
        return [found for _, found in steps_of(exchange, transport.rank, range(number, number + 3))]

    results = on_all_ranks(work, RANKS)
    assert all(np.isfinite(array).all() for found in results[0] for pair in found for array in pair)


def test_each_exchange_needs_one_step():
    exchange = make(InProcessGroup(1).transport(0), "onebit_adam:2", "dense/onebit")
    list(steps_of(exchange, 0, range(3)))
    saved = exchange.state_dict()
    step(exchange, own(0, 3))
    state = arrays_of(exchange)
    exchange.set_buckets(exchange.buckets)  # as DDP's are rebuilt between an exchange and the step
    with pytest.raises(ExchangeError, match="no step with what the last exchange gave for 'a'"):
        step(exchange, own(0, 4))
    exchange.abort()
    assert all(same_bits(state[key], array) for key, array in arrays_of(exchange).items())
    step(exchange, own(0, 3))
    memory, (tensor, _) = exchange.buckets[0].memory, exchange.buckets[0].tensors
    exchange.load_state_dict(saved)
    exchange.states_settled()
    step(exchange, own(0, 3))
    memory.forget_arrivals()  # of parameters without a gradient
    (out, _), *_ = steps_of(exchange, 0, [3])
    assert np.isinf(memory.moments(tensor, out[:3000])[1]).all()


def test_a_tensor_that_comes_in_later_has_a_warmup_of_its_own():
    def work(transport):
        exchange = make(transport, "onebit_adam:2", "dense/onebit")
        list(steps_of(exchange, transport.rank, range(3)))
        state = exchange.state_dict()
        del state["moments"]["b"]
        exchange.load_state_dict(state)
        frozen, ways = state["moments"]["a"][3 + 3000 :], []
        for _ in steps_of(exchange, transport.rank, range(3, 7)):
            ways.append(exchange.buckets[0].communicator.strategy)
        moments = exchange.state_dict()["moments"]
        assert same_bits(moments["a"][3 + 3000 :], frozen) and moments["a"][:2].tolist() == [7, 2]
        assert moments["b"][:2].tolist() == [4, 2]
        return ways

    assert on_all_ranks(work, RANKS) == [["float32", "allgather", "allgather", "allgather"]] * RANKS


@pytest.mark.filterwarnings("error")
def test_zeros_and_empty_tensors():
    tensors = [Tensor("a", SIZE, 2, shape=(50, 100)), Tensor("none", 0, 2, shape=(0, 7))]
    exchange = make(InProcessGroup(1).transport(0), "onebit_adam:2", "dense/onebit", tensors=tensors)
    for given in (np.zeros(SIZE, np.float32),) * 3 + (own(0, 0),):
        out, finite = step(exchange, given)
        memory = exchange.buckets[0].memory
        found = [memory.moments(tensor, part) for tensor, part in zip(tensors, (out, out[:0]), strict=True)]
        assert finite and all(np.isfinite(array).all() for pair in found for array in pair)
    assert found[0][1].min() > 0 and found[1][0].size == 0


def test_what_is_sent_exactly_is_left_to_the_optimizer():
    exchange = make(InProcessGroup(1).transport(0), "onebit_adam:1", "dense/raw")
    assert str(exchange.buckets[0].memory) == "none"


def test_what_is_refused():
    transport = InProcessGroup(1).transport(0)
    for memory, spec, communicator, message in (
        ("onebit_adam:1", "randomk:0.1:unbiased=true", "allgather", "unbiased already"),
        ("onebit_adam:1", "dense/onebit", "tree", "use allgather, sharded or hierarchical"),
    ):
        with pytest.raises(ConfigError, match=message):
            make(transport, memory, spec, communicator=communicator)
    for spec, message in (
        ("onebit_adam", "warmup_steps=None; allowed: integers from 1"),
        ("onebit_adam:0", "warmup_steps=0"),
        ("onebit_adam:5:beta1=1", "beta1=1"),
        ("zeroone_adam:0", "period=0"),
        ("zeroone_adam:beta2=1", "beta2=1"),
        ("zeroone_adam:beta2=0", "beta2=0"),
        ("zeroone_adam:variance_floor=-1", "variance_floor=-1"),
        ("zeroone_adam:variance_floor=inf", "variance_floor=inf"),
    ):
        with pytest.raises(ConfigError, match=message):
            grace_ext.memory(spec)
    memory = grace_ext.memory("onebit_adam:5:beta1=0.8")
    assert str(memory) == "onebit_adam:5:beta1=0.8" and memory == grace_ext.memory("onebit_adam:warmup_steps=5:beta1=0.8")
    memory.check_optimizer("Adam", 0.8, "adam", {"betas": (0.8, 0.999)})
    with pytest.raises(ConfigError, match="needs an optimizer whose step it can change.*not SGD"):
        memory.check_optimizer("SGD", 0.0, None)
    for beta1, beta2 in ((0.9, 0.999), (0.8, 0.95), (np.nan, 0.999)):
        with pytest.raises(
            ConfigError, match=f"has beta1=0.8 and beta2=0.999, the optimizer {beta1} and {beta2}: give both"
        ):
            memory.check_optimizer("Adam", beta1, "adam", {"betas": (beta1, beta2)})
    with pytest.raises(ConfigError, match="use it in an exchange"):
        memory.compensate("w", np.zeros(3, np.float32))
    with pytest.raises(ConfigError, match="keeps no state by rows"):
        row_bucket("c", Tensor("c", SIZE, 2, shape=(500, 10)), grace_ext.compressor("topk:0.1"), memory)
    with pytest.raises(ConfigError, match=r"join\(\) is not supported"):
        shadow_step(make(transport, memory, "dense/onebit"), lambda bucket: None)
    with pytest.raises(ConfigError, match="memory 'onebit_adam' has steps without one"):
        make(transport, "onebit_adam:5", "topk:0.1", schedule={"density": "guarded"})
