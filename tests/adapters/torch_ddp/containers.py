"""Writes the containers of given gradients: containers.py ddp|horovod OUT_FOLDER, each rank in a folder of its own."""

import sys
from pathlib import Path

import torch
from support.framework_jobs import SENT, STEPS, Given, adamw, containers_of_ddp, recorded


def of_horovod(options, rank):
    from grace_ext.adapters.horovod_torch import DistributedOptimizer, HorovodTransport

    net = Given(rank, in_order=True)
    optimizer = DistributedOptimizer(adamw(net), net.named_parameters(), **options)
    with recorded(HorovodTransport) as sent:
        for _ in range(STEPS):
            optimizer.zero_grad()
            net()["loss"].backward()
            optimizer.step()
    return sent


def main(framework, out):
    torch.set_num_threads(1)
    if framework == "horovod":
        import horovod.torch as hvd

        hvd.init()
        rank = hvd.rank()
    else:
        torch.distributed.init_process_group("gloo")
        rank = torch.distributed.get_rank()
    folder = Path(out, f"{framework}{rank}")
    folder.mkdir()
    for number, options in enumerate(SENT[1:]):
        # Horovod's buckets have the order of backward from the first step on, DDP's from the third.
        sent = of_horovod(options, rank) if framework == "horovod" else containers_of_ddp(options, in_order=True)
        for (bucket, step), container in sent.items():
            (folder / f"{number}-{bucket}-{step}").write_bytes(container)


main(*sys.argv[1:])
