"""Top-k against ranking all magnitudes."""

import numpy as np
import pytest
from support import codec_conformance, reference_kernels
from support.arrays import gauss

from grace_ext import registry


@pytest.mark.parametrize("density", [1e-9, 0.001, 0.01, 0.3, 1.0])
def test_topk_is_the_true_top_k(density):
    sparsifier = registry.build("sparsifier", "topk", {"density": density})
    for gradient in [*codec_conformance.gradients().values(), gauss(300_000)]:
        k = min(gradient.size, max(1, round(density * gradient.size)))
        assert np.array_equal(
            sparsifier.select(gradient, codec_conformance.scope_of(gradient))[0], reference_kernels.topk(gradient, k)
        )
