"""Runs the checks of checks_compiling.py: compiling_worker.py OUT_FOLDER."""

import sys

import checks_compiling  # noqa: F401  (importing registers the checks)
from support.checking import run_checks

run_checks(sys.argv[1], 0, 1, lambda name, number: number)
