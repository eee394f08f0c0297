"""What the PyTorch adapters share: buckets for where tensors live, gradients into them and results out of them."""

import numpy as np
import torch

from grace_ext.exchange import Bucket, Exchange
from grace_ext.rows import RowBucket, RowGradient

from ._torch_device import TorchBucket
from ._torch_rows import from_rows, to_rows


def on_device(bucket: Bucket, selection: str) -> Bucket:
    """The same bucket for an accelerator, if there is such a road for it. selection: "auto", "host" or "device"."""
    wanted = selection == "device" or selection == "auto" and bucket.device != "cpu"
    if wanted and TorchBucket.fits(bucket.compressor, bucket.communicator, bucket.memory):
        return TorchBucket(bucket.name, bucket.tensors, bucket.compressor, bucket.communicator, bucket.memory)
    return bucket


def room_for(bucket: Bucket) -> torch.Tensor | RowGradient:
    """Where the bucket's result is written."""
    if isinstance(bucket, RowBucket):
        return RowGradient()
    return torch.zeros(bucket.size, device=bucket.device if isinstance(bucket, TorchBucket) else "cpu")


def taken_by(bucket: Bucket, room: torch.Tensor | RowGradient):
    """The room as Exchange.finish takes it."""
    return room if isinstance(bucket, RowBucket | TorchBucket) else room.numpy()


def pack(bucket: Bucket, gradients: list, factor: float, *out):
    """For Exchange.start: the bucket's gradients, times factor, in the way that it takes them. One that is None is zero.

    out: float32[size], numpy or torch, which they are copied to; buckets of rows take none and get a RowGradient.
    """
    if isinstance(bucket, RowBucket):
        return to_rows(gradients[0], bucket.tensors[0].shape, factor)
    flat = torch.from_numpy(out[0]) if isinstance(out[0], np.ndarray) else out[0]
    for gradient, part in zip(gradients, flat.split(bucket.sizes), strict=True):
        if gradient is None:
            part.zero_()
        else:
            part.view(gradient.shape).copy_(gradient if gradient.layout == torch.strided else gradient.to_dense())
    if factor != 1.0:
        flat.mul_(factor)
    return None


def receive(exchange: Exchange, bucket: Bucket, room, parameters: list, factor: float) -> list[torch.Tensor]:
    """The bucket's results, times factor: views of the room, shaped like the parameters, or sparse tensors."""
    exchange.finish(bucket, taken_by(bucket, room))
    if isinstance(bucket, RowBucket):
        return [from_rows(room, parameters[0], factor)]
    parts = (room.mul_(factor) if factor != 1.0 else room).split(bucket.sizes)
    return [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]
