"""Memories that do more than error feedback, against slow implementations of their papers' formulas, in real exchanges."""

import numpy as np
import pytest
from support.arrays import gauss, same_bits
from support.exchanges import arrays_of
from support.in_process_ranks import on_all_ranks

import grace_ext
from grace_ext import ConfigError
from grace_ext.exchange.buckets import Tensor, make_buckets
from grace_ext.exchange.engine import Exchange
from grace_ext.kernels.momentum import accumulate_momentum, accumulate_nesterov
from grace_ext.memory.dgc import clipping
from grace_ext.pipeline.spec import parse_stage
from grace_ext.policy import Memories, Schedules
from grace_ext.transport import InProcessGroup

TENSORS = [Tensor("a", 3000, 2), Tensor("b", 2000, 2)]
SIZE, RANKS = 5000, 3


def gradient(rank, step):
    return gauss(SIZE, 100 * rank + step)


def make(transport, memory, spec="topk:0.1/rice/raw", weight=None, tensors=TENSORS, schedule=None, communicator="allgather"):
    exchange = Exchange(transport, memory, weight or 1 / transport.size, schedule=schedule)
    lists = make_buckets(tensors, exchange.memory_of, 2**30)
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


def dgc_reference(steps, momentum, masking=True, nesterov=False, clip=0.0, k=500):
    """Algorithm 4 of the paper for all ranks, in float64."""
    u = v = np.zeros((RANKS, SIZE))
    for i in range(steps):
        g = np.stack([gradient(rank, i) for rank in range(RANKS)]).astype(float)
        if clip:
            for part in (slice(0, 3000), slice(3000, SIZE)):
                norms = np.linalg.norm(g[:, part], axis=1, keepdims=True)
                g[:, part] *= np.minimum(1, clip / np.sqrt(RANKS) / norms)
        u = momentum * (u + g) if nesterov else momentum * u + g
        v = v + u + (g if nesterov else 0)
        sent = np.stack([topk(row, k) for row in v])
        v = v - sent
        u = np.where(sent != 0, 0, u) if masking else u
        yield sent.mean(axis=0), u, v


@pytest.mark.parametrize(
    "options, keywords",
    [
        ("", {}),
        (":masking=false", {"masking": False}),
        (":nesterov=true", {"nesterov": True}),
        (":clip=20", {"clip": 20.0}),
        (":0.5:clip=1e9", {"momentum": 0.5}),
    ],
)
def test_dgc_is_the_papers(options, keywords):
    def work(transport):
        exchange = make(transport, "dgc" + options)
        return [step(exchange, gradient(transport.rank, i))[0] for i in range(6)], arrays_of(exchange)

    results = on_all_ranks(work, RANKS)
    *_, (_, u, v) = expected = list(dgc_reference(6, **{"momentum": 0.9, **keywords}))
    for rank, (outs, state) in enumerate(results):
        for out, (mean, _, _) in zip(outs, expected, strict=True):
            np.testing.assert_allclose(out, mean, rtol=0, atol=1e-4)
        kept = {field: np.concatenate([state[f"{field}:a"], state[f"{field}:b"]]) for field in ("velocity", "residual")}
        np.testing.assert_allclose(kept["velocity"], u[rank], rtol=0, atol=1e-4)
        np.testing.assert_allclose(kept["residual"], v[rank], rtol=0, atol=1e-4)


def test_dgc_on_exact_tensors_is_the_optimizers_momentum():
    def work(transport):
        exchange = make(transport, "dgc:0.8", "dense/raw")
        assert exchange.buckets[0].communicator.name == "allreduce"
        return [step(exchange, gradient(transport.rank, i))[0] for i in range(5)], arrays_of(exchange)

    expected = np.zeros(SIZE)
    velocities = []
    for i in range(5):
        expected = 0.8 * expected + np.mean([gradient(rank, i) for rank in range(RANKS)], axis=0)
        velocities.append(expected)
    for outs, state in on_all_ranks(work, RANKS):
        np.testing.assert_allclose(outs, velocities, rtol=0, atol=1e-5)
        assert set(state) == {"velocity:a", "velocity:b"}


