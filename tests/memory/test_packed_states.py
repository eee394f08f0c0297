"""States in 8 and 16 bits: transactions as those of float32, and exchanges with them."""

import numpy as np
import pytest
from support.arrays import gauss, same_bits
from support.in_process_ranks import on_all_ranks
from support.memory_exchanges import RANKS, SIZE, gradient, make, step

import grace_ext
from grace_ext import ConfigError
from grace_ext.exchange.buckets import Tensor
from grace_ext.memory import packed_vector
from grace_ext.memory.arrays import NumpyArrays
from grace_ext.memory.packed_states import make_states
from grace_ext.memory.packed_vector import PackedVector
from grace_ext.transport import InProcessGroup

TOLERANCE = {8: 1 / 63, 16: 2**-7}  # a step of the largest value of a block; of each value


@pytest.fixture(params=[8, 16])
def bits(request):
    return request.param


@pytest.fixture
def states(bits):
    return make_states("residual", bits)


def begun(states, values, name="w"):
    state, following = states.begin(name, len(values))
    before = state.copy()
    following[:] = values
    return before


def test_a_state_begins_as_zeros_and_changes_by_a_commit_only(states, bits):
    first, second = gauss(1000, 1), gauss(1000, 2)
    assert not begun(states, first).any()
    assert states.upcoming("w") is not None and states.copies() == {}
    assert states.commit() == ["w"]
    np.testing.assert_allclose(states.current("w"), first, atol=TOLERANCE[bits] * 5)
    before = states.current("w")
    assert same_bits(begun(states, second), before)
    states.seal("w")
    assert same_bits(states.current("w"), before), "it is packed, but not in force"
    states.rollback()
    assert states.commit() == [] and same_bits(states.current("w"), before)
    begun(states, second)
    states.seal("w")
    states.commit()
    np.testing.assert_allclose(states.current("w"), second, atol=TOLERANCE[bits] * 5)


def test_what_is_lent_is_used_again_and_by_one_name_at_a_time(states):
    arrays = states.begin("a", 1000)
    others = states.begin("b", 1000)
    assert not any(np.shares_memory(one, other) for one in arrays for other in others)
    states.seal("a")
    assert any(np.shares_memory(one, other) for one in arrays for other in states.begin("c", 500))
    states.begin("b", 1000)  # again, after an error
    states.rollback()
    assert states.copies() == {}


def test_with_a_lent_buffer_a_state_is_added_to_the_gradient_without_being_unpacked_as_a_whole(states, bits):
    size = 2 * packed_vector._PIECE + 300
    for number in range(3):
        before = states.current("w") if number else np.zeros(size, np.float32)
        lent, given = np.empty(size, np.float32), gauss(size, number)
        state, following = states.begin("w", size, lent=lent)
        assert following is lent and isinstance(state, PackedVector)
        lent[:] = given
        state.add_to(lent)
        assert same_bits(lent, given + before)
        states.seal("w")
        assert states.settle("w", keep=number != 1) is lent
        states.commit()
        left = np.abs(states.current("w") - (before if number == 1 else given + before))
        assert left.max() <= (0 if number == 1 else TOLERANCE[bits] * 8)
    assert not states._free, "nothing of the size of the state was made"


def test_memory_is_what_the_bits_say(bits):
    size = 10**6
    states = make_states("residual", bits)
    begun(states, np.ones(size))
    states.commit()
    packed = states._state["w"]
    kept = sum(array.nbytes for array in vars(packed).values() if array is not None)
    assert kept <= size * bits / 8 * 1.04


def test_copies_can_be_loaded_and_stay_the_same_bits(states):
    begun(states, gauss(1000, 3))
    states.commit()
    other = make_states("residual", states._bits)
    copies = states.copies()
    other.load(copies)
    copies["w"][:] = 9
    assert same_bits(other.current("w"), states.current("w"))
    assert other.find("of nobody", 3) is None and not other.get("of nobody", 3).any()
    with pytest.raises(ConfigError, match="residual of 'w' has 1000 elements, the gradient 5"):
        other.begin("w", 5)


