"""Measured collectives become what the cost model's fit takes."""

import pytest
from support.in_process_ranks import RANKS, on_all_ranks

from grace_ext.policy import link_probe


@pytest.mark.parametrize("collective", ["allreduce", "alltoall", "allgather"])
def test_links_are_the_same_for_all_ranks(collective):
    probed = on_all_ranks(lambda transport: link_probe.probe(transport, "link", collective))
    assert len(probed) == RANKS and probed[0] and all(one == probed[0] for one in probed)
    assert [path for _, path, _ in probed[0]] == sorted({path for _, path, _ in probed[0]})
