"""PowerSGD: the spec, and the exchange of several ranks against all of them in one place in float64."""

import numpy as np
import pytest
from support.arrays import gauss, same_bits
from support.exchanges import arrays_of
from support.in_process_ranks import on_all_ranks
from support.lowrank_exchanges import SHAPES, TENSORS, make, step
from support.reference_kernels import lowrank as reference_lowrank

import grace_ext
from grace_ext import ConfigError
from grace_ext._util.rng import Stream
from grace_ext._util.shared_states import SharedStates
from grace_ext.communicators.allgather import Allgather
from grace_ext.communicators.factors import FactorAllreduce
from grace_ext.exchange.buckets import Bucket, Tensor
from grace_ext.kernels.lowrank import orthonormalize
from grace_ext.lowrank import PowerSGD
from grace_ext.memory.none import NoMemory
from grace_ext.pipeline.spec import parse_stage
from grace_ext.transport import InProcessGroup

SIZE = sum(tensor.size for tensor in TENSORS)
FACTORED = {"conv": (16, 36), "wide": (8, 90), "tall": (120, 12)}  # at rank 2


# The spec


def test_the_rank_of_a_ratio():
    """Of 4096 x 4096, 100 times fewer are factors of rank 20; a rank more would be too many."""
    assert PowerSGD.rank_of_ratio((4096, 4096), 100) == 20
    for shape, ratio in (((4096, 4096), 100), ((64, 3, 7, 7), 2.5), ((120, 12), 10), ((5, 1), 0.1)):
        rank, rows, columns = PowerSGD.rank_of_ratio(shape, ratio), shape[0], int(np.prod(shape[1:]))
        assert rank * (rows + columns) * ratio <= rows * columns
        assert rank == min(rows, columns) or (rank + 1) * (rows + columns) * ratio > rows * columns
        assert PowerSGD(rank, min_rate=ratio / 1.001).factorization(shape) == (rows, columns, rank)
    for shape, ratio, message in (((8, 8), 4.1, "rank 1 give 4"), ((8,), 2, "two dimensions"), ((8, 8), 0, "above 0")):
        with pytest.raises(ConfigError, match=message):
            PowerSGD.rank_of_ratio(shape, ratio)


def test_a_spec():
    c = grace_ext.compressor("powersgd:2:start=3:warm_start=false", seed=4)
    assert str(c) == "powersgd:2:start=3:warm_start=false" and c.lowrank == PowerSGD(2, start=3, warm_start=False)
    assert str(grace_ext.compressor("powersgd:4")) == "powersgd"
    assert c.to_dict() == {
        "lowrank": {"name": "powersgd", "rank": 2, "min_rate": 2.0, "start": 3, "warm_start": False, "iterations": 1}
    }
    for again in (str(c), c.to_dict(), {"lowrank": str(c)}):
        other = grace_ext.compressor(again, 4)
        assert other == c and hash(other) == hash(c) and grace_ext.compressor(other) is other
    assert c != grace_ext.compressor(str(c)) and c != grace_ext.compressor("powersgd", 4) != grace_ext.compressor("topk", 4)
    assert (c.reducible_dtype, c.lossless, c.dense) == (None, False, False)


@pytest.mark.parametrize(
    "given, message",
    [
        ("powersgd:0", "rank=0; allowed: 1 to 4096"),
        ("powersgd:5000", "rank=5000; allowed"),
        ("powersgd:min_rate=0", "min_rate=0.0; allowed"),
        ("powersgd:min_rate=nan", "min_rate=nan; allowed"),
        ("powersgd:start=-1", "start=-1; allowed"),
        ("powersgd:iterations=0", "iterations=0; allowed: 1 to 16"),
        ("powersgd:rnak=2", "'powersgd' has no option 'rnak'; its options: rank, min_rate, start, warm_start, iterations"),
        ("powersgd:4/rice", "stands alone"),
        ("powersdg:4", "unknown sparsifier 'powersdg'; known: .*topk.*; low-rank methods: powersgd"),
        ({"lowrank": {"name": "powersgd", "epsilon": 1e-8}}, "no option 'epsilon'"),
        ({"lowrank": "powersgd", "value": "raw"}, "unknown keys \\['lowrank'\\]|lowrank alone"),
        ({"lowrank": "topk"}, "unknown lowrank 'topk'; known: powersgd"),
    ],
)
def test_mistakes(given, message):
    with pytest.raises(ConfigError, match=message):
        grace_ext.compressor(given)


