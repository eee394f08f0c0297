"""Runs the checks of Ray Train in every worker of a TorchTrainer: RANKS=2 worker.py OUT_FOLDER."""

import os
import sys
from pathlib import Path

from starting import ray_here, trainer


def train(config):
    import torch
    import torch.distributed as dist

    sys.argv[1:] = [config["folder"]]  # for support.framework_jobs
    import checks_ray  # noqa: F401  (importing registers the checks)
    from support.checking import run_checks

    def count(name, number):
        total = torch.tensor([number])
        dist.all_reduce(total)
        return total.item()

    torch.set_num_threads(1)
    run_checks(config["folder"], dist.get_rank(), dist.get_world_size(), count)


if __name__ == "__main__":
    ranks = int(os.environ["RANKS"])
    with ray_here(ranks):
        trainer(train, ranks, Path(sys.argv[1])).fit()
