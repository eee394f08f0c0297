"""Payloads of steady lengths for Horovod's response cache; with Horovod itself in tests/adapters/horovod_torch."""

import numpy as np
import pytest

from grace_ext import ConfigError, ContainerError
from grace_ext.adapters._horovod.splits import as_splits
from grace_ext.transport.padding import SteadyLengths, pad, pad_own_part, unpad, unpad_own_part

RANDOM = np.random.default_rng(0)


def payload(size):
    return RANDOM.integers(0, 256, size, np.uint8)


def test_lengths_stay_while_sizes_change_a_little():
    lengths = SteadyLengths()
    assert lengths.length_for("a", 20_000) == 20_000 and lengths.length_for("b", 7) == 7
    assert lengths.length_for("a", 20_100) == 20_100 + 20_100 // 64
    seen = {lengths.length_for("a", size) for size in RANDOM.integers(19_900, 20_400, 100)}
    assert seen == {20_100 + 20_100 // 64}


def test_lengths_follow_sizes_that_change_a_lot():
    lengths = SteadyLengths()
    for size in (20_000, 40_000, 100, 0, 0, 5, 90_000):
        assert size <= lengths.length_for("a", size) <= size + size // 16
    assert lengths.length_for("a", 0) == 0


@pytest.mark.parametrize("sizes", [[3], [10, 0, 5], [0, 0], [70_000, 1]])
def test_padding_comes_off(sizes):
    payloads = [payload(size) for size in sizes]
    received = np.concatenate([pad(one, one.size + extra) for extra, one in enumerate(payloads)])
    assert unpad("a", received).tobytes() == np.concatenate(payloads).tobytes()


@pytest.mark.parametrize("size, length", [(9, 24), (2**63, 2**63), (0, 15), (4, 2**40), (2**64 - 16, 0)])
def test_what_no_rank_sends_is_an_error(size, length):
    received = pad(payload(8), 8)
    received[:16].view("<u8")[:] = size, length
    with pytest.raises(ContainerError, match="'a': a payload of"):
        unpad("a", received)


@pytest.mark.parametrize("left", [1, 15, 20])
def test_a_payload_that_is_cut_off_is_an_error(left):
    received = np.concatenate([pad(payload(8), 8), pad(payload(8), 8)[:left]])
    with pytest.raises(ContainerError):
        unpad("a", received)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_an_alltoall_pads_what_a_rank_sends_to_itself(rank):
    splits = [4, 0, 7]
    given = payload(11)
    room, parts = pad_own_part(given, splits, rank, 20)
    assert room.size == sum(parts) == 20
    assert [own - before for own, before in zip(parts, splits, strict=True)] == [9 if i == rank else 0 for i in range(3)]
    ends = np.cumsum(parts)
    sent = [room[end - size : end] for end, size in zip(ends, parts, strict=True)]
    sent[rank] = sent[rank][9:]
    assert np.concatenate(sent).tobytes() == given.tobytes()
    others = [payload(size) for size in (2, 3, 5)]
    others[rank] = np.concatenate([np.zeros(9, np.uint8), others[rank]])
    received = unpad_own_part(np.concatenate(others), [one.size for one in others], rank, 9)
    others[rank] = others[rank][9:]
    assert received.tobytes() == np.concatenate(others).tobytes()


def test_splits_of_2_gib_are_refused():
    assert as_splits("a", [0, 2**31 - 1]).tolist() == [0, 2**31 - 1]
    with pytest.raises(ConfigError, match="'a': 2147483648 bytes go to one rank.*allgather"):
        as_splits("a", [5, 2**31])
