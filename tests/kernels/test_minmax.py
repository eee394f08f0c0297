"""The min-max kernels against their reference implementation. test_cpus.py runs this file for other CPUs, too."""

import numpy as np
import pytest
from support.guards import guarded
from support.kernel_inputs import KINDS, SIZES, buckets, qsgd_values
from support.reference_kernels import quantizers as reference_quantizers

from grace_ext.kernels import minmax

pytestmark = pytest.mark.usefixtures("compiled")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("top", [1, 3, 7, 127, 255])
def test_minmax(top, kind):
    for k in SIZES:
        values = qsgd_values(kind, k)
        values[::3] *= np.float32(-1)  # zeros of both signs
        for chunk in (*buckets(k), 3):
            ranges, levels = reference_quantizers.minmax(values, chunk, top)
            found, ranges_intact = guarded(2 * len(ranges), np.float32)
            codes, intact = guarded(k)
            minmax.minmax_encode(values, chunk, top, found.reshape(-1, 2), codes)
            assert found.tobytes() == ranges.tobytes() and ranges_intact()
            assert codes.tolist() == levels and intact()
            out, intact = guarded(k, np.float32)
            minmax.minmax_decode(codes, chunk, top, ranges, out)
            assert out.tobytes() == reference_quantizers.un_minmax(levels, chunk, top, ranges).tobytes() and intact()
            assert np.isfinite(out).all()
