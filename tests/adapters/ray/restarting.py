"""A training of six steps: without a fault, with a worker that dies after its fourth step, and with one worker.

RANKS=2 restarting.py OUT_FOLDER writes whole.json, restarted.json and alone.json: the weights, the state's step, and how often the
training function started.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

from starting import ray_here, trainer

STEPS, SAVED_AFTER, DIES_AFTER = 6, 3, 4


def train(config):
    import ray.train
    import ray.train.torch
    import torch
    from ray.train import Checkpoint
    from support.framework_jobs import Net, Samples, adamw, flat, loss_of

    from grace_ext.adapters.ray import compress_gradients

    torch.set_num_threads(1)
    rank, ranks = ray.train.get_context().get_world_rank(), ray.train.get_context().get_world_size()
    began = Path(config["folder"], f"{config['what']}-began-{rank}")
    starts = 1 + (len(began.read_text()) if began.exists() else 0)
    began.write_text("x" * starts)
    net = Net()
    model = ray.train.torch.prepare_model(net)
    optimizer = adamw(model)
    state = compress_gradients(model, optimizer)
    first = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder, "training.pt"), weights_only=True)
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    samples = Samples(8 * ranks)
    for step in range(first, STEPS):
        batch = samples[slice(8 * rank, 8 * rank + 8)]
        loss_of(model(batch["x"] + step), batch["labels"]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == SAVED_AFTER:
            with tempfile.TemporaryDirectory() as folder:
                if rank == 0:
                    parts = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                    torch.save(parts, Path(folder, "training.pt"))
                ray.train.report({}, checkpoint=Checkpoint.from_directory(folder) if rank == 0 else None)
        if config["dies"] and starts == 1 and rank == 1 and step + 1 == DIES_AFTER:
            raise RuntimeError("this worker dies")
    if rank == 0:
        found = {"weights": flat(net).tolist(), "starts": starts, "step": state.state_dict()["step"] if ranks > 1 else None}
        Path(config["folder"], f"{config['what']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    folder, ranks = Path(sys.argv[1]), int(os.environ["RANKS"])
    with ray_here(ranks):
        for what, workers, dies in (("whole", ranks, False), ("restarted", ranks, True), ("alone", 1, False)):
            trainer(train, workers, folder, what, failures=1, what=what, dies=dies).fit()
