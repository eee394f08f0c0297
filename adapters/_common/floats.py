"""Floating-point numbers of any framework as float32."""

import numpy as np

from grace_ext.kernels.half import bf16_decode, fp16_decode


def to_float32(array: np.ndarray, out: np.ndarray) -> None:
    """Convert an array to float32.

    Args:
        array: float32[n], float16[n], bfloat16[n] or float64[n]; of the latter, what is beyond float32 becomes Inf.
        out: float32[n], where the result is written to.
    """
    if array.dtype == np.float32:
        out[:] = array
    elif array.dtype.name == "float16":
        fp16_decode(array.view(np.uint16), out)
    elif array.dtype.name == "bfloat16":
        bf16_decode(array.view(np.uint16), out)
    else:
        with np.errstate(over="ignore"):  # a float64 beyond float32 becomes Inf, which the container says
            np.copyto(out, array, casting="same_kind")
