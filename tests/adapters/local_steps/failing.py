"""A job in which rank 1 raises: failing.py WHERE, between rounds, while an exchange is under way, or in the exchange; or in
which a signal stops it while others wait for the first collective of a round."""

import os
import signal
import sys

import harness
from harness import adamw, net, rank, train_step

from grace_ext.adapters.local_steps import LocalSteps

where = sys.argv[1]
harness.begin()
model = net()
optimizer = adamw(model)
local = LocalSteps(model, optimizer, steps=4, delay=3 if where == "under way" else 0)
for step in range(20):
    if rank() == 1 and step == 10 and where == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank() == 1 and step == (9 if where == "under way" else 10) and where in ("between", "under way"):
        raise RuntimeError("rank 1 gives up")
    if rank() == 1 and step == 10 and where == "worker":

        def broken(**_):
            raise MemoryError("the encoder of rank 1 broke")

        local._rounds.fragments[0].exchange.buckets[0].start = broken
    train_step(model, optimizer, step)
    local.step()
    print(f"step {step} went well", flush=True)
print("this line must not be reached", flush=True)
