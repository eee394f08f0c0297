"""Tensors on the host as the arrays that the core's kernels take."""

import numpy as np
import torch

_THREADS = 2  # of torch, up to which a kernel of one thread is not slower


def kernels_are_faster() -> bool:
    """Whether a kernel of one thread goes over a tensor sooner than torch's operations with all its threads do.

    Returns:
        Whether torch has few threads: a kernel takes half as long as one of them.
    """
    return torch.get_num_threads() <= _THREADS


def suit_kernels(*tensors: torch.Tensor) -> bool:
    """Whether kernels can work in tensors where they are.

    Args:
        tensors: The tensors.

    Returns:
        Whether all of them are contiguous float32 on the host.
    """
    return all(one.is_cpu and one.dtype == torch.float32 and one.is_contiguous() for one in tensors)


def flat(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's elements in row-major order.

    Args:
        tensor: The tensor.

    Returns:
        float32[elements] on the host, without a copy where `suit_kernels` says so.
    """
    if not (tensor.is_cpu and tensor.dtype == torch.float32):  # asked first: the conversion takes as long as all the rest
        tensor = tensor.detach().to("cpu", torch.float32)
    return tensor.numpy(force=True).reshape(-1)
