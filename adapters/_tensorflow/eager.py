"""Collectives of eager code, between steps. They have no names: ranks pair them by their order."""

import json
import zlib
from collections.abc import Iterable
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from grace_ext import ConfigError, ExchangeError

_CHUNK_BYTES = 64 * 2**20


def has_others(process_set: hvd.ProcessSet) -> bool:
    """Whether this rank is in the process set, and not alone there."""
    return process_set.included() and process_set.size() > 1


def gather(values: Any, process_set: hvd.ProcessSet, dtype: tf.DType | None = None) -> np.ndarray:
    """Every rank's values, joined along the first dimension in the order of ranks."""
    return hvd.allgather(tf.constant(values, dtype), process_set=process_set).numpy()


def gather_json(value: Any, process_set: hvd.ProcessSet) -> list:
    """Every rank's value, of what JSON can say."""
    text = np.frombuffer(json.dumps(value).encode() + b"\n", np.uint8)
    return [json.loads(line) for line in gather(text, process_set).tobytes().splitlines()]


def broadcast_variables(
    variables: Iterable, root_rank: int = 0, process_set: hvd.ProcessSet = hvd.global_process_set
) -> None:
    """Assign the values on root_rank to the variables on all ranks, eagerly: one collective for every 64 MiB.

    Args:
        variables: tf.Variables and Keras 3's, of any dtype; the same on all ranks, in the same order.
        root_rank: The rank, in the whole job, whose values count.
        process_set: The ranks that take part.

    Raises:
        ConfigError: It is called inside tf.function.
        ExchangeError: Ranks give variables of other shapes or dtypes.
    """
    if not tf.executing_eagerly():
        raise ConfigError("broadcast_variables inside tf.function: call it outside")
    if not has_others(process_set):
        return
    variables = list(variables)
    form = str([(tuple(variable.shape), tf.as_dtype(variable.dtype).name) for variable in variables])
    forms = gather([zlib.crc32(form.encode())], process_set, tf.int64)
    if (forms != forms[0]).any():
        raise ExchangeError("broadcast_variables: ranks give variables of other shapes or dtypes")
    chunk, size = [], 0
    for variable in variables:
        chunk.append((variable, np.asarray(variable.numpy())))
        size += chunk[-1][1].nbytes
        if size >= _CHUNK_BYTES or variable is variables[-1]:
            _broadcast(chunk, root_rank, process_set)
            chunk, size = [], 0


def _broadcast(chunk: list[tuple], root_rank: int, process_set: hvd.ProcessSet) -> None:
    """chunk: variables, and the value of each on this rank."""
    sent = np.concatenate([value.reshape(-1).view(np.uint8) for _, value in chunk])
    received = hvd.broadcast(tf.constant(sent), root_rank, process_set=process_set).numpy()
    start = 0
    for variable, value in chunk:
        part = received[start : start + value.nbytes].copy()  # starts where values of its type may start
        variable.assign(part.view(value.dtype).reshape(value.shape))
        start += value.nbytes
