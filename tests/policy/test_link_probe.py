"""The link is measured once, and all ranks know the same of it."""

import numpy as np
import pytest
from support.in_process_ranks import RANKS, on_all_ranks

from grace_ext.policy import link_probe


def test_links_are_the_same_for_all_ranks():
    probed = on_all_ranks(lambda transport: link_probe.probe(transport, "link", "allgather"))
    assert len(probed) == RANKS and all(one == probed[0] for one in probed) and len(probed[0]) >= 2


def test_all_ranks_gather_the_same_numbers():
    gathered = on_all_ranks(lambda transport: link_probe.agreed(transport, "x", np.array([transport.rank, 0.5])))
    assert all(np.array_equal(found, [[rank, 0.5] for rank in range(RANKS)]) for found in gathered)


@pytest.mark.parametrize("collective", ["allreduce", "alltoall", "allgather"])
def test_payloads_grow_until_one_takes_long_enough(monkeypatch, collective):
    monkeypatch.setattr(link_probe, "_LARGEST", 2**16)
    monkeypatch.setattr(link_probe, "_LONG_ENOUGH", 1e9)
    samples = on_all_ranks(lambda transport: link_probe.probe(transport, "probe", collective))
    assert samples[0] == samples[1] == samples[2]
    assert [path for _, path, _ in samples[0]] == sorted({path for _, path, _ in samples[0]})
    assert len(samples[0]) == 3 and all(seconds > 0 for _, _, seconds in samples[0])  # 2**10, 2**13 and 2**16 bytes
    monkeypatch.setattr(link_probe, "_LONG_ENOUGH", 0.0)
    assert {len(found) for found in on_all_ranks(lambda transport: link_probe.probe(transport, "again", collective))} == {1}
