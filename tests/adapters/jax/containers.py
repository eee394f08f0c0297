"""Sends given gradients by JAX and by PyTorch's DDP in the same ranks, and compares the containers byte by byte."""

import sys
from pathlib import Path

import torch.distributed as dist
from mpi4py import MPI

WORLD = MPI.COMM_WORLD
dist.init_process_group("gloo", f"file://{Path(sys.argv[1], 'meeting')}", rank=WORLD.rank, world_size=WORLD.size)

from collections import OrderedDict  # noqa: E402

import jax  # noqa: E402
import numpy as np  # noqa: E402
from support.framework_jobs import SENT, SHAPES, STEPS, containers_of_ddp, recorded  # noqa: E402

from grace_ext.adapters._common.mpi_transport import MpiTransport  # noqa: E402
from grace_ext.adapters.jax import exchange_gradients  # noqa: E402


def gradients(step):
    """Those of support.framework_jobs.Given, in the order of its parameters."""
    generator = np.random.default_rng([WORLD.rank, step])
    return OrderedDict((name, jax.numpy.asarray(generator.standard_normal(shape, "f4"))) for name, shape in SHAPES.items())


def containers_of_jax(options):
    exchange = exchange_gradients(**options)
    update, state = jax.jit(exchange.update), exchange.init(None)
    with recorded(MpiTransport) as sent:
        for step in range(STEPS):
            _, state = update(gradients(step), state)
        jax.effects_barrier()
    return sent


compared = 0
for options in SENT[1:]:  # the first is the default, which is another one with an optimizer of PyTorch's
    ours, theirs = containers_of_jax(options), containers_of_ddp(options, in_order=True)
    assert list(ours) == list(theirs) and len(ours) >= STEPS, (options, list(ours), list(theirs))
    assert all(ours[key] == theirs[key] for key in ours), options
    compared += len(ours)
print(f"{compared} containers are the same", flush=True)
dist.destroy_process_group()
