"""Runs the checks of fully_shard in every rank: worker.py OUT_FOLDER."""

import checks_recomputed  # noqa: F401  (importing registers the checks)
import checks_replicas  # noqa: F401
import checks_slices  # noqa: F401
from support.framework_jobs import run_job

run_job()