def test_it_makes_no_container():
    c = grace_ext.compressor("powersgd:4")
    for call in (
        lambda: c.compress(gauss(100)),
        lambda: c.encode(gauss(100), Stream()),
        lambda: c.encode_compensated(gauss(100), gauss(100), gauss(100), Stream()),
        lambda: c.encode_in_place(gauss(100), Stream()),
        lambda: c.encode_index(None, 100, Stream()),
    ):
        with pytest.raises(ConfigError, match="'powersgd' makes no container: its factors are summed by allreduce"):
            call()
    for communicator in ("allgather", "allreduce"):
        with pytest.raises(ConfigError, match="cannot carry 'powersgd'"):
            Bucket("b", TENSORS, c, parse_stage("communicator", communicator), NoMemory())
    with pytest.raises(ConfigError, match="'topk/auto/raw' has no factors"):
        Bucket("b", TENSORS, grace_ext.compressor("topk"), FactorAllreduce(TENSORS, c, SharedStates()), NoMemory())


def test_which_tensors_are_factored():
    method = PowerSGD(4)
    assert method.factorization((64, 32, 3, 3)) == (64, 288, 4)
    assert method.factorization((64, 64)) == (64, 64, 4)
    assert method.factorization((2, 1000)) == (2, 1000, 0)  # rank 2 would be longer than the matrix
    assert method.factorization((16, 16)) == (16, 16, 0)  # (16 + 16) * 4 * 2 = 256 is not less
    assert PowerSGD(4, min_rate=1.9).factorization((16, 16)) == (16, 16, 4)
    for shape in ((), (5000,), (0, 40), (40, 0)):
        assert method.factorization(shape)[2] == 0
    with pytest.raises(ConfigError, match="'w' of shape \\(3, 4\\) does not have 13 elements"):
        Tensor("w", 13, 2, shape=(3, 4))


# The exchange


def gradient(rank, step):
    """Ranks have something in common, in low rank, and something of their own."""
    common = np.random.default_rng(1000 + step)
    own = np.random.default_rng(100 * rank + step)
    parts = []
    for shape in SHAPES.values():
        rows, columns = shape[0], int(np.prod(shape[1:]))
        parts.append(
            common.standard_normal((rows, 1)) @ common.standard_normal((1, columns))
            + 0.3 * own.standard_normal((rows, columns))
        )
    return np.concatenate([part.ravel() for part in parts]).astype(np.float32)


def pieces(flat):
    ends = np.cumsum([tensor.size for tensor in TENSORS])[:-1]
    return dict(zip(SHAPES, np.split(flat, ends), strict=True))


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(
    "options, memory",
    [
        ("", "residual"),
        ("", "none"),
        (":warm_start=false", "residual"),
        (":iterations=3", "residual"),
        (":warm_start=false:iterations=2", "none"),
    ],
)
def test_exchange_is_powersgd_in_one_place(ranks, options, memory):
    def work(transport):
        exchange = make(transport, "powersgd:2" + options, memory)
        return [step(exchange, gradient(transport.rank, i), i % 2 == 0)[0] for i in range(6)], arrays_of(exchange)

    results = on_all_ranks(work, ranks)
    warm = "warm_start" not in options
    iterations = int(options.partition("iterations=")[2] or 1)
    references = {}
    for i in range(6):
        given = [pieces(gradient(rank, i)) for rank in range(ranks)]
        found = pieces(results[0][0][i])
        for name, (rows, columns) in FACTORED.items():
            start = np.zeros((2, columns), np.float32)
            orthonormalize(start, *Stream(0, name, i).shared().key())
            if i == 0:
                references[name] = reference_lowrank.PowerSGD((rows, columns), ranks, memory != "none", iterations)
            if i == 0 or not warm:
                references[name].q = start.T
            expected = references[name].step([one[name].reshape(rows, columns).astype(float) for one in given])
            np.testing.assert_allclose(found[name].reshape(rows, columns), expected, rtol=0, atol=1e-4)
            assert np.linalg.norm(found[name].reshape(rows, columns), 2) > 1, "not nothing"
        for name in SHAPES.keys() - FACTORED.keys():
            np.testing.assert_allclose(found[name], np.mean([one[name] for one in given], axis=0), atol=1e-6)
    for rank, (outs, state) in enumerate(results):
        assert all(same_bits(a, b) for a, b in zip(outs, results[0][0], strict=True)), "ranks differ"
        factors = {key for key in state if key.startswith("lowrank:")}
        assert factors == ({f"lowrank:{name}" for name in FACTORED} if warm else set())
        for key in factors:
            assert same_bits(state[key], results[0][1][key])
        if memory == "none":
            assert state.keys() == factors
            continue
        for name, (rows, columns) in FACTORED.items():
            expected = references[name].residuals[rank]
            np.testing.assert_allclose(state[f"residual:{name}"].reshape(rows, columns), expected, rtol=0, atol=1e-4)
        for name in SHAPES.keys() - FACTORED.keys():
            assert not state[f"residual:{name}"].any()


