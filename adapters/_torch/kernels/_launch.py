"""How kernels are launched: where they can run, and that products and sums stay separate operations."""

import contextlib
import threading

import torch
import triton

#: Whether this process runs kernels in Triton's interpreter (TRITON_INTERPRET=1), on tensors of the CPU.
INTERPRETED: bool = triton.knobs.runtime.interpret
#: The interpreter knows one program at a time.
_one_at_a_time = threading.Lock() if INTERPRETED else contextlib.nullcontext()


def usable(device: str) -> bool:
    """Whether kernels can run on tensors of a device."""
    return INTERPRETED if torch.device(device).type == "cpu" else torch.device(device).type == "cuda" and not INTERPRETED


def on_device(device: str):
    """A context in which kernels run on a device: Triton launches on the current one."""
    return torch.cuda.device(device if torch.device(device).type == "cuda" else -1)


def launch(kernel, programs: int, *arguments, **constants) -> None:
    """Run a kernel in so many programs, none for 0.

    A product that is fused with a sum is rounded once instead of twice, so that the bytes would not be the host's.
    """
    if programs:
        with _one_at_a_time:
            kernel[(programs,)](*arguments, **constants, enable_fp_fusion=False)


def blocks(size: int, block: int) -> int:
    """The number of blocks that cover `size` elements."""
    return -(-size // block)


def signed32(x: int) -> int:
    """The int32 that has the bits of a uint32: kernels' integers have a sign."""
    return x - (1 << 32) if x >= 1 << 31 else x
