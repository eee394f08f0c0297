"""Rice codes: the same bits as the host's kernels write, and the same positions from them."""

import numpy as np
import torch
from inputs import same, tensor
from support.checking import check

from grace_ext.adapters._torch.kernels import rice
from grace_ext.index.rice import best_shift
from grace_ext.kernels import rice_encode
from grace_ext.kernels.rice import quotient_room, remainder_bytes


def cases():
    rng = np.random.default_rng(0)
    for d, k in ((1, 1), (10, 10), (33, 32), (1000, 10), (200_000, 3000), (2**31 - 1, 5), (2**31 - 1, 1)):
        yield d, np.unique(rng.integers(0, d, k)).astype(np.uint32)
    yield 3000, np.arange(3000, dtype=np.uint32)
    yield 2**31 - 1, np.array([0, 2**31 - 2], np.uint32)
    yield 100_000, np.arange(99_000, 99_100, dtype=np.uint32)  # one long quotient
    yield 100_000, np.append(np.arange(1025, dtype=np.uint32), 99_999).astype(np.uint32)


@check
def rice_codes_are_the_same_bits():
    for d, positions in cases():
        k = positions.size
        for e in {0 if d < 1 << 20 else 20, best_shift(d, k)}:
            low, high = np.zeros(remainder_bytes(k, e) + 8, np.uint8), np.zeros(quotient_room(d, k, e), np.uint8)
            bits = rice_encode(positions, e, low, high)
            own_low, own_high = (
                torch.zeros(size // 4 + 2, dtype=torch.int32) for size in (remainder_bytes(k, e), high.size)
            )
            assert rice.encode(tensor(positions.view(np.int32)), e, own_low, own_high).tolist() == [bits]
            assert own_low.numpy().tobytes()[: remainder_bytes(k, e)] == low[: remainder_bytes(k, e)].tobytes()
            assert not any(own_low.numpy().tobytes()[remainder_bytes(k, e) :])
            size = -(-bits // 8)
            assert own_high.numpy().tobytes()[:size] == high[:size].tobytes()
            assert not any(own_high.numpy().tobytes()[size:])
            found = torch.empty(k, dtype=torch.int32)
            assert rice.decode(own_low, own_high, e, k, found).tolist() == [k]
            assert same(found, positions)


@check
def a_stream_of_other_counts_is_told_and_nothing_is_written_beyond_the_codes():
    rng = np.random.default_rng(1)
    for e in (0, 7, 30):
        for _ in range(3):
            unary = tensor(rng.integers(-(2**31), 2**31, 40).astype(np.int32))
            remainders = tensor(rng.integers(-(2**31), 2**31, 30 * 50 // 32 + 2).astype(np.int32))
            guarded = torch.full((60,), 0x5A5A5A5A, dtype=torch.int32)
            ones = rice.decode(remainders, unary, e, 50, guarded[:50])
            assert ones.tolist() == [int(np.unpackbits(unary.numpy().view(np.uint8)).sum())]
            assert (guarded[50:] == 0x5A5A5A5A).all()
