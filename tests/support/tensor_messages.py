"""Messages that are tensors of a transport's device, which is the CPU where there is no GPU."""

import numpy as np
import torch

from grace_ext.transport import CollectiveHandle
from grace_ext.transport.base import TransportWrapper


def check_tensor_messages(transport):
    """Rank 0 gives arrays and gets some, all others give tensors."""
    rank, ranks = transport.rank, range(transport.size)

    def given(array):
        return array if rank == 0 else torch.from_numpy(array.copy())

    def payload(step, sender, receiver):
        length = 0 if step == 1 and sender == receiver else 4 * (100 * step + 10 * sender + receiver)
        return np.random.default_rng([step, sender, receiver]).integers(0, 256, length, np.uint8)

    for step in range(4):
        parts = [payload(step, rank, receiver) for receiver in ranks]
        received = transport.alltoall("tensors", given(np.concatenate(parts)), [part.size for part in parts]).wait()
        summed = transport.allreduce("tensors summed", given(np.full(5, 2.0**rank, np.float16))).wait()
        for found, expected in (
            (received, np.concatenate([payload(step, sender, rank) for sender in ranks])),
            (summed, np.full(5, 2.0**transport.size - 1, np.float16)),
        ):
            assert isinstance(found, np.ndarray if rank == 0 else torch.Tensor)
            assert np.array_equal(np.asarray(found), expected), step


class WithTensors(TransportWrapper):
    """A transport whose messages lie on a device, which is the CPU, around one of arrays."""

    def __init__(self, transport):
        super().__init__(transport)
        self.message_device = torch.device("cpu")

    def start_collective(self, kind, name, array, *args):
        if not isinstance(array, torch.Tensor):
            return super().start_collective(kind, name, array, *args)
        handle = super().start_collective(kind, name, array.numpy(), *args)
        return CollectiveHandle(lambda: torch.from_numpy(handle.wait()), handle.poll)