@pytest.mark.parametrize("part", [slice(0, 1000), slice(130, 700), slice(300, 301), slice(None)])
def test_a_part_can_be_scaled(states, bits, part):
    begun(states, gauss(1000, 4))
    states.commit()
    expected = states.current("w")
    expected[part] *= 1.5
    states.scale("w", part, np.float32(1.5))
    states.scale("of nobody", part, np.float32(1.5))
    np.testing.assert_allclose(states.current("w"), expected, atol=TOLERANCE[bits] * 8)
    outside = np.setdiff1d(np.arange(1000), np.arange(1000)[part])
    outside = outside[(outside // 128 < (part.start or 0) // 128) | (outside // 128 > ((part.stop or 1000) - 1) // 128)]
    assert same_bits(states.current("w")[outside], expected[outside])


def test_other_numbers_of_bits_are_refused():
    for bits in (0, 4, 33):
        with pytest.raises(ConfigError, match=f"bits={bits} for the residual; allowed: 8, 16, 32"):
            grace_ext.memory(f"residual:bits={bits}")
    assert make_states("residual", 32).begin("w", 3)[0].dtype == np.float32


@pytest.mark.parametrize(
    "spec, communicator",
    [*(("topk:0.1/rice/qsgd:7", name) for name in ("allgather", "sharded", "tree")), ("powersgd:2", "allgather")],
)
def test_nothing_is_lost_but_what_rounding_takes(bits, communicator, spec):
    """What all ranks have sent and what they still have sum to their gradients."""
    steps, tensors = 20, [Tensor("a", 3000, 2, shape=(60, 50)), Tensor("b", 2000, 2, shape=(40, 50))]

    def work(transport):
        exchange = make(transport, f"residual:bits={bits}", spec, 1.0, tensors, communicator=communicator)
        sent = sum(step(exchange, gradient(transport.rank, i))[0].astype(np.float64) for i in range(steps))
        return sent, np.concatenate(list(exchange.state_dict()["residual"].values()))

    found = on_all_ranks(work, RANKS)
    given = sum(gradient(rank, i).astype(np.float64) for rank in range(RANKS) for i in range(steps))
    kept = sum(residual.astype(np.float64) for _, residual in found)
    error = found[0][0] + kept - given
    # Each step rounds each element of the residual of each rank.
    largest = np.abs(kept).max()
    assert largest > 0 and np.abs(error).mean() < TOLERANCE[bits] * largest * np.sqrt(steps * RANKS) / 4
    assert abs(error.mean()) < 4 * error.std() / np.sqrt(SIZE)


def test_rows_keep_32_bits(bits):
    memory = grace_ext.memory(f"residual:bits={bits}")
    rows = memory.for_rows()
    assert rows is memory.for_rows() and str(rows) == "residual"
    plain = grace_ext.memory("residual")
    assert plain.for_rows() is plain


class OtherArrays(NumpyArrays):
    """As numpy's, but of a kind of its own."""


def test_a_state_moves_to_the_kind_of_arrays_that_a_step_has(states):
    given = gauss(1000, 3)
    states.load({"w": given})
    kept = states.copies()["w"]
    for arrays in (OtherArrays, NumpyArrays, OtherArrays):
        state, following = states.begin("w", 1000, arrays)
        assert same_bits(state, kept) and states._arrays["w"] is arrays
        following[:] = kept
        states.seal("w")
        states.commit()
        assert same_bits(states.copies()["w"], kept)
    states.load({"w": given})
    assert same_bits(states.copies()["w"], kept) and states._arrays["w"] is NumpyArrays


def test_decay(bits):
    exchange = make(InProcessGroup(1).transport(0), f"residual:0.5:bits={bits}")
    step(exchange, np.ones(SIZE, np.float32))
    kept = np.concatenate(list(exchange.state_dict()["residual"].values()))
    assert set(kept.tolist()) == {0.0, 0.5}