def test_nothing_is_lost_over_many_steps():
    def work(transport):
        exchange = make(transport, "powersgd:1")
        received = sum(step(exchange, gradient(transport.rank, i))[0].astype(float) for i in range(20))
        state = arrays_of(exchange)
        return received, np.concatenate([state[f"residual:{name}"] for name in SHAPES])

    results = on_all_ranks(work)
    given = np.mean([sum(gradient(rank, i).astype(float) for i in range(20)) for rank in range(3)], axis=0)
    residual = np.mean([result[1] for result in results], axis=0)
    assert np.abs(residual).max() > 0.1
    np.testing.assert_allclose(results[0][0] + residual, given, atol=1e-3)


def test_a_matrix_of_the_rank_comes_through_whole():
    """And of a lower rank: the columns that have no direction of their own do no harm. Zero stays exactly zero."""
    low = {
        name: np.outer(gauss(rows, 1), gauss(columns, 2)) if name != "tall" else np.zeros((rows, columns), np.float32)
        for name, (rows, columns) in FACTORED.items()
    }
    given = np.concatenate(
        [low[name].ravel() if name in low else gauss(tensor.size) for name, tensor in zip(SHAPES, TENSORS, strict=True)]
    ).astype(np.float32)
    exchange = make(InProcessGroup(1).transport(0), "powersgd:3:min_rate=1")
    for _ in range(4):
        out, finite = step(exchange, given)
        assert finite
        np.testing.assert_allclose(out, given, atol=1e-5)
        assert not pieces(out)["tall"].any()
    out, _ = step(exchange, gradient(0, 0))
    assert np.isfinite(out).all() and np.linalg.matrix_rank(pieces(out)["tall"].reshape(120, 12), 1e-4) == 3


def test_warm_start_finds_the_best_approximation():
    """Repeated on one matrix, subspace iteration converges to the largest singular values."""
    given = gradient(0, 0)
    exchange = make(InProcessGroup(1).transport(0), "powersgd:2", memory="none")
    for _ in range(60):
        out, _ = step(exchange, given)
    for name, (rows, columns) in FACTORED.items():
        u, s, v = np.linalg.svd(pieces(given)[name].reshape(rows, columns))
        np.testing.assert_allclose(pieces(out)[name].reshape(rows, columns), u[:, :2] * s[:2] @ v[:2], atol=1e-2)


def test_several_iterations_are_that_many_steps_on_one_matrix():
    """Without a memory: as many steps on the same gradient, each of which starts from the last one's factor."""
    given, transport = gradient(0, 0), InProcessGroup(1).transport(0)
    one, several = (make(transport, f"powersgd:2{options}", memory="none") for options in ("", ":iterations=5"))
    errors = [np.linalg.norm(step(one, given)[0] - given) for _ in range(5)]
    found, _ = step(several, given)
    assert np.linalg.norm(found - given) == pytest.approx(errors[-1], rel=1e-3) and errors[-1] < 0.9 * errors[0]
    sent = 4 * (5 * sum(2 * sum(shape) for shape in FACTORED.values()) + 7 + 9)
    assert several.stats()["last_step"]["bytes_out"] == sent


