"""What the checks of JAX share: a model, data, and trainings of it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from mpi4py import MPI

from grace_ext.adapters.jax import exchange_gradients

WORLD = MPI.COMM_WORLD
WIDTH, HIDDEN, CLASSES = 40, 150, 10


def model(seed=0):
    """The parameters of a perceptron of two layers."""
    generator = np.random.default_rng(seed)
    shapes = {"first": (WIDTH, HIDDEN), "second": (HIDDEN, CLASSES)}
    return {
        name: {
            "kernel": jnp.asarray(0.1 * generator.standard_normal(shape, dtype=np.float32)),
            "bias": jnp.zeros(shape[1], jnp.float32),
        }
        for name, shape in shapes.items()
    }


def loss_of(params, batch):
    x, labels = batch
    hidden = jnp.tanh(x @ params["first"]["kernel"] + params["first"]["bias"])
    logits = hidden @ params["second"]["kernel"] + params["second"]["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def batches(steps, start=0, rank=None):
    """Other data on every rank and in every step, of the same classes."""
    centers = np.random.default_rng(7).standard_normal((CLASSES, WIDTH), dtype=np.float32)
    for step in range(start, start + steps):
        generator = np.random.default_rng([WORLD.rank if rank is None else rank, step])
        labels = generator.integers(0, CLASSES, 16)
        yield centers[labels] + generator.standard_normal((16, WIDTH), dtype=np.float32), labels


_loss_and_gradients = jax.jit(jax.value_and_grad(loss_of))  # compiled once for all that is not compiled as a whole


def step_with(optimizer):
    """step(params, state, batch) -> (params, state, loss)."""

    def step(params, state, batch):
        loss, gradients = _loss_and_gradients(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


def train(exchange, steps, start=0, begun=None, compiled=False, after=None):
    """What a training has come to, (parameters, state of the optimizer), and the losses. begun: what it goes on from."""
    optimizer = optax.chain(exchange, after or optax.sgd(0.1, momentum=0.9))
    step = step_with(optimizer)
    step = jax.jit(step) if compiled else step
    params, state = begun or (model(), None)
    state = optimizer.init(params) if state is None else state
    losses = []
    for batch in batches(steps, start):
        params, state, loss = step(params, state, batch)
        losses.append(loss)
    return (params, state), [float(loss) for loss in losses]


def gradients(step=0, rank=None, dtype=np.float32):
    """Those of one step and rank, of a tree with several kinds of nodes."""
    generator = np.random.default_rng([WORLD.rank if rank is None else rank, step])

    def normal(*shape):
        return jnp.asarray(generator.standard_normal(shape, dtype=np.float32), dtype)

    return {"layers": [{"w": normal(60, 50)}, {"w": normal(7, 80, 3), "b": normal(80)}], "scale": normal(), "none": None}


def exchanged(steps=3, compiled=False, dtype=np.float32, **options):
    """The means of the gradients of some steps."""
    exchange = exchange_gradients(**options)
    state, update = exchange.init(gradients()), jax.jit(exchange.update) if compiled else exchange.update
    results = []
    for step in range(steps):
        result, state = update(gradients(step, dtype=dtype), state)
        results.append(result)
    assert state.step == steps
    return results


def bits(tree):
    return b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree))


def same_on_all_ranks(tree):
    assert len(set(WORLD.allgather(bits(tree)))) == 1, "ranks hold different bits"
    return tree


def flat(tree):
    return np.concatenate([np.asarray(leaf, np.float32).ravel() for leaf in jax.tree.leaves(tree)])
