"""Floating-point numbers of every width, as float32."""

import numpy as np
import pytest

from grace_ext.adapters._common.floats import to_float32

VALUES = [0.0, -0.0, 1.5, -2.25, 3e-5, np.inf, -np.inf, 1e300]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_floats_of_every_width_become_float32(dtype):
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    with np.errstate(over="ignore"):
        values = np.array(VALUES).astype(dtype)
        expected = values.astype(np.float32)
    out = np.full(8, 5, np.float32)
    to_float32(values, out)
    assert out.tobytes() == expected.tobytes()
