"""What is checked inside the ranks of one job: what cannot work is refused, on all ranks and before anything is sent."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from harness import WORLD, bits, exchanged, gradients, model, train
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from support.checking import check, check_under_every_launcher, raises

from grace_ext import ConfigError, ExchangeError
from grace_ext.adapters._common import mpi_exit
from grace_ext.adapters.jax import exchange_gradients


def updating(**options):
    """A new exchange and a function that gives its result for gradients."""
    exchange = exchange_gradients(**options)
    state = exchange.init(None)
    return exchange, lambda given: exchange.update(given, state)[0]


@check
def gradients_that_cannot_be_exchanged():
    _, update = updating()
    for leaf, text in (
        (jnp.ones(3, jnp.int32), "the gradient of 'w' is int32; allowed: float32, bfloat16, float16"),
        (jnp.ones(3, jnp.complex64), "the gradient of 'w' is complex64"),
        (np.zeros(3, jax.dtypes.float0), "the gradient of 'w' is void"),
        (1.0, "the gradient of 'w' is a float; allowed: arrays"),
    ):
        with raises(ConfigError, text):
            update({"w": leaf})
        if not isinstance(leaf, np.ndarray | float):
            with raises(ConfigError, text):
                jax.jit(update)({"w": leaf})


@check
def gradients_that_are_others_than_before():
    for compiled in (False, True):
        _, update = updating()
        update = jax.jit(update) if compiled else update
        given = gradients()
        update(given)
        for change, text in (
            ({"scale": jnp.ones(2)}, "'scale' is (2,) and was ()"),
            ({"more": jnp.ones(2)}, "'more' is (2,) and was missing"),
            ({"scale": None}, "'scale' is missing and was ()"),
        ):
            with raises(ConfigError, text):
                update({**given, **change})


@check
def ways_of_jax_that_cannot_exchange():
    _, update = updating()
    given = {"w": jnp.ones((2, 30, 40))}
    for way in (jax.vmap(update), jax.jit(jax.vmap(update)), jax.vmap(jax.jit(update))):
        with raises(ConfigError, "cannot be inside vmap: call update once for each step, in jax.jit or outside"):
            way(given)
    _, update = updating()
    with raises(ValueError, "pmap"):  # of ours; before that of JAX, in version 0.6
        jax.pmap(update)(given)
    _, update = updating()
    devices = Mesh(np.array(jax.devices()), ("devices",))
    spread = jax.device_put(given, NamedSharding(devices, PartitionSpec("devices")))
    for way in (update, jax.jit(update)):
        with raises(ConfigError, "on 2 devices of one process"):
            way(spread)
    with raises(ConfigError, "has no derivative"):
        jax.grad(lambda given: update(given)["w"].sum())(given)
    result = update(given)  # nothing was sent before
    assert bits(result) == bits(jax.jit(updating()[1])(given))


@check
def options_that_cannot_work():
    for memory in ("adam", "muon", "onebit_adam:500", "zeroone_adam", {"*.w": "adam"}):
        with raises(ConfigError, "allowed are memories that only keep what was not sent, such as 'residual'"):
            exchange_gradients(memory=memory)
    with raises(ConfigError, "comm=3; allowed: an intracommunicator of mpi4py"):
        exchange_gradients(comm=3)
    for option in ("groups", "selection", "grad_scaler", "op"):
        with raises(TypeError, f"unknown option {option!r}; allowed: memory, communicator, rules, seed"):
            exchange_gradients(**{option: None})
    for compiled in (False, True):
        with raises(ConfigError, "allreduce"):
            exchanged(1, compiled, compression="topk:0.01/rice/raw", communicator="allreduce")


@check_under_every_launcher
def ranks_that_differ_are_told_so():
    different = {"seed": WORLD.rank}
    exchange, update = updating(**different)
    with raises(ConfigError, "have other parameters, specs or options than rank 0"):
        update(gradients())
    with raises(ExchangeError, "an earlier exchange of gradients failed"):
        update(gradients())
    mpi_exit.end(exchange._exchange)  # or else it would end the job at its end
    exchange, update = updating(**different)
    with raises(jax.errors.JaxRuntimeError, "have other parameters, specs or options than rank 0"):
        jax.block_until_ready(jax.jit(update)(gradients()))
    mpi_exit.end(exchange._exchange)
    train(exchange_gradients(), 1)


@check
def it_is_an_optax_transformation():
    exchange = exchange_gradients()
    assert isinstance(exchange, optax.GradientTransformation)
    init, update = exchange
    _, state = update(model(), init(model()))
    assert state.step == 1


@check
def a_wrapper_that_discards_steps_is_noticed():
    """optax.MultiSteps calls what it wraps in every step, and keeps its state in every second one."""
    exchange = exchange_gradients()
    optimizer = optax.MultiSteps(exchange, every_k_schedule=2)
    state = optimizer.init(gradients())
    _, state = optimizer.update(gradients(), state)
    with raises(jax.errors.JaxRuntimeError, "such as optax.MultiSteps"):  # it compiles
        optimizer.update(gradients(1), state)
    exchange.load_state_dict(None)
    optimizer.update(gradients(1), state)
