"""What is checked inside the ranks of one job: the collectives over mpi4py."""

import numpy as np
from harness import WORLD
from support.checking import check, check_under_every_launcher, raises

from grace_ext import ExchangeError
from grace_ext.adapters._common.mpi_transport import MpiTransport


def payload(rank, step):
    """Of a length that changes from rank to rank and from step to step."""
    return np.random.default_rng([rank, step]).integers(0, 256, 50 * rank + 300 * (step % 3), np.uint8)


@check_under_every_launcher
def collectives_are_those_of_any_transport():
    transport, ranks = MpiTransport(WORLD), range(WORLD.size)
    own = transport.rank
    assert (own, transport.size, transport.world_rank) == (WORLD.rank, WORLD.size, WORLD.rank)
    for step in range(6):
        under_way = [
            transport.allgather("gathered", payload(own, step)),
            transport.alltoall(
                "parts",
                np.concatenate([payload(own + rank, step) for rank in ranks]),
                [payload(own + r, step).size for r in ranks],
            ),
            transport.broadcast("told", payload(1, step) if own == 1 else np.empty(0, np.uint8), 1),
            transport.allreduce("sum", np.arange(100, dtype=np.float32) * (own + 1)),
            transport.allreduce("half", np.arange(100, dtype=np.float16) * (own + 1)),
        ]
        gathered, parts, told, total, half = [handle.wait() for handle in under_way]
        assert np.array_equal(gathered, np.concatenate([payload(rank, step) for rank in ranks]))
        assert np.array_equal(parts, np.concatenate([payload(rank + own, step) for rank in ranks]))
        assert np.array_equal(told, payload(1, step))
        expected = np.arange(100) * sum(rank + 1 for rank in ranks)
        assert total.dtype == np.float32 and np.array_equal(total, expected)
        assert half.dtype == np.float16 and np.array_equal(half, expected)
    large = transport.allreduce("half", np.full(3, 6e4, np.float16)).wait()
    assert np.isposinf(large).all()  # not the largest number
    received = transport.gather_to("pieces", payload(own, 1), 1)
    assert len(received) == (WORLD.size if own == 1 else 0)
    assert all(np.array_equal(one, payload(rank, 1)) for rank, one in enumerate(received))


@check
def who_waits_for_a_rank_that_has_ended_is_told():
    transport = MpiTransport(WORLD)
    transport.allgather("all", np.zeros(5, np.uint8)).wait()
    if transport.rank == 0:
        transport.leave()
    else:
        with raises(ExchangeError, "ranks [0] have ended"):
            transport.allgather("all", np.zeros(5, np.uint8)).wait()
    WORLD.Barrier()
