"""Some faults of each kind in real jobs, the same in each run; `make fuzz` draws others."""

import dataclasses

import faulty_ranks
import pytest

pytestmark = [pytest.mark.mpi, pytest.mark.tier("test")]

STOPPED_UNDER_MPIRUN = faulty_ranks.Fault(
    adapter="horovod_torch",
    launcher="mpirun",
    size=2,
    compression="topk:0.1/rice/qsgd:7",
    memory="residual",
    communicator="allgather",
    kind="stop",
    ranks=(1,),
    point="between",
    step=3,
    number=2,
)


def test_a_stopped_rank_under_mpirun_ends_the_job_and_is_named():
    """Without somebody who looks for it, the others wait for ever."""
    assert faulty_ranks.run(STOPPED_UNDER_MPIRUN) == "ended"


def test_a_job_that_is_stopped_as_a_whole_goes_on_when_it_is_continued():
    """Even if that takes longer than one rank may be stopped."""
    fault = dataclasses.replace(STOPPED_UNDER_MPIRUN, kind="pause", ranks=(0, 1), point="user")
    assert faulty_ranks.run(fault) == "went on"


def test_ranks_of_ddp_know_each_other_in_their_first_step():
    """Found by seed 5."""
    fault = dataclasses.replace(STOPPED_UNDER_MPIRUN, adapter="ddp", launcher="torchrun", point="backward", step=0)
    assert faulty_ranks.run(fault) == "ended"


@pytest.mark.parametrize("seed", [42])
def test_a_fault_ends_the_job_or_it_goes_on_as_promised(seed):
    assert faulty_ranks.batch(seed).total() == 1
