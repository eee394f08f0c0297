"""bf16: what it promises beyond every value codec's promises."""

import numpy as np
from support.value_sections import FLT_MAX, encoded


def test_bf16_keeps_the_range():
    values = np.array([FLT_MAX, -FLT_MAX, 1e-40, 0, -0.0, 1], np.float32)
    got = encoded("bf16", values)[1]
    assert np.isfinite(got).all() and np.allclose(got, values, rtol=2**-8, atol=1e-41)
    assert np.array_equal(np.signbit(got), np.signbit(values))