def test_dgc_keeps_the_velocity_of_what_a_dense_quantizer_sends():
    exchange = make(InProcessGroup(1).transport(0), "dgc", "dense/fp16")
    step(exchange, gradient(0, 0))
    assert np.count_nonzero(arrays_of(exchange)["velocity:a"]) > 2900


def test_ef21_is_the_papers():
    def work(transport):
        exchange = make(transport, "ef21", weight=3.0 / transport.size)
        return [step(exchange, gradient(transport.rank, i))[0] for i in range(6)], arrays_of(exchange)

    estimates = np.zeros((RANKS, SIZE))
    expected = []
    for i in range(6):
        estimates = estimates + [topk(gradient(rank, i) - estimates[rank], 500) for rank in range(RANKS)]
        expected.append(3 * estimates.mean(axis=0))
    for rank, (outs, state) in enumerate(on_all_ranks(work, RANKS)):
        np.testing.assert_allclose(outs, expected, rtol=0, atol=1e-4)
        kept = {field: np.concatenate([state[f"{field}:a"], state[f"{field}:b"]]) for field in ("estimate", "aggregate")}
        np.testing.assert_allclose(kept["estimate"], estimates[rank], rtol=0, atol=1e-5)
        np.testing.assert_allclose(kept["aggregate"], estimates.mean(axis=0), rtol=0, atol=1e-5)


@pytest.mark.parametrize("spec", ["topk:0.1/rice/raw", "topk:0.05/bloom/qsgd:7", "dct/topk:0.1/raw", "dense/minmax:8"])
def test_ef21_with_momentum_finds_a_constant_gradient(spec):
    """Whatever contracts, brings the aggregate to the mean of the ranks' gradients if these stand still."""

    def work(transport):
        exchange = make(transport, "ef21:0.5", spec)
        for _ in range(60):
            out, _ = step(exchange, gradient(transport.rank, 0))
        return out

    expected = np.mean([gradient(rank, 0) for rank in range(RANKS)], axis=0)
    results = on_all_ranks(work, RANKS)
    error = np.linalg.norm(results[0] - expected) / np.linalg.norm(expected)
    assert error < 0.02, error
    assert all(same_bits(results[0], other) for other in results)


def test_decay_of_the_residual():
    exchange = make(InProcessGroup(1).transport(0), "residual:decay=0.5")
    first, second = gradient(0, 0), gradient(0, 1)
    step(exchange, first)
    residual = 0.5 * (first - topk(first, 500))
    np.testing.assert_array_equal(np.concatenate([array for array in arrays_of(exchange).values()]), residual)
    out, _ = step(exchange, second)
    np.testing.assert_array_equal(out, topk(second + residual, 500))
    plain = grace_ext.memory("residual:0.5")
    plain.update("w", np.full(4, 3, np.float32), np.ones(4, np.float32))
    assert plain.state_dict()["w"]["residual"].tolist() == [1] * 4


@pytest.mark.parametrize(
    "memory, spec",
    [
        ("ef21", "topk:0.1"),
        ("ef21:0.9", "topk:0.1"),
        ("dgc", "topk:0.1"),
        ("dgc", "dense/raw"),
        ("residual:0.9", "topk:0.1"),
    ],
)
def test_a_non_finite_gradient_on_one_rank_leaves_every_memory(memory, spec):
    def work(transport):
        exchange = make(transport, memory, spec)
        for i in range(3):
            step(exchange, gradient(transport.rank, i))
        before = arrays_of(exchange)
        for bad in (np.nan, np.inf, 3e38):
            given = gradient(transport.rank, 3)
            if transport.rank == 1:
                given[[17, 4000]] = bad
            if bad == 3e38 and transport.rank == 2:
                given[[17, 4000]] = 3e38
            out, finite = step(exchange, given)
            if bad != 3e38:
                assert not finite and not np.isfinite(out).all()
            if not finite:
                after = arrays_of(exchange)
                assert before.keys() == after.keys()
                assert all(same_bits(before[key], after[key]) for key in before)
                continue
            assert all(np.isfinite(array).all() for array in arrays_of(exchange).values())
            exchange.load_state_dict(
                {
                    field: {name.split(":")[1]: array for name, array in before.items() if name.startswith(field)}
                    for field in {key.split(":")[0] for key in before}
                }
            )
        return step(exchange, gradient(transport.rank, 4))[1]

    assert all(on_all_ranks(work, RANKS))


