"""What a transformation of gradients remembers on the host: its exchange with the other ranks, and what a step does."""

import atexit
import functools
import math
import sys
import weakref
from typing import Any

import jax
import numpy as np
from mpi4py import MPI

from grace_ext import ConfigError, ExchangeError
from grace_ext._util.scratch import use_scratch
from grace_ext.exchange.bucketing import build_buckets
from grace_ext.exchange.buckets import Bucket, Tensor
from grace_ext.exchange.scheduler import CallersThread
from grace_ext.exchange.session import StateSession
from grace_ext.exchange.stalls import check_config_digests

from .._common import mpi_exit, state_files
from .._common.floats import to_float32
from .._common.mpi_transport import MpiTransport
from .._common.options import CompressionOptions

_PREFIX = "grace_ext"
DTYPES = ("float32", "bfloat16", "float16", "float64")


class GradientExchange:
    """Exchanges one model's gradients, step after step, in whichever thread JAX runs it.

    Args:
        options: The options.
        comm: The ranks.

    Raises:
        ConfigError: Options cannot work.
    """

    def __init__(self, options: CompressionOptions, comm: MPI.Comm):
        self._options = options
        self.rank, self.ranks = comm.rank, comm.size
        options.choose_defaults(None, (self.rank, self.ranks))
        options.refuse_steps_in_memory(
            "exchange_gradients does not know the optimizer's step; allowed are memories that only keep what was not sent, such "
            "as 'residual', 'none' and 'ef21'"
        )
        self._rules, self._communicator = options.make_rules(), options.make_communicator()
        self._states = StateSession(options.on_resize, state_files.gather_memories)
        #: The shapes of the gradients by name, in their order; None before the first update.
        self._shapes: dict[str, tuple[int, ...]] | None = None
        self._agreed = False  # whether the ranks have compared their options and shapes
        self._error: BaseException | None = None
        self._takes_step = False  # whether to start from zero, at the step of the optimizer's state
        self._arrays: dict[tuple, np.ndarray] = {}  # scratch, the same whichever thread JAX takes
        self._results: dict[str, Result] = {}
        if self.ranks == 1:
            self.exchange = None
            self._states.load(None, None)
            return
        self._transport = MpiTransport(comm)
        self.exchange = options.make_exchange(self._transport, 1 / self.ranks, CallersThread())
        _open.add(self)

    def check(self, gradients: dict[str, Any]) -> None:
        """Check gradients, which may be traced, against what can be exchanged and against those before.

        Args:
            gradients: By name, with a shape and a dtype.

        Raises:
            ConfigError: A dtype cannot be exchanged, names or shapes are others than before, or specs, memories and communicator
                do not fit together.
        """
        for name, gradient in gradients.items():
            if gradient.dtype.name not in DTYPES:
                raise ConfigError(f"the gradient of {name!r} is {gradient.dtype.name}; allowed: {', '.join(DTYPES)}")
        shapes = {name: tuple(gradient.shape) for name, gradient in gradients.items()}
        if self._shapes is None:
            self._build(shapes)
            self._shapes = shapes
        if shapes == self._shapes and list(shapes) == list(self._shapes):
            return
        changed = [
            f"{name!r} is {shapes.get(name, 'missing')} and was {self._shapes.get(name, 'missing')}"
            for name in dict.fromkeys((*shapes, *self._shapes))
            if shapes.get(name) != self._shapes.get(name)
        ]
        raise ConfigError(
            f"the gradients have other names or shapes than in the first update: {'; '.join(changed[:3]) or 'their order'}. "
            "Allowed: the same in every step; make an exchange_gradients() for each model"
        )

    def _build(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Build the buckets. No collective."""
        if self.exchange is None:
            return
        tensors = [Tensor(name, math.prod(shape), len(shape), shape=shape) for name, shape in shapes.items()]
        limit = self._options.largest_bucket
        built = build_buckets(self.exchange, [tensors], (), self._rules, self._communicator, _PREFIX, limit)
        self.exchange.set_buckets(built)
        for bucket in built:
            bucket.lender = self._results[bucket.name] = Result(bucket.size)

    def run(self, step: np.ndarray, *gradients: np.ndarray) -> list[np.ndarray]:
        """See grace_ext.adapters._jax.primitive.Runs."""
        if self._error is not None:
            raise ExchangeError(
                "an earlier exchange of gradients failed, so the ranks may be out of step: restart from a checkpoint"
            ) from self._error
        self._states.begin_step()
        if self.exchange is None:
            self._states.waiting["step"] += 1
            return list(gradients)
        if self._states.settled:
            self._check_step(int(step))
        try:
            with use_scratch(self._arrays):
                if not self._states.settled:
                    self._settle(int(step))
                    self._check_step(int(step))
                return self._run(gradients)
        except BaseException as error:
            self._error = error
            self.exchange.abort()
            mpi_exit.begin(self, "after an exchange of gradients that failed")
            raise

    def _check_step(self, step: int) -> None:
        if step != self.exchange.step:
            mpi_exit.begin(self, "without the state that its optimizer needs")
            raise ConfigError(
                f"the optimizer's state is of step {step}, and what exchange_gradients remembers of step {self.exchange.step}: "
                "load what state_dict() gave beside that state, or load_state_dict(None) to start from zero. Allowed is one training "
                "for each exchange_gradients(), outside of wrappers that discard steps, such as optax.MultiSteps: chain it before them"
            )

    def _run(self, gradients: tuple[np.ndarray, ...]) -> list[np.ndarray]:
        exchange = self.exchange
        by_name = dict(zip(self._shapes, gradients, strict=True))
        for bucket in exchange.buckets:
            parts = [by_name[tensor.name].reshape(-1) for tensor in bucket.tensors]
            exchange.start(bucket, functools.partial(_pack, bucket, parts))
        exchange.advance()
        for bucket in exchange.buckets:
            exchange.finish(bucket, self._results[bucket.name].out)
        exchange.end_step()
        results = {}
        for bucket in exchange.buckets:
            parts = np.split(self._results[bucket.name].out, np.cumsum(bucket.sizes)[:-1])
            for tensor, part in zip(bucket.tensors, parts, strict=True):
                results[tensor.name] = _cast(part.reshape(by_name[tensor.name].shape), by_name[tensor.name].dtype)
        return [results[name] for name in by_name]

    def _settle(self, step: int) -> None:
        """Have all ranks start from one state. A collective."""
        exchange = self.exchange
        if not self._agreed:
            check_config_digests(exchange, lambda message: self._transport.allgather_equal(message).wait())
            self._agreed = True
        if self._takes_step:
            self._states.load(None, exchange)
            exchange.step = step
        elif self._states.waiting is not None:
            self._states.load(self._states.waiting, exchange)
        self._takes_step = False
        self._states.settle(exchange, _PREFIX)

    # State: see StateSession. JAX runs steps while the program goes on, so these wait for those that are under way.

    def save(self) -> dict:
        """No collective."""
        jax.effects_barrier()
        return self._states.save(self.exchange, list(self._shapes or ()))

    def load(self, saved: dict | None) -> None:
        """In force from the next step on, in which the ranks settle what they start with. None: from zero."""
        jax.effects_barrier()
        if self._error is None:
            mpi_exit.end(self)
        self._takes_step = saved is None
        self._states.load(saved, None)
        if self.exchange is not None:
            self._states.settled = False

    def consolidate(self, to: int) -> None:
        """A collective: until the next step, `save` on rank `to` has the memories of all ranks."""
        jax.effects_barrier()
        if self.exchange is not None:
            self._states.consolidate(self.exchange, list(self._shapes or ()), _PREFIX, to)

    def stats(self) -> dict:
        """See grace_ext.exchange.stats.report; {"steps": 0} with one rank."""
        jax.effects_barrier()
        return {"steps": 0} if self.exchange is None else self.exchange.stats()

    def leave(self) -> None:
        """At the end of this process: the other ranks need not wait for it any more."""
        self._transport.leave()


class Result:
    """Where a bucket's result is, which is its Lender (grace_ext.exchange.buckets). out: float32[size]."""

    def __init__(self, size: int):
        self.out = np.zeros(size, np.float32)


def _pack(bucket: Bucket, parts: list[np.ndarray], *out: np.ndarray) -> Any:
    """For Exchange.start. What is float32 is given as it is, where the bucket takes that."""
    in_parts = bucket.wants_parts
    if (len(parts) == 1 or in_parts) and all(part.dtype == np.float32 for part in parts):
        return parts if in_parts else parts[0]
    for part, place in zip(parts, np.split(out[0], np.cumsum(bucket.sizes)[:-1]), strict=True):
        to_float32(part, place)
    return None


def _cast(result: np.ndarray, dtype: np.dtype) -> np.ndarray:
    with np.errstate(over="ignore"):  # beyond float16 is Inf
        return result.astype(dtype, copy=False)


_open: weakref.WeakSet[GradientExchange] = weakref.WeakSet()


@atexit.register
def _leave() -> None:
    """Before JAX's own end, which waits for steps under way. After an error that nobody caught, mpi_exit ends the job."""
    if getattr(sys, "last_value", None) is not None:
        return
    jax.effects_barrier()
    for one in list(_open):
        one.leave()
