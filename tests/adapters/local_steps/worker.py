"""Runs the checks of local steps in every rank: worker.py OUT_FOLDER."""

import os
import sys

import checks_means  # noqa: F401
import checks_rounds  # noqa: F401  (importing registers the checks)
import harness
import torch
from support.checking import run_checks

harness.begin()
run_checks(
    sys.argv[1], harness.rank(), harness.ranks(), lambda name, number: int(harness.gather(torch.tensor([number])).sum())
)
if harness.OVER_TORCH:
    harness.dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(
        0
    )  # on a busy machine, a thread of Gloo that still holds a tensor aborts at Python's end (pytorch/pytorch#190489)
harness.hvd.shutdown()
