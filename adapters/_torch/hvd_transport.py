"""The collectives of grace_ext over Horovod's PyTorch operations."""

import functools
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

# The public allgather_async and alltoall_async allocate the results themselves, and _hold needs them before they start.
from horovod.torch.mpi_ops import _allgather_async, _alltoall_async

from grace_ext.transport import CollectiveHandle, Transport
from grace_ext.transport.padding import SteadyLengths, pad, pad_own_part, unpad, unpad_own_part

from .._common.waiting import wait_until
from .._horovod.splits import as_splits

_HOST = torch.device("cpu")


class HorovodTransport(Transport):
    """The collectives of grace_ext over Horovod's PyTorch operations, in one process set.

    Args:
        process_set: The process set; this rank is one of its ranks.
        device: Where Horovod gets messages, alike on all ranks: on the host they go by MPI or Gloo, and on a GPU by what Horovod
            was built with for it.
    """

    def __init__(self, process_set: hvd.ProcessSet, device: torch.device = _HOST):
        self._process_set, self._device = process_set, device
        self.message_device = None if device.type == "cpu" else device
        self.rank, self.size, self.world_rank = process_set.rank(), process_set.size(), hvd.rank()
        self._lengths = SteadyLengths()

    def probe_transport(self) -> Transport:
        return self

    def allgather(self, name: str, payload: np.ndarray) -> CollectiveHandle:
        message = pad(payload, self._lengths.length_for(name, payload.size))
        sent = torch.from_numpy(message).to(self._device)
        received = sent.new()
        held = _hold(sent, received)
        handle = _allgather_async(sent, received, name, self._process_set)
        return _collective(handle, held, lambda received: unpad(name, _array_of(received)), message.size - payload.size)

    def allreduce(self, name: str, array: np.ndarray | torch.Tensor) -> CollectiveHandle:
        if isinstance(array, torch.Tensor):
            return self._sum(name, array, lambda summed: summed)
        return self._sum(name, torch.from_numpy(array).to(self._device), _array_of)

    def sum_tensor(self, name: str, tensor: torch.Tensor, prescale: float, postscale: float) -> CollectiveHandle:
        """Sum a tensor over ranks in place, as Horovod's own optimizer does.

        Args:
            name: The collective's name.
            tensor: The tensor, on any device.
            prescale: What it is multiplied with before the sum.
            postscale: What it is multiplied with after the sum.

        Returns:
            A handle whose `wait` returns None.
        """
        return self._sum(name, tensor, lambda _: None, prescale_factor=prescale, postscale_factor=postscale)

    def _sum(self, name: str, tensor: torch.Tensor, result: Callable, **factors: float) -> CollectiveHandle:
        held = _hold(tensor)
        handle = hvd.allreduce_async_(tensor, op=hvd.Sum, name=name, process_set=self._process_set, **factors)
        return _collective(handle, held, result)

    def alltoall(self, name: str, payload: np.ndarray | torch.Tensor, splits: list[int]) -> CollectiveHandle:
        if isinstance(payload, torch.Tensor):  # it is as long in each step
            return self._exchange(name, payload, splits, lambda got: got[0])
        length = self._lengths.length_for(name, payload.size)
        message, parts = pad_own_part(payload, splits, self.rank, length)
        return self._exchange(
            name,
            torch.from_numpy(message).to(self._device),
            parts,
            lambda got: unpad_own_part(_array_of(got[0]), got[1].tolist(), self.rank, length - payload.size),
        )

    def _exchange(self, name: str, sent: torch.Tensor, splits: list[int], result: Callable) -> CollectiveHandle:
        """An alltoall of a tensor on the transport's device."""
        sizes = torch.from_numpy(as_splits(name, splits))
        received, received_sizes = sent.new(), sizes.new()
        held = _hold(sent, sizes, received, received_sizes)
        handle = _alltoall_async(sent, sizes, received, received_sizes, name, self._process_set)
        return _collective(handle, held, result)

    def gather_to(self, name: str, payload: np.ndarray, to: int) -> list[np.ndarray]:
        """Send every rank's payload to one rank, a collective.

        Args:
            name: The collective's name.
            payload: uint8[m]; m may differ between ranks.
            to: The receiving rank.

        Returns:
            All ranks' payloads in the order of ranks on rank `to`, an empty list elsewhere.
        """
        splits = torch.zeros(self.size, dtype=torch.int32)
        splits[to] = payload.size
        joined, lengths = hvd.alltoall(torch.from_numpy(payload.copy()), splits, name=name, process_set=self._process_set)
        return np.split(joined.numpy(), np.cumsum(lengths.numpy())[:-1]) if self.rank == to else []


def _array_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.cpu().numpy()


def _hold(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Keep a reference of C++ to each tensor, as long as the returned list lives. Call it before Horovod gets the tensors.

    In torch 2.13, a thread that drops its reference to a tensor needs the interpreter lock if Python's is then the only one
    left. At a shutdown, Horovod 0.28.1 drops all tensors that are under way while its table of process sets is locked, and a
    thread that starts a collective waits for that table while it holds the interpreter lock: without this, the two wait for
    each other for ever.
    """
    holders = [tensor.detach() for tensor in tensors]
    for holder, tensor in zip(holders, tensors, strict=True):
        holder.grad = tensor
    return holders


def _collective(handle: int, held: list, result: Callable, padding: int = 0) -> CollectiveHandle:
    """handle: Horovod's. held: see _hold. result: what `wait` makes of the collective's results."""
    return CollectiveHandle(functools.partial(_wait, handle, held, result), functools.partial(hvd.poll, handle), padding)


def _wait(handle: int, _held: list, result: Callable) -> Any:
    wait_until(lambda: hvd.poll(handle), hvd.local_size())
    return result(hvd.synchronize(handle))
