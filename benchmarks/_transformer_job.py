"""How a training of benchmarks/_transformer_worker.py is started."""

import os

from _transformer_tasks import TASKS


def job(task: str, library: str, arguments: dict, data: str, out: str, **other) -> tuple[str, dict]:
    """Return the script that trains a task in each rank, and its options, which it takes as JSON.

    library and arguments: as wrap() of the script has them. data: folder of Fashion-MNIST and texts. out: file of the result.
    other: seed, steps, lr, plain (AdamW in the place of Muon), starts_from and model_out (files of models), and capture
    (a folder and steps); by default the task's, or nothing.
    """
    kind = TASKS[task]
    own = {
        "task": task,
        "seed": 0,
        "steps": kind.steps,
        "batch": kind.batch,
        "lr": kind.lr,
        "betas": kind.betas,
        "plain": False,
    }
    files = {"data": data, "starts_from": None, "model_out": None, "capture": None, "out": out}
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_transformer_worker.py")
    return script, own | {"library": library, "arguments": arguments} | files | other
