"""What holds for every memory, in real exchanges."""

import numpy as np
import pytest
from support.arrays import same_bits
from support.exchanges import arrays_of
from support.in_process_ranks import on_all_ranks
from support.memory_exchanges import RANKS, gradient, make, step, topk

import grace_ext
from grace_ext import ConfigError, registry
from grace_ext.memory.base import Memory
from grace_ext.memory.residual import Residual
from grace_ext.transport import InProcessGroup


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
        ("dgc:deviations=2.5", "topk:0.1"),
        ("dgc", "dense/raw"),
        ("signum", "dense/sign:one"),
        ("momentum", "topk:0.1"),
        ("momentum", "powersgd:2"),
        ("adam", "topk:0.1"),
        ("muon", "topk:0.1"),
        ("demo", "dct:16/topk:0.1"),
        ("residual:0.9", "topk:0.1"),
        ("residual:bits=8", "topk:0.1"),
        ("adam:bits=16", "topk:0.1"),
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
    [
        ("ef21:0.9", "topk:0.1/rice/qsgd:7"),
        ("dgc", "topk:0.1"),
        ("dgc", "dense/raw"),
        ("signum", "dense/sign:one"),
        ("momentum:decay=0.9", "topk:0.1/rice/qsgd:7"),
        ("adam:decay=0.9", "topk:0.1/rice/qsgd:7"),
        ("muon:decay=0.9", "topk:0.1/rice/qsgd:7"),
        ("demo:0.9", "dct:16/topk:0.1:per=chunk/auto/lloyd:0.05"),
        ("residual:0.9", "randomk:0.1"),
        ("residual:bits=8", "topk:0.1/rice/qsgd:7"),
        ("adam:bits=8", "topk:0.1/rice/qsgd:7"),
        ("muon:bits=16", "topk:0.1/rice/qsgd:7"),
    ],
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
        ("ef21", "randomk:0.1:unbiased=true", "allgather", "unbiased already"),
        ("momentum", "randomk:0.1:unbiased=true", "allgather", "unbiased already"),
        ("dgc", "randomk:0.1:unbiased=true", "allgather", "unbiased already"),
    ]:
        with pytest.raises(ConfigError, match=message):
            make(transport, memory, spec, communicator=communicator)
    for spec, message in [
        ("dgc:1", "momentum=1"),
        ("dgc:clip=-1", "clip=-1"),
        ("dgc:clip=nan", "clip=nan"),
        ("dgc:deviations=-1", "deviations=-1"),
        ("ef21:1", "momentum=1"),
        ("momentum:-0.1", "momentum=-0.1"),
        ("momentum:decay=0", "decay=0"),
        ("residual:0", "decay=0"),
        ("residual:1.5", "decay=1.5"),
    ]:
        with pytest.raises(ConfigError, match=message):
            grace_ext.memory(spec)


@pytest.mark.parametrize("name", registry.names("memory"))
def test_a_memory_with_hooks_of_its_own_says_itself_whether_they_work_on_an_accelerator(name):
    """What it inherits was said of other hooks, and gradients on an accelerator would be treated as those hooks say."""
    order = registry.lookup("memory", name).__mro__

    def owner(attribute):
        return next(number for number, kind in enumerate(order) if attribute in vars(kind))

    for hook in ("correct_gradient", "on_received"):
        assert order[owner(hook)] is Memory or owner("works_at_positions") <= owner(hook), hook


OPTIONS = {"onebit_adam": ":5"}  # those without which there is no memory of that name


@pytest.mark.parametrize("name", registry.names("memory"))
def test_outside_of_an_exchange_a_memory_makes_up_for_errors_or_says_that_it_does_not(name):
    memory, gradient = grace_ext.memory(name + OPTIONS.get(name, "")), np.arange(1, 9, dtype=np.float32)
    if name == "none":
        return
    try:
        given = memory.compensate("w", gradient)
    except ConfigError as error:
        assert str(error).startswith(f"memory {name!r}") and "exchange" in str(error)
        return
    memory.update("w", given, np.zeros(8, np.float32))
    assert not np.isclose(memory.compensate("w", gradient), gradient).any()


@pytest.mark.parametrize("base", [Memory, Residual])
def test_a_memory_that_only_has_hooks_cannot_be_used_outside_of_an_exchange_by_mistake(base):
    class Later(base):
        name = "later"
        stateful = has_hooks = corrects_gradient = True

    with pytest.raises(ConfigError, match="memory 'later' works only inside an exchange"):
        Later().compensate("w", np.ones(3, np.float32))
