"""threshold: which values it takes."""

import numpy as np
from support.selection import select


def test_threshold_includes_its_value():
    dense = np.array([0.5, -0.5, np.nextafter(np.float32(0.5), np.float32(0)), 3, -0.1, 0], np.float32)
    assert select("threshold:0.5", dense).tolist() == [0, 1, 3]
    assert select("threshold:1e-45", dense).tolist() == [0, 1, 2, 3, 4]
    assert select("threshold:4", dense).size == 0
