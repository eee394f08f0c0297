"""Runs the checks of Lightning in every rank: worker.py OUT_FOLDER."""

import checks_lightning  # noqa: F401  (importing registers the checks)
from support.framework_jobs import run_job

run_job()
