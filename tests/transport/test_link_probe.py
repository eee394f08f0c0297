"""The link is measured once, and all ranks know the same of it."""

import numpy as np
import pytest
from support.in_process_ranks import RANKS, on_all_ranks

from grace_ext.transport import link_probe


def test_all_ranks_gather_the_same_numbers():
    gathered = on_all_ranks(lambda transport: link_probe.agreed(transport, "x", np.array([transport.rank, 0.5])))
    assert all(np.array_equal(found, [[rank, 0.5] for rank in range(RANKS)]) for found in gathered)


@pytest.mark.parametrize("collective", ["allreduce", "alltoall", "allgather"])
def test_payloads_grow_until_one_takes_long_enough(monkeypatch, collective):
    monkeypatch.setattr(link_probe, "_LARGEST", 2**16)
    monkeypatch.setattr(link_probe, "_LONG_ENOUGH", 1e9)
    samples = on_all_ranks(lambda transport: link_probe.time_collectives(transport, "probe", collective))
    assert samples[0] == samples[1] == samples[2]
    assert [payload for payload, _ in samples[0]] == [2**10, 2**13, 2**16]
    assert all(seconds > 0 for _, seconds in samples[0])
    monkeypatch.setattr(link_probe, "_LONG_ENOUGH", 0.0)
    samples = on_all_ranks(lambda transport: link_probe.time_collectives(transport, "again", collective, 2**12))
    assert {tuple(payload for payload, _ in found) for found in samples} == {(2**12,)}