def test_a_nan_between_iterations_reaches_the_end():
    """A sum that overflows after the first iteration."""

    def work(transport):
        exchange = make(transport, "powersgd:2:iterations=3")
        assert step(exchange, gradient(transport.rank, 0))[1]
        before = arrays_of(exchange)
        bad = gradient(transport.rank, 1)
        pieces(bad)["conv"][:] = 2e37
        out, finite = step(exchange, bad)
        assert not finite and np.isnan(out).all()
        after = arrays_of(exchange)
        assert before.keys() == after.keys() and all(same_bits(before[name], after[name]) for name in before)
        assert step(exchange, gradient(transport.rank, 2))[1]

    on_all_ranks(work)


@pytest.mark.parametrize("poison", [np.nan, np.inf, 3e38])
@pytest.mark.parametrize("where", ["conv", "bias"])
def test_a_non_finite_gradient_on_one_rank_leaves_every_state(where, poison):
    """3e38 in all elements is finite, but its factors are not."""

    def work(transport):
        exchange = make(transport)
        for i in range(2):
            assert step(exchange, gradient(transport.rank, i))[1]
        before = arrays_of(exchange)
        bad = gradient(transport.rank, 2)
        if transport.rank == 1:
            pieces(bad)[where][:] = poison
        out, finite = step(exchange, bad)
        if poison == 3e38 and where == "bias":
            assert finite
            return
        assert not finite and np.isnan(out).all()
        after = arrays_of(exchange)
        assert before.keys() == after.keys() and len(before) == len(SHAPES) + len(FACTORED)
        assert all(same_bits(before[name], after[name]) for name in before)
        assert step(exchange, gradient(transport.rank, 3))[1]
        assert not same_bits(before["lowrank:conv"], arrays_of(exchange)["lowrank:conv"])

    on_all_ranks(work)


def test_a_non_finite_bucket_keeps_the_states_of_the_others_too():
    def work(transport):
        exchange = make(transport)
        communicator = parse_stage("communicator", "allgather")
        exchange.set_buckets(
            [exchange.bucket(tensor.name, [tensor], grace_ext.compressor("powersgd:2"), communicator) for tensor in TENSORS]
        )

        def run(given):
            for bucket in exchange.buckets:
                exchange.start(bucket, lambda out, name=bucket.name: np.copyto(out, given[name]))
            exchange.advance()
            outs = {bucket.name: np.empty(bucket.size, np.float32) for bucket in exchange.buckets}
            for bucket in exchange.buckets:
                exchange.finish(bucket, outs[bucket.name])
            return outs, exchange.end_step()

        assert run(pieces(gradient(transport.rank, 0)))[1]
        before = arrays_of(exchange)
        bad = pieces(gradient(transport.rank, 1))
        if transport.rank == 0:
            bad["tall"][3] = np.nan
        outs, finite = run(bad)
        assert not finite and {name for name, out in outs.items() if np.isnan(out).any()} == {"tall"}
        after = arrays_of(exchange)
        assert before.keys() == after.keys() and all(same_bits(before[name], after[name]) for name in before)
        outs, finite = run(pieces(gradient(transport.rank, 1)))
        assert finite and not same_bits(before["lowrank:wide"], arrays_of(exchange)["lowrank:wide"])
        return np.concatenate(list(outs.values()))

    def together(transport):
        exchange = make(transport)
        outs = [step(exchange, gradient(transport.rank, i))[0] for i in range(2)]
        return outs[1]

    found, expected = on_all_ranks(work), on_all_ranks(together)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_rank_with_a_nan_sends_nothing_else():
    """Whatever BLAS makes of a NaN times zero."""
    transport = InProcessGroup(1).transport(0)
    sent, allreduce = [], transport.allreduce
    transport.allreduce = lambda name, array: sent.append(array.copy()) or allreduce(name, array)
    bad = gradient(0, 0)
    bad[0] = np.nan
    assert not step(make(transport), bad)[1]
    assert len(sent) == 2 and all(array.size and np.isnan(array).all() for array in sent)


