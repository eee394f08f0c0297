"""One rank of a job with a fault: faulty_ranks_worker.py FOLDER FAULT, the fault as JSON; see faulty_ranks.Fault.

Each rank that the fault strikes writes FOLDER/struck-RANK just before.
"""

import atexit
import faulthandler
import json
import os
import signal
import sys
from pathlib import Path

import numpy as np

from grace_ext.exchange.buckets import Bucket
from grace_ext.exchange.engine import Exchange
from grace_ext.observe import Writer

FOLDER, FAULT = Path(sys.argv[1]), json.loads(sys.argv[2])
STEPS, LAYERS, WIDTH = 8, 6, 48
OPTIONS = {name: FAULT[name] for name in ("compression", "memory", "communicator")}
rank = step = None
struck = False
faulthandler.register(signal.SIGUSR1, file=sys.__stderr__)  # for who asks where a job hangs


def strike() -> None:
    global struck
    if struck or rank not in FAULT["ranks"]:
        return
    struck = True
    (FOLDER / f"struck-{rank}").touch()
    if FAULT["kind"] == "exception":
        raise RuntimeError(f"rank {rank} gives up")
    if FAULT["kind"] in ("exit", "leave"):
        sys.exit(3 if FAULT["kind"] == "exit" else 0)
    os.kill(os.getpid(), signal.SIGKILL if FAULT["kind"] == "kill" else signal.SIGSTOP)


def here(point: str) -> None:
    """Strike if this is the point, in the step."""
    if point == FAULT["point"] and step == FAULT["step"]:
        strike()


def strike_in(owner: type, method: str, point: str) -> None:
    """At the call of that number in the step, in whichever thread."""
    plain, calls = getattr(owner, method), []

    def struck_one(*args, **kwargs):
        if step == FAULT["step"]:
            calls.append(method)
            if len(calls) > FAULT["number"]:
                here(point)
        return plain(*args, **kwargs)

    setattr(owner, method, struck_one)


class Onlooker(Writer):
    """Called at the end of each step."""

    def __init__(self):
        super().__init__(str(FOLDER / "onlooker-{rank}"), every=1)

    def write(self, record):
        here("callback")


def begin(own: int) -> None:
    """Ranks are known from here on."""
    global rank
    rank = own
    os.environ["GRACE_EXT_HOSTNAME"] = f"host{own % 2}"  # for what does another thing on another host
    strike_in(Bucket, "start", "worker")
    strike_in(Exchange, "finish", "between")
    strike_in(Bucket, "finish", "decode")
    if FAULT["point"] == "exit":
        atexit.register(strike)  # called before what was registered before: the exchange's own, and Horovod's


def train(one_step) -> None:
    """Where a point is not passed in its step, the fault strikes at its end."""
    global step
    for step in range(STEPS):  # noqa: B007
        here("user")
        one_step()
        if step == FAULT["step"] and FAULT["point"] != "exit":
            strike()
    print(f"rank {rank} trained to the end", flush=True)


def torch_net():
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(1)
    net = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    net[LAYERS // 2].weight.register_post_accumulate_grad_hook(lambda _: here("hook"))
    return torch, net


def forward(torch, net):
    hidden = net[: LAYERS // 2](torch.randn(4, WIDTH))
    hidden.register_hook(lambda _: here("backward"))
    return net[LAYERS // 2 :](hidden).square().sum()


def horovod_torch() -> None:
    import horovod.torch as hvd

    from grace_ext.adapters.horovod_torch import DistributedOptimizer

    hvd.init()
    begin(hvd.rank())
    torch, net = torch_net()
    optimizer = DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=1e-3), net.named_parameters(), bucket_bytes=1, observe=Onlooker(), **OPTIONS
    )

    def one_step():
        optimizer.zero_grad()
        forward(torch, net).backward()
        optimizer.step()

    train(one_step)


def ddp() -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from grace_ext.adapters.torch_ddp import CompressionState, comm_hook

    dist.init_process_group("gloo")
    begin(dist.get_rank())
    torch, net = torch_net()
    model = DistributedDataParallel(net, bucket_cap_mb=0.01)
    model.register_comm_hook(CompressionState(net.named_parameters(), observe=Onlooker(), **OPTIONS), comm_hook)

    def one_step():
        model.zero_grad()
        hidden = model(torch.randn(4, WIDTH))
        hidden.register_hook(lambda _: here("backward"))
        hidden.square().sum().backward()

    train(one_step)


def keras() -> None:
    import horovod.tensorflow as hvd
    import keras
    import tensorflow as tf

    from grace_ext.adapters.horovod_tensorflow import DistributedOptimizer

    hvd.init()
    begin(hvd.rank())
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    keras.utils.set_random_seed(1)
    net = keras.Sequential([keras.Input((WIDTH,)), *(keras.layers.Dense(WIDTH, use_bias=False) for _ in range(LAYERS))])
    net.compile(
        DistributedOptimizer(keras.optimizers.SGD(1e-3), bucket_bytes=1, observe=Onlooker(), **OPTIONS),
        keras.losses.MeanSquaredError(),
        jit_compile=False,
    )

    class Ends(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            here("hook")

    batch = np.random.default_rng(rank).standard_normal((4, WIDTH)).astype(np.float32)
    train(lambda: net.fit(batch, batch, batch_size=4, verbose=0, callbacks=[Ends()]))


{"horovod_torch": horovod_torch, "ddp": ddp, "keras": keras}[FAULT["adapter"]]()
