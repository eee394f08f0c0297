"""One rank of benchmarks/churn.py: _churn_worker.py OPTIONS, with the options as JSON. Rank 0 writes the result to options["out"].

With options["hosts"], the file that says which hosts there are, the rank on the host that came last kills itself in the middle of a
round every options["every"] rounds, and options["after"] rounds later the next of options["names"] takes its place.
"""

import json
import os
import signal
import sys
import time

import horovod.torch as hvd
import torch
from _lib import write_whole
from _transformer_tasks import TASKS, learning_rate
from _transformer_worker import evaluate

from grace_ext.adapters.local_steps import LocalSteps


class Churn:
    """What happens to the ranks."""

    def __init__(self, options: dict):
        self._file, self._names, self._contents = options.get("hosts"), options["names"], options["contents"]
        self._every, self._length = options["every"] * options["length"], options["length"]
        self._after = options["after"] * options["length"]

    def at(self, step: int) -> None:
        """After this step of training: kill this rank, or tell Horovod of the next host."""
        if self._file is None:
            return
        number, since = divmod(step, self._every)
        if number == 0:
            return
        is_last = os.environ["HOROVOD_HOSTNAME"] == self._names[number - 1]
        if is_last and since == self._length // 2:  # in the middle of a round
            os.kill(os.getpid(), signal.SIGKILL)
        if since == self._after and hvd.rank() == 0:
            with open(f"{self._file}.new", "w") as file:
                file.write(self._contents[number])
            os.replace(f"{self._file}.new", self._file)


def main() -> None:
    options = json.loads(sys.argv[1])
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(options["seed"])
    task, churn = TASKS[options["task"]], Churn(options)
    data, model = task.data(options["data"]), task.model()
    (optimizer,) = task.optimizers(model, task.lr, tuple(task.betas))
    local = LocalSteps(model, optimizer, steps=options["length"])
    last = options["length"] * options["rounds"]
    made, began = 0, time.perf_counter()

    @hvd.elastic.run
    def train(state) -> None:
        nonlocal made
        state.visited = [*state.visited, [state.step, hvd.size()]]
        while state.step < last:
            generator = torch.Generator().manual_seed(1_000_000 * options["seed"] + hvd.rank() * last + state.step)
            for group in optimizer.param_groups:
                group["lr"] = task.lr * learning_rate(state.step, last)
            optimizer.zero_grad()
            data.loss(model, data.batch(generator, task.batch)).backward()
            optimizer.step()
            ended = local.step()
            made += 1
            state.step += 1
            churn.at(state.step)
            if ended:
                state.commit()
                if hvd.rank() == 0 and state.step % (10 * options["length"]) == 0:
                    print(
                        f"[churn] round {state.step // options['length']}/{options['rounds']}, {hvd.size()} ranks",
                        flush=True,
                    )

    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, local=local, step=0, visited=[])
    train(state)
    local.synchronize()
    found = {
        **evaluate(task, data, model),
        "rounds_made": state.step // options["length"],
        "visited": state.visited,
        "repeated": made - state.step,
        "seconds": time.perf_counter() - began,
        "parameters": sum(p.numel() for p in model.parameters()),
        "ranks_at_the_end": hvd.size(),
    }
    if hvd.rank() == 0:
        write_whole(found, options["out"])


if __name__ == "__main__":
    main()
