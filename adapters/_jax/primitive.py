"""A step's exchange as a primitive of JAX, so that it can be part of a compiled function.

JAX's own io_callback hands its function arrays of JAX, and a function that reads these can wait for ever for the threads that
run it (jax-ml/jax#24255, #25861). This primitive is given arrays of NumPy, raises errors of grace_ext where it cannot be
used, and runs without compiling anything outside of jax.jit. Its order among others is that of ordered io_callbacks.
"""

import inspect
from typing import Any, NoReturn, Protocol

import jax
import numpy as np
from jax._src import callback as jax_callback  # nothing public emits a call of Python without arrays of JAX
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from grace_ext import ConfigError

_EFFECT = jax_callback._OrderedIOEffect


class Runs(Protocol):
    """What runs a step."""

    def run(self, step: np.ndarray, *gradients: np.ndarray) -> list[np.ndarray]:
        """Exchange gradients.

        Args:
            step: int32[], the number of the step as the optimizer's state has it.
            *gradients: Of any shapes; they may be read until this returns.

        Returns:
            The results, in the shapes and dtypes of the gradients. They may be written to by the next call.
        """
        raise NotImplementedError


_exchange = Primitive("grace_ext_exchange")
_exchange.multiple_results = True


def exchange(step: jax.Array, gradients: list[jax.Array], runs: Runs) -> list[jax.Array]:
    """Have gradients exchanged: at once, or whenever the function that is being traced runs.

    Args:
        step: See Runs.run.
        gradients: See Runs.run.
        runs: Who does it.

    Returns:
        The results.

    Raises:
        ConfigError: Inside vmap, pmap, shard_map and grad, and with arrays on several devices; inside jit, when it is compiled.
    """
    return _exchange.bind(step, *gradients, runs=runs)


@_exchange.def_impl
def _run_now(step: jax.Array, *gradients: jax.Array, runs: Runs) -> list[jax.Array]:
    for array in gradients:
        if isinstance(array, jax.Array) and len(array.sharding.device_set) > 1:
            _refuse_devices(len(array.sharding.device_set))
    # Copies, because results are written to again, and the CPU's arrays can share memory with NumPy's.
    results = [np.array(result) for result in runs.run(*map(np.asarray, (step, *gradients)))]
    return [
        jax.device_put(result, array.sharding if isinstance(array, jax.Array) else None)
        for result, array in zip(results, gradients, strict=True)
    ]


@_exchange.def_effectful_abstract_eval
def _shapes(step: Any, *gradients: Any, runs: Runs) -> tuple:
    return list(gradients), {_EFFECT}


def _lower(context: Any, *operands: Any, runs: Runs) -> Any:
    devices = context.module_context.axis_context
    count = getattr(devices, "num_devices", None) or getattr(getattr(devices, "mesh", None), "size", None)
    if count != 1:
        _refuse_devices(count)
    token = context.tokens_in.get(_EFFECT)
    results, token, _ = jax_callback.emit_python_callback(
        context, runs.run, token, list(operands), context.avals_in, context.avals_out, has_side_effect=True
    )
    context.set_tokens_out(mlir.TokenSet({_EFFECT: token}))
    return results


# JAX before 0.7 shares no lowered calls, and has no name for it.
_own_call = {"cacheable": False} if "cacheable" in inspect.signature(mlir.register_lowering).parameters else {}
mlir.register_lowering(_exchange, _lower, **_own_call)


def _refuse_devices(count: int | None) -> NoReturn:
    devices = "several devices" if count is None else f"{count} devices"
    raise ConfigError(
        f"exchange_gradients was given gradients on {devices} of one process: start a process for each device, with jax.jit and "
        "without pmap, shard_map and sharded arrays inside a process"
    )


def _refuse_vmap(*_: Any, **__: Any) -> NoReturn:
    raise ConfigError("exchange_gradients cannot be inside vmap: call update once for each step, in jax.jit or outside")


def _refuse_derivative(*_: Any, **__: Any) -> NoReturn:
    raise ConfigError(
        "exchange_gradients has no derivative: call update with gradients, not inside of what is differentiated"
    )


batching.primitive_batchers[_exchange] = _refuse_vmap
ad.primitive_jvps[_exchange] = _refuse_derivative
ad.primitive_transposes[_exchange] = _refuse_derivative
