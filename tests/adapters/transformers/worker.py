"""Runs the checks of the Trainer in every rank: worker.py OUT_FOLDER."""

import checks_transformers  # noqa: F401  (importing registers the checks)
from support.framework_jobs import run_job

run_job()
