"""Compressed gradients for JAX and Optax: a gradient transformation that averages over processes.

import optax
from grace_ext.adapters.jax import exchange_gradients

optimizer = optax.chain(exchange_gradients(), optax.sgd(0.1))

Processes are those of MPI: `mpirun -np 4 python train.py`, one device in each.
"""

import dataclasses
import os
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from mpi4py import MPI

from grace_ext import ConfigError
from grace_ext._util.files import atomic_write
from grace_ext.exchange import checkpoint
from grace_ext.pipeline.compressor import Compressor

from ._common import state_files
from ._common.options import CompressionOptions
from ._common.versions import check_version
from ._jax import primitive
from ._jax.gradient_exchange import GradientExchange

__all__ = ["ExchangeGradients", "ExchangeState", "exchange_gradients"]


@dataclasses.dataclass
class JaxOptions(CompressionOptions):
    """The options of exchange_gradients."""

    absent: ClassVar[tuple[str, ...]] = ("groups", "selection", "grad_scaler")


class ExchangeState(NamedTuple):
    """The part of the optimizer's state that is exchange_gradients'.

    Attributes:
        step: int32[], the number of the next step.
    """

    step: jax.Array


class ExchangeGradients(optax.GradientTransformation):
    """What exchange_gradients returns: an optax.GradientTransformation, with what is remembered between steps.

    What it remembers (residuals, the number of the step) is on the host and not in the optimizer's state, so it belongs to one
    training. `init` gives a state of step 0, `update` the mean over processes of the gradients, in their dtypes, the same bits
    on all of them. `update` is called by all processes, in every step, with gradients of the same structure and shapes: inside
    of jax.jit, lax.scan and lax.cond (the same branch on all processes), or outside.
    """

    _exchange: GradientExchange

    def __new__(cls, options: CompressionOptions, comm: MPI.Comm) -> "ExchangeGradients":
        exchange = GradientExchange(options, comm)

        def init(params: optax.Params) -> ExchangeState:
            return ExchangeState(jnp.zeros((), jnp.int32))

        def update(
            updates: optax.Updates, state: ExchangeState, params: optax.Params | None = None
        ) -> tuple[optax.Updates, ExchangeState]:
            named = _named(updates)
            exchange.check(named)
            gradients = list(named.values()) if exchange.ranks > 1 else []
            results = primitive.exchange(state.step, gradients, exchange) if named else []
            leaves = results if exchange.ranks > 1 else list(named.values())
            return jax.tree.unflatten(jax.tree.structure(updates), leaves), ExchangeState(state.step + 1)

        made = super().__new__(cls, init, update)
        made._exchange = exchange
        return made

    def state_dict(self) -> dict:
        """This rank's memory and the number of the next step, after all steps under way. No collective.

        Returns:
            The state, of arrays of NumPy by name, with the memories of all ranks after consolidate_state_dict().
            grace_ext.exchange.checkpoint describes it.
        """
        return self._exchange.save()

    def load_state_dict(self, state_dict: dict | None) -> None:
        """Go on from a saved state, in the next step, with the optimizer's state that was saved beside it.

        Call it on all ranks, each with its own file or all with one that has the memories of all ranks. Training is then bit for
        bit what it would have been.

        Args:
            state_dict: What `state_dict` gave. None: memories start from zero, at the step of the optimizer's state.

        Raises:
            ConfigError: It is not a state of a known version. If it does not fit the model or, for on_resize="redistribute",
                some memories are missing, the next step raises it.
        """
        if not isinstance(state_dict, dict | None):
            raise ConfigError(f"load_state_dict takes what state_dict gave, not {type(state_dict).__name__}")
        if state_dict is not None:
            checkpoint.check_version(state_dict)
        self._exchange.load(state_dict)

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the memories of all ranks for state_dict() on rank `to`, until the next step: a collective.

        Args:
            to: The rank that will save them.

        Raises:
            ConfigError: There is no such rank.
        """
        self._exchange.consolidate(to)

    def save(self, path: str | os.PathLike) -> None:
        """Write `state_dict` to a file of NumPy's (.npz), which is there as a whole or not at all. No collective.

        Args:
            path: The file, another one on each rank; its folder is made where it is missing.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as part, open(part, "wb") as file:
            state_files.write(file, self.state_dict())

    def load(self, path: str | os.PathLike) -> None:
        """Call `load_state_dict` with what `save` has written.

        Args:
            path: The file.

        Raises:
            ConfigError: See load_state_dict.
        """
        self.load_state_dict(state_files.with_numbered_ranks(state_files.read(path)))

    def compression_stats(self) -> dict:
        """Bytes, ratio and seconds per stage, in total and of the last step, after all steps under way.

        Returns:
            What docs/observability.md describes; {"steps": 0} with one rank.
        """
        return self._exchange.stats()


def exchange_gradients(
    compression: str | dict | Compressor | None = None, *, comm: MPI.Comm | None = None, **options: Any
) -> ExchangeGradients:
    """Make a gradient transformation that replaces gradients by their mean over processes, and sends them compressed.

    It comes first in a chain. What may leave out a step on some processes (optax.apply_if_finite) or sums several (MultiSteps,
    which does so on all alike) is made around or after it as described in docs/frameworks.md. Make it on all ranks, in the
    same order as other communicators of MPI. Tensors are named by their paths in the tree of gradients: "layers.0.kernel".

    Args:
        compression: See CompressionOptions.
        comm: The ranks, as an intracommunicator of mpi4py; None for all. A duplicate of it is used.
        **options: All others of CompressionOptions, except groups, selection and grad_scaler. Memories that change an
            optimizer's step ("adam", "muon", "onebit_adam") are refused.

    Returns:
        The transformation.

    Raises:
        ConfigError: Specs, parts or arguments cannot work, or a version of JAX or Optax is not supported.
        TypeError: An option is unknown.
    """
    check_version("jax")
    check_version("optax", "jax")
    if comm is not None and not isinstance(comm, MPI.Intracomm):
        raise ConfigError(f"comm={comm!r}; allowed: an intracommunicator of mpi4py, such as MPI.COMM_WORLD")
    made = JaxOptions.from_keywords(options, compression=compression)
    transformation = ExchangeGradients(made, MPI.COMM_WORLD if comm is None else comm)
    if transformation._exchange.ranks == 1:
        made.warn_of_one_rank(stacklevel=2)
    return transformation


def _named(updates: optax.Updates) -> dict[str, jax.Array]:
    """The leaves by name, in their order. Raises ConfigError for what are no arrays."""
    leaves = jax.tree_util.tree_leaves_with_path(updates)
    short = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
    # Different paths may be short for the same name, as of {"a": {"b": x}, "a.b": y}.
    names = short if len(set(short)) == len(short) else [jax.tree_util.keystr(path) for path, _ in leaves]
    for name, (_, leaf) in zip(names, leaves, strict=True):
        if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
            raise ConfigError(f"the gradient of {name!r} is a {type(leaf).__name__}; allowed: arrays of JAX or NumPy")
    return {name: leaf for name, (_, leaf) in zip(names, leaves, strict=True)}
