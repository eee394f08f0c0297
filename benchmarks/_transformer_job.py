"""How a training of benchmarks/_transformer_worker.py is started."""

import os

from _lib import ROOT
from _transformer_tasks import TASKS


def job(
    task: str,
    library: str,
    arguments: dict,
    data: str,
    out: str,
    *,
    seed: int = 0,
    steps: int | None = None,
    lr: float | None = None,
    plain: bool = False,
    starts_from: str | None = None,
    model_out: str | None = None,
    capture: tuple[str, list[int]] | None = None,
) -> tuple[str, dict]:
    """Return the script that trains a task in each rank, and its options, which it takes as JSON.

    library and arguments: as wrap() of the script has them. data: folder of Fashion-MNIST and texts. out: file of the result.
    steps and lr: the task's by default. plain: AdamW in the place of Muon. starts_from and model_out: files of models. capture:
    a folder, and the steps whose gradients are kept there.
    """
    kind = TASKS[task]
    return os.path.join(ROOT, "benchmarks", "_transformer_worker.py"), {
        "task": task,
        "seed": seed,
        "steps": kind.steps if steps is None else steps,
        "batch": kind.batch,
        "lr": kind.lr if lr is None else lr,
        "betas": kind.betas,
        "plain": plain,
        "library": library,
        "arguments": arguments,
        "data": data,
        "starts_from": starts_from,
        "model_out": model_out,
        "capture": capture,
        "out": out,
    }
