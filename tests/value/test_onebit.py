"""onebit: the means of both signs."""

import numpy as np
from support.arrays import gauss
from support.value_sections import FLT_MAX, encoded


def test_onebit_sends_the_means_of_both_signs():
    values = gauss(1000) + np.float32(0.3)
    for bucket in (0, 128):
        got = encoded(f"onebit:{bucket}", values)[1]
        for start in range(0, 1000, bucket or 1000):
            part = values[start : start + (bucket or 1000)].astype(float)
            means = np.where(part < 0, part[part < 0].mean(), part[part >= 0].mean())
            np.testing.assert_allclose(got[start : start + (bucket or 1000)], means, rtol=1e-6)
    assert (encoded("onebit", [FLT_MAX] * 20)[1] == FLT_MAX).all()