@pytest.mark.parametrize(
    "memory, spec",
    [("ef21:0.9", "topk:0.1/rice/qsgd:7"), ("dgc", "topk:0.1"), ("dgc", "dense/raw"), ("residual:0.9", "randomk:0.1")],
)
def test_a_state_goes_on_where_it_was_saved(memory, spec):
    def work(transport):
        exchange = make(transport, memory, spec)
        for i in range(3):
            step(exchange, gradient(transport.rank, i))
        other = make(transport, memory, spec)
        other.load_state_dict(exchange.state_dict())
        assert other.step == 3
        for i in range(3, 6):
            assert same_bits(step(exchange, gradient(transport.rank, i))[0], step(other, gradient(transport.rank, i))[0])
        mine, others = arrays_of(exchange), arrays_of(other)
        assert mine and mine.keys() == others.keys() and all(same_bits(mine[key], others[key]) for key in mine)

    on_all_ranks(work, RANKS)


def test_ranks_that_take_over():
    residual = grace_ext.memory("dgc")
    states = [
        {"residual": np.full(2, 1.0 + rank, np.float32), "velocity": np.full(2, 2.0 * rank, np.float32)} for rank in range(4)
    ]
    taken = residual.redistribute(states, 2)
    assert taken["residual"].tolist() == [5, 5], "the sum over ranks stays 10"
    assert taken["velocity"].tolist() == [3, 3], "the mean"
    assert taken["residual"].dtype == np.float32
    assert grace_ext.memory("none").redistribute([{}, {}], 3) == {}


def test_pairings_that_make_no_sense():
    transport = InProcessGroup(1).transport(0)
    for memory, spec, communicator, message in [
        ("ef21", "randomk:0.1", "allreduce", "adds up containers"),
        ("ef21", "powersgd:2", "allgather", "adds up containers"),
        ("dgc", "powersgd:2", "allgather", "follows single elements"),
        ("dgc", "dct/topk:0.1", "allgather", "follows single elements"),
        ("ef21", "randomk:0.1:unbiased=true", "allgather", "right on average"),
        ("dgc", "randomk:0.1:unbiased=true", "allgather", "right on average"),
    ]:
        with pytest.raises(ConfigError, match=message):
            make(transport, memory, spec, communicator=communicator)
    for spec, message in [
        ("dgc:1", "momentum=1"),
        ("dgc:clip=-1", "clip=-1"),
        ("dgc:clip=nan", "clip=nan"),
        ("ef21:1", "momentum=1"),
        ("residual:0", "decay=0"),
        ("residual:1.5", "decay=1.5"),
    ]:
        with pytest.raises(ConfigError, match=message):
            grace_ext.memory(spec)


