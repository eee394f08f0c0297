"""The median of each element."""

import numpy as np
import pytest
from support.federated_means import D, updates_of, vectors_of

from grace_ext.means import Median, base


@pytest.mark.parametrize("clients", [1, 2, 3, 6, 7])
@pytest.mark.parametrize("block", [7, 100, 1000])
def test_the_median_is_that_of_each_element(clients, block, monkeypatch):
    monkeypatch.setattr(base, "BLOCK", block)
    vectors = vectors_of(clients)
    np.testing.assert_allclose(Median()(updates_of(vectors), D), np.median(vectors, axis=0), rtol=1e-6)