def test_the_first_steps_are_whole():
    def work(transport):
        exchange = make(transport, "powersgd:2:start=2")
        outs = [step(exchange, gradient(transport.rank, i))[0] for i in range(3)]
        return outs, exchange.stats()

    for outs, stats in on_all_ranks(work):
        for i, out in enumerate(outs):
            mean = np.mean([gradient(rank, i) for rank in range(3)], axis=0)
            assert np.allclose(out, mean, atol=1e-5) == (i < 2)
        sent = 4 * (sum(2 * sum(shape) for shape in FACTORED.values()) + 7 + 9)
        assert stats["last_step"]["bytes_out"] == sent
        assert stats["bytes_out"] == 2 * 4 * SIZE + sent and stats["compressed"]["bytes_in"] == 3 * 4 * SIZE
        assert {"factor", "exchange", "decode"} <= stats["seconds"].keys()


def test_states_follow_their_tensors_into_new_buckets():
    def work(transport):
        exchange = make(transport)
        step(exchange, gradient(transport.rank, 0))
        before = arrays_of(exchange)
        order = [TENSORS[i] for i in (3, 0, 4, 2, 1)]
        exchange.set_buckets([exchange.bucket("new", order, grace_ext.compressor("powersgd:2"), Allgather())])
        after = arrays_of(exchange)
        assert before.keys() == after.keys() and all(same_bits(before[name], after[name]) for name in before)
        flat = pieces(gradient(transport.rank, 1))
        out, _ = step(exchange, np.concatenate([flat[tensor.name] for tensor in order]))
        return out, order

    def unchanged(transport):
        exchange = make(transport)
        return [step(exchange, gradient(transport.rank, i))[0] for i in range(2)][1]

    expected = pieces(on_all_ranks(unchanged)[0])
    for out, order in on_all_ranks(work):
        assert same_bits(out, np.concatenate([expected[tensor.name] for tensor in order]))


def test_a_factor_of_another_rank_is_not_used():
    """As after loading a checkpoint of a run with another rank."""
    transport = InProcessGroup(1).transport(0)
    exchange = make(transport, "powersgd:2", memory="none")
    step(exchange, gradient(0, 0))
    other = make(transport, "powersgd:1", memory="none")
    other.load_state_dict(exchange.state_dict())
    fresh = make(transport, "powersgd:1", memory="none")
    fresh.step = other.step
    assert same_bits(step(other, gradient(0, 1))[0], step(fresh, gradient(0, 1))[0])
    same = make(transport, "powersgd:2", memory="none")
    same.load_state_dict(exchange.state_dict())
    assert same.step == exchange.step == 1
    assert same_bits(step(same, gradient(0, 1))[0], step(exchange, gradient(0, 1))[0])


def test_seeds_give_other_starts():
    transport = InProcessGroup(1).transport(0)
    outs = [step(make(transport, seed=seed), gradient(0, 0))[0] for seed in (0, 0, 1)]
    assert same_bits(outs[0], outs[1]) and not np.allclose(outs[0], outs[2], atol=1e-3)


def test_what_ranks_differ_by_does_not_pile_up():
    """The mean of the gradients is sent whole, and nothing else is ever left to send."""

    def work(transport):
        exchange = make(transport, "powersgd:2", tensors=[Tensor("w", 40 * 30, 2, shape=(40, 30))])
        rng = np.random.default_rng(5)  # all ranks know what the others have
        norms = []
        for _ in range(400):
            noise = rng.standard_normal((transport.size, 40 * 30)).astype(np.float32)
            step(exchange, noise[transport.rank] - noise.mean(axis=0) + rng.standard_normal(1200).astype(np.float32))
            norms.append(np.linalg.norm(arrays_of(exchange)["residual:w"]))
        return norms

    for norms in on_all_ranks(work):
        assert 1 < max(norms[200:]) < 1.2 * max(norms[100:200])
