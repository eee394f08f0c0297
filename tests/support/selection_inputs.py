"""Inputs of the kernels that select."""

import numpy as np


def guarded(size):
    return np.full(size + 64, 0xA5A5A5A5, np.uint32)
