"""A job in which rank 1 fails or ends: failing.py WHERE, in the user's code, in the exchange of a compiled step, there while
nobody looks at its result, or early and in order; or no rank fails, and nobody waits for the last step."""

import contextlib
import sys

import jax
from harness import WORLD, batches, model, step_with
from optax import chain, sgd

from grace_ext.adapters.jax import exchange_gradients

where = sys.argv[1]
exchange = exchange_gradients()
optimizer = chain(exchange, sgd(0.1))
step = jax.jit(step_with(optimizer))
params, state = model(), optimizer.init(model())


def broken(**_):
    raise MemoryError("the encoder of rank 1 broke")


for number, batch in enumerate(batches(12)):
    if number == 5 and WORLD.rank == 1:
        if where == "user":
            raise RuntimeError("rank 1 gives up")
        if where == "early":
            sys.exit(0)
        if where in ("worker", "caught", "unseen"):
            exchange._exchange.exchange.buckets[0].start = broken
    seen = where not in ("unseen", "nowhere")
    with contextlib.suppress(Exception) if where in ("caught", "unseen") else contextlib.nullcontext():
        params, state, loss = step(params, state, batch)
        if seen or number < 5:
            jax.block_until_ready(loss)
            print(f"step {number} went well", flush=True)
    if where == "unseen" and number == 5 and WORLD.rank == 1:
        break
print("all steps were begun", flush=True)