def test_memories_by_name():
    memories = Memories({"*.bias": "none", ">100000": "residual:decay=0.9", "head.*": "ef21"})
    assert memories.choose("a.bias", 10) == grace_ext.memory("none")
    assert memories.choose("a.weight", 200000) == grace_ext.memory("residual:0.9")
    assert memories.choose("head.weight", 10).name == "ef21"
    assert memories.choose("b.weight", 10) == grace_ext.memory("residual")
    assert memories.choose("b.weight", 10) is memories.choose("c.weight", 10), "equal specs share one"
    for wrong, message in [
        ({"<x": "none"}, "memory: '<x' is not a size"),
        ({3: "none"}, "memory: 3 is not a name"),
        ({"*": "nothing"}, "unknown memory 'nothing'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            Memories(wrong)


def test_tensors_of_other_memories_are_in_other_buckets():
    transport = InProcessGroup(1).transport(0)
    exchange = make(transport, {"a": "none", "*": "ef21"})
    assert [[tensor.name for tensor in bucket.tensors] for bucket in exchange.buckets] == [["a"], ["b"]]
    given = gradient(0, 0)
    out, _ = step(exchange, given)
    np.testing.assert_array_equal(out, np.concatenate([topk(given[:3000], 300), topk(given[3000:], 200)]))
    assert set(arrays_of(exchange)) == {"estimate:b", "aggregate:b"}


# Schedules


@pytest.mark.parametrize(
    "step, expected",
    [(0, 0.25), (99, 0.25), (100, 0.0625), (200, 0.015625), (399, 0.00390625), (400, 0.001), (10**6, 0.001)],
)
def test_warmup(step, expected):
    warmup = parse_stage("schedule", "warmup:400")
    assert warmup.at(step, 0.001) == pytest.approx(expected, rel=0.02)


def test_a_density_and_levels_change_with_the_step():
    def work(transport):
        exchange = make(
            transport,
            "residual",
            "topk:0.01/raw/qsgd:7",
            schedule={"density": "warmup:4:start=0.16:stages=2", "bits": lambda step: 3 + step},
        )
        seen = []
        for i in range(6):
            step(exchange, gradient(transport.rank, i))
            seen.append(str(exchange.buckets[0].compressor))
        return seen

    specs = on_all_ranks(work, 2)
    assert specs[0] == specs[1]
    assert specs[0] == [
        "topk:0.16/raw/qsgd:3",
        "topk:0.16/raw/qsgd:4",
        "topk:0.04/raw/qsgd:5",
        "topk:0.04/raw/qsgd:6",
        "topk/raw/qsgd:7",
        "topk/raw/qsgd",
    ]


def test_a_schedule_goes_on_after_loading():
    transport = InProcessGroup(1).transport(0)
    options = {"memory": "residual", "schedule": {"density": lambda step: 0.5 if step < 2 else 0.01}}
    exchange = make(transport, **options)
    step(exchange, gradient(0, 0))
    step(exchange, gradient(0, 1))
    other = make(transport, **options)
    other.load_state_dict(exchange.state_dict())
    assert np.count_nonzero(step(other, gradient(0, 2))[0]) == 50


def test_schedules_that_cannot_be():
    transport = InProcessGroup(1).transport(0)
    with pytest.raises(ConfigError, match="no part of the specs has a number 'densty'; there are: bits, bucket, density"):
        make(transport, "none", "topk/raw/qsgd", schedule={"densty": "warmup"}).config_digest()
    with pytest.raises(ConfigError, match="unknown schedule 'linear'"):
        make(transport, "none", schedule={"density": "linear"})
    with pytest.raises(ConfigError, match="steps=0"):
        parse_stage("schedule", "warmup:0")
    exchange = make(transport, "none", schedule={"density": lambda step: 2.0})
    with pytest.raises(ConfigError, match=r"density=2\.0"):
        step(exchange, gradient(0, 0))
    exact = grace_ext.compressor("dense/raw")
    assert Schedules({"density": "warmup"}).at(exact, 0) is exact, "what has no density stays as it is"


@pytest.mark.parametrize("schedule", [{"density": "warmup:7"}, {"density": lambda step: 0.02}])
def test_a_schedule_is_part_of_the_configuration(schedule):
    transport = InProcessGroup(1).transport(0)
    digests = {make(transport, "none", schedule=one).config_digest().tobytes() for one in (schedule, dict(schedule), None)}
    assert len(digests) == 2


# Kernels


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_momentum_kernels(share):
    velocity, given = gauss(1000, 1), gauss(1000, 2)
    m, c = np.float32(0.9), np.float32(share)
    following, replaced = np.empty_like(velocity), given.copy()
    accumulate_momentum(velocity, replaced, m, c, following)
    np.testing.assert_allclose(following, m * velocity + c * given, rtol=1e-6, atol=1e-7)
    assert same_bits(following, replaced)
    in_place = given.copy()
    accumulate_momentum(velocity, in_place, m, c, in_place)
    assert same_bits(in_place, following)
    replaced = given.copy()
    accumulate_nesterov(velocity, replaced, m, c, following)
    np.testing.assert_allclose(following, m * (velocity + c * given), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(replaced, following + c * given, rtol=1e-6, atol=1e-7)
    empty = np.empty(0, np.float32)
    accumulate_momentum(empty, empty, m, c, empty)


def test_clipping():
    ones = np.ones(4, np.float32)
    assert clipping(ones, 1.0) == 0.5 and clipping(ones, 3.0) == 1.0 and clipping(ones * 0, 1.0) == 1.0
    assert clipping(ones * np.float32(1e30), 1.0) == pytest.approx(5e-31), "the squares overflow in float32"
    assert not np.isfinite(clipping(np.array([np.nan], np.float32), 1.0) * np.float32(np.nan))
