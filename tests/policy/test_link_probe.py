"""The link is measured once, and all ranks know the same of it."""

from support.in_process_ranks import RANKS, on_all_ranks

from grace_ext.policy import link_probe


def test_links_are_the_same_for_all_ranks():
    probed = on_all_ranks(lambda transport: link_probe.probe(transport, "link", "allgather"))
    assert len(probed) == RANKS and all(one == probed[0] for one in probed) and len(probed[0]) >= 2
