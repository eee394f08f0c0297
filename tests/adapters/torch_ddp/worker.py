"""Runs the checks of the DDP hook in every rank: worker.py OUT_FOLDER."""

import os
import sys

import checks_auto  # noqa: F401
import checks_exchange  # noqa: F401  (importing registers the checks)
import checks_loop  # noqa: F401
import checks_methods  # noqa: F401
import checks_onebit  # noqa: F401
import checks_register  # noqa: F401
import checks_results  # noqa: F401
import checks_state  # noqa: F401
import checks_summing  # noqa: F401
import torch
import torch.distributed as dist
from support.checking import run_checks


def count(name, number):
    total = torch.tensor([number])
    dist.all_reduce(total)
    return total.item()


dist.init_process_group("gloo")
torch.set_num_threads(1)
run_checks(sys.argv[1], dist.get_rank(), dist.get_world_size(), count)
dist.destroy_process_group()
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)  # on a busy machine, a thread of Gloo that still holds a tensor aborts at Python's end (pytorch/pytorch#190489)
