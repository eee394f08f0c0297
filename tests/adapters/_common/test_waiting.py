"""When ranks count as too many for their host. How they wait is tested in real ranks, in horovod_torch."""

import pytest

from grace_ext.adapters._common import waiting


@pytest.mark.parametrize("ranks, cores, is_crowded", [(2, 2.0, False), (3, 2.0, True), (2, 1.5, True), (1, 1.0, False)])
def test_more_ranks_than_cores_are_crowded(monkeypatch, ranks, cores, is_crowded):
    monkeypatch.setattr(waiting, "host_cores", lambda: cores)
    assert waiting._contention.__wrapped__(ranks).is_crowded() == is_crowded
