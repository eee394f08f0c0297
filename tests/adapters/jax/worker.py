"""Runs the checks of JAX in every rank: worker.py OUT_FOLDER. Each process has two devices, of which training uses one."""

import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import checks_refused  # noqa: E402, F401  (importing registers the checks)
import checks_state  # noqa: E402, F401
import checks_training  # noqa: E402, F401
import checks_transport  # noqa: E402, F401
from mpi4py import MPI  # noqa: E402
from support.checking import run_checks  # noqa: E402

WORLD = MPI.COMM_WORLD
run_checks(sys.argv[1], WORLD.rank, WORLD.size, lambda name, number: WORLD.allreduce(number))
