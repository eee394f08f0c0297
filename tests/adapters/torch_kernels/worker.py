"""Runs the checks of the kernels for accelerators in Triton's interpreter: worker.py OUT_FOLDER, with TRITON_INTERPRET=1."""

import sys

import checks_bucket  # noqa: F401  (importing registers the checks)
import checks_containers  # noqa: F401
import checks_index  # noqa: F401
import checks_lowrank  # noqa: F401
import checks_packed  # noqa: F401
import checks_rows  # noqa: F401
import checks_selection  # noqa: F401
import checks_sketch  # noqa: F401
import checks_traffic  # noqa: F401
import checks_values  # noqa: F401
import torch
from support.checking import run_checks
from support.interpreter import patch_once

torch.set_num_threads(1)
patch_once()
run_checks(sys.argv[1], 0, 1, lambda name, number: number)
