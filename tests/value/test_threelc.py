"""threelc: nearest of three values, and runs of zeros."""

import numpy as np
import pytest
from support import codec_conformance
from support.arrays import gauss
from support.value_sections import FLT_MAX, encoded

from grace_ext.pipeline.container import parse


@pytest.mark.parametrize("s", [1.0, 1.25, 1.5, 1.75, 1.999999999])
def test_threelc_rounds_to_the_nearest(s):
    """Lim et al.: M = s max |T|, T / M rounded."""
    values = gauss(1000) ** 3
    section, got = encoded(f"threelc:{s}", values)
    m = np.float32(s * float(abs(values).max()))
    assert np.array_equal(got, m * np.sign(values) * (abs(values) >= m / 2))
    assert got[abs(values).argmax()] == m * np.sign(values[abs(values).argmax()])
    assert section.size <= 4 + 200
    assert (encoded(f"threelc:{s}", [1e-45, 0, -0.0, -1e-45] * 3)[1][[1, 2, 5, 6]] == 0).all()
    assert np.isfinite(encoded(f"threelc:{s}", [FLT_MAX, -1])[1]).all()


def test_threelc_folds_zeros():
    """5 zeros a byte, 14 such bytes in one."""
    values = np.zeros(70 * 100, np.float32)
    assert encoded("threelc", values)[0].size == 4 + 100
    values[0] = 1
    assert encoded("threelc", values)[0].size == 4 + 1 + 100
    assert parse(codec_conformance.grace_ext.compressor("dense/threelc").compress(values)).value_section.size == 105
