"""The trimmed mean of each element."""

import numpy as np
import pytest
from support.federated_means import D, updates_of, vectors_of

from grace_ext.means import TrimmedMean


@pytest.mark.parametrize(
    "clients, share, left",
    [(10, 0.3, 4), (10, 0.0, 10), (10, 0.25, 4), (7, 0.3, 1), (2, 0.3, 2), (1, 0.4, 1), (3, 0.4, 1), (20, 0.1, 16)],
)
def test_the_trimmed_mean_leaves_out_at_least_its_share_at_each_end(clients, share, left):
    vectors, cut = vectors_of(clients), (clients - left) // 2
    expected = np.sort(vectors, axis=0)[cut : clients - cut].mean(axis=0)
    np.testing.assert_allclose(TrimmedMean(share)(updates_of(vectors), D), expected, atol=1e-6)
