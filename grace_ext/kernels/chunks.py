"""The largest magnitudes of every chunk."""

import numpy as np

from ._chunk_topk import GROUPS, select_of_chunk
from ._compile import kernel


@kernel("int64(Array(float32, 1, 'C', readonly=True), int64, int64, uint32[::1], float32[::1], uint32[:, ::1])")
def select_chunks(values, chunk, k, positions, found, work):
    """Select the k largest magnitudes of every `chunk` values; returns how many are selected in all.

    Of each chunk exactly k are selected (all of a shorter last one); ties go to the lowest position. values: float32[d];
    positions: uint32[n] and found: float32[n], written, n = k for every chunk. work: uint32[3, chunk + LANES].
    """
    n, groups = 0, np.empty(GROUPS, np.uint32)
    for start in range(0, values.size, chunk):
        part = values[start : min(values.size, start + chunk)]
        n = select_of_chunk(part, start, k, groups, work, positions, found, n)
    return n
