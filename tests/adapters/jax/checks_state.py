"""What is checked inside the ranks of one job: what is saved, and how a training goes on from it."""

import logging
import sys
from pathlib import Path

import numpy as np
from harness import WORLD, bits, flat, same_on_all_ranks, train
from mpi4py import MPI
from support.checking import check, check_under_every_launcher, raises

from grace_ext import ConfigError
from grace_ext.adapters.jax import exchange_gradients

METHODS = (
    {},
    {"compression": "topk:0.05/rice/raw", "memory": "ef21"},
    {"compression": "powersgd:2"},
    {"compression": "randomk:0.1/raw/fp16", "schedule": {"density": "warmup:steps=6"}},
)


@check_under_every_launcher
def a_saved_state_goes_on_bit_by_bit():
    for number, options in enumerate(METHODS):
        compiled = number == 0
        (expected, _), _ = train(exchange_gradients(**options), 7, compiled=compiled)
        exchange = exchange_gradients(**options)
        begun, _ = train(exchange, 3, compiled=compiled)
        path = Path(sys.argv[1], f"state{number}_rank{WORLD.rank}.npz")
        exchange.save(path)
        again = exchange_gradients(**options)
        again.load(path)
        (params, _), _ = train(again, 4, start=3, begun=begun, compiled=compiled)
        assert bits(params) == bits(expected), options
        same_on_all_ranks(params)


@check
def a_state_of_all_ranks_is_one_file():
    exchange = exchange_gradients()
    begun, _ = train(exchange, 3)
    own = exchange.state_dict()
    exchange.consolidate_state_dict(to=1)
    saved = exchange.state_dict()
    assert len(saved["memories"]) == (WORLD.size if WORLD.rank == 1 else 1)
    saved = WORLD.bcast(saved, 1)
    again = exchange_gradients()
    again.load_state_dict(saved)
    assert bits(again.state_dict()["memories"][WORLD.rank]) == bits(own["memories"][WORLD.rank])
    results = [train(one, 3, start=3, begun=begun)[0] for one in (exchange, again)]
    assert bits(results[0]) == bits(results[1])
    with raises(ConfigError, "to=9; allowed: 0 to"):
        exchange.consolidate_state_dict(9)


@check_under_every_launcher
def another_number_of_ranks_follows_the_declared_policy():
    exchange = exchange_gradients()
    begun, _ = train(exchange, 3)
    exchange.consolidate_state_dict()
    saved = WORLD.bcast(exchange.state_dict(), 0)
    half = WORLD.Split(WORLD.rank % (WORLD.size // 2), WORLD.rank)  # of two ranks, or all
    whole = sum(flat(memory["residual"]) for memory in saved["memories"].values())
    for comm in {half.size: half, 1: MPI.COMM_SELF}.values():
        again = exchange_gradients(comm=comm, on_resize="redistribute")
        again.load_state_dict(saved)
        train(again, 0, begun=begun)
        if comm.size == 1:
            assert again.state_dict() is saved
    if half.size < WORLD.size:
        again = exchange_gradients("topk:1e-9/rice/raw", comm=half, on_resize="redistribute")
        again.load_state_dict(saved)
        again._exchange.check(_by_name(begun[0]))
        again._exchange._settle(3)
        own = again._exchange.exchange.state_dict()["residual"]
        assert np.abs(half.allreduce(flat(own)) - whole).max() < 1e-5
    one = exchange_gradients(comm=half, on_resize="redistribute")
    with raises(ConfigError, "on_resize='keep'"):
        exchange_gradients(on_resize="keep")
    one.load_state_dict({**saved, "ranks": 9})
    with raises(ConfigError, "needs the memories of all 9 ranks"):
        train(one, 1, start=3, begun=begun)
    _forgive(one)


@check
def a_state_that_does_not_belong_to_the_optimizers_is_refused():
    exchange = exchange_gradients()
    begun, _ = train(exchange, 2)
    saved = exchange.state_dict()
    with raises(ConfigError, "the optimizer's state is of step 0, and what exchange_gradients remembers of step 2"):
        train(exchange, 1)
    again = exchange_gradients()
    with raises(ConfigError, "is of step 2, and what exchange_gradients remembers of step 0"):
        train(again, 1, begun=begun)
    _forgive(again)
    with raises(ConfigError, "load_state_dict takes what state_dict gave, not list"):
        exchange.load_state_dict([])
    with raises(ConfigError, "is of version 99"):
        exchange.load_state_dict({**saved, "version": 99})
    # From zero, at the step of the optimizer's state.
    with _Lines() as lines:
        exchange.load_state_dict(None)
        (params, _), _ = train(exchange, 2, start=2, begun=begun)
    same_on_all_ranks(params)
    assert exchange.state_dict()["step"] == 4
    assert WORLD.rank or "memories start from zero" in " ".join(lines)


class _Lines(logging.Handler):
    """Those of the log "grace_ext"."""

    def __enter__(self):
        self.lines = []
        logging.getLogger("grace_ext").addHandler(self)
        return self.lines

    def emit(self, record):
        self.lines.append(record.getMessage())

    def __exit__(self, *_):
        logging.getLogger("grace_ext").removeHandler(self)


def _by_name(params):
    return {f"{layer}.{name}": array for layer, arrays in sorted(params.items()) for name, array in sorted(arrays.items())}


def _forgive(exchange):
    """A failed exchange ends the job when its process ends, which this one was meant to be."""
    from grace_ext.adapters._common import mpi_exit

    mpi_exit.end(exchange._exchange)
