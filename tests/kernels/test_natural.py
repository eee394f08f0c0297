"""Natural compression's kernels against their reference implementation. test_cpus.py runs this file for other CPUs, too."""

import numpy as np
import pytest
from support.guards import guarded
from support.kernel_inputs import KEY, KEYS, KINDS, qsgd_values
from support.reference_kernels import quantizers as reference_quantizers

from grace_ext.kernels import natural

pytestmark = pytest.mark.usefixtures("compiled")


@pytest.mark.parametrize("kind", KINDS)
def test_natural(kind):
    for k in (1, 17, 100):
        values = qsgd_values(kind, k)
        for lowest, count in ((1, 1), (1, 20), (1, 127), (120, 7), (125, 1), (128, 127), (254, 1)):
            codes, intact = guarded(k)
            natural.natural_encode(values, *map(np.uint32, (lowest, count)), *KEYS, codes)
            assert codes.tolist() == reference_quantizers.natural(values, lowest, count, *KEY) and intact()
            out, intact = guarded(k, np.float32)
            natural.natural_decode(codes, np.uint32(lowest), np.uint32(count), out)
            assert out.tolist() == reference_quantizers.un_natural(codes.tolist(), lowest, count) and intact()


def test_magnitude_range():
    found = {(): (0, 0), (0, -0.0): (0, 0), (0, -3, 2, 0.5): (0.5, 3), (3e38, -1e-45): (1e-45, 3e38)}
    for values, expected in found.items():
        bits = natural.nonzero_range(np.array(values, np.float32))
        assert np.array(bits, np.uint32).view(np.float32).tolist() == np.array(expected, np.float32).tolist()
