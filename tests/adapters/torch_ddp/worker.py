"""Runs the checks of the DDP hook in every rank: worker_ddp.py OUT_FOLDER."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "mpi"))

import checks_ddp  # noqa: E402, F401  (importing registers the checks)
import checks_ddp_auto  # noqa: E402, F401
import checks_ddp_loop  # noqa: E402, F401
import checks_ddp_state  # noqa: E402, F401
import checks_ddp_summing  # noqa: E402, F401
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from checking import run_checks  # noqa: E402


def count(name, number):
    total = torch.tensor([number])
    dist.all_reduce(total)
    return total.item()


dist.init_process_group("gloo")
torch.set_num_threads(1)
run_checks(sys.argv[1], dist.get_rank(), dist.get_world_size(), count)
dist.destroy_process_group()
