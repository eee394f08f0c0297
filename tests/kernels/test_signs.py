"""The kernels of one-bit signs against their reference implementation. test_cpus.py runs this file for other CPUs, too."""

import numpy as np
import pytest
from support.guards import guarded
from support.kernel_inputs import KINDS, SIZES, buckets, qsgd_values
from support.reference_kernels import quantizers as reference_quantizers

from grace_ext.kernels import signs

pytestmark = pytest.mark.usefixtures("compiled")


@pytest.mark.parametrize("kind", KINDS)
def test_onebit(kind):
    for k in SIZES:
        values = qsgd_values(kind, k)
        values[0] = -0.0
        for bucket in buckets(k):
            means, bits = reference_quantizers.onebit(values, bucket)
            found, means_intact = guarded(means.size, np.float32)
            packed, intact = guarded(-(-k // 8))
            signs.onebit_encode(values, bucket, found.reshape(-1, 2), packed)
            assert found.tobytes() == means.tobytes() and means_intact()
            assert packed.tobytes() == np.packbits(bits, bitorder="little").tobytes() and intact()
            out, intact = guarded(k, np.float32)
            signs.onebit_decode(packed, bucket, means, out)
            assert out.tolist() == [means[i // bucket, bit] for i, bit in enumerate(bits)] and intact()
