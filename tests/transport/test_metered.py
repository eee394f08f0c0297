"""How many bytes a collective sends, and when it was under way."""

import numpy as np
import pytest
from support.in_process_ranks import RANKS, on_all_ranks

from grace_ext.transport.metered import MeteredTransport

BYTES = np.zeros(120, np.uint8)


@pytest.mark.parametrize(
    "start, sent",
    [
        (lambda transport: transport.allgather("x", BYTES), [240, 240, 240]),
        (lambda transport: transport.allreduce("x", BYTES.view(np.float32)), [160, 160, 160]),
        (lambda transport: transport.alltoall("x", BYTES, [20, 40, 60]), [100, 80, 60]),
    ],
    ids=["allgather", "allreduce", "alltoall"],
)
def test_bytes_that_leave_a_rank(start, sent):
    def work(transport):
        found = []
        metered = MeteredTransport(transport, lambda *measured: found.append(measured))
        handle = start(metered)
        assert not found
        handle.wait()
        return found

    for rank, found in enumerate(on_all_ranks(work)):
        [(nbytes, started, ended, _)] = found
        assert nbytes == sent[rank] and 0 < started <= ended
    assert len(sent) == RANKS
