"""Runs the checks in every rank and writes what each came to: worker.py OUT_FOLDER."""

import json
import sys
import traceback
from pathlib import Path

import checks
import checks_methods  # noqa: F401  (importing registers its checks)
import harness
import horovod.torch as hvd
import torch


def main() -> None:
    # The numbers of ranks are not known before init, so both sizes that the tests use are described by a rule.
    hvd.init(process_sets="dynamic")
    torch.set_num_threads(1)
    for odd in (0, 1):
        checks.PROCESS_SETS.append(hvd.add_process_set(list(range(odd, hvd.size(), 2))))
    results = {}
    for name, function in harness.CHECKS.items():
        try:
            function()
            results[name] = "ok"
        except Exception:
            results[name] = traceback.format_exc()
        Path(sys.argv[1], f"rank{hvd.rank()}.json").write_text(json.dumps(results))
        # A rank that failed alone would leave the others waiting in the next check.
        failed = hvd.allreduce(torch.tensor([float(results[name] != "ok")]), op=hvd.Sum, name=f"failed.{name}")
        if failed.item() and failed.item() < hvd.size():
            sys.exit(f"{name} failed on some ranks only")
    hvd.shutdown()


main()
