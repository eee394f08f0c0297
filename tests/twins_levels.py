"""Slow twins of the encoders of levels: kernels/levels.py, ans.py and level_huffman.py."""

import heapq
import struct

import reference_levels
import twins


def table(classes, mantissas, width):
    bits, previous = [], 0
    for c, m in zip(classes, mantissas, strict=True):
        step = c - previous
        bits += [1] * (2 * step if step >= 0 else -2 * step - 1) + [0] + twins.low_bits(m, max(0, min(c - 1, width)))
        previous = c
    return twins.to_bytes(bits)


def classes(counts):
    """(class, mantissa) of each count: 4096 parts, rounded to 4 significant bits."""
    found, total = [], sum(counts)
    for count in counts:
        if count == 0:
            found.append((0, 0))
            continue
        weight, shift = max(1, (count * 4096 + total // 2) // total), 0
        while weight >> shift >= 16:
            shift += 1
        if shift:
            weight = (weight + (1 << shift - 1)) >> shift << shift
        bits = weight.bit_length()
        found.append((bits, (weight - (1 << bits - 1)) >> max(0, bits - 4)))
    return tuple(zip(*found, strict=True))


def ans(levels, shares):
    """The 8 states and the refills; the encoder's arithmetic in its plainest form."""
    states, words = [65536] * 8, []
    for i in reversed(range(len(levels))):
        s, x = levels[i], states[i % 8]
        if x >= shares[s] << 20:
            words.append(x % 65536)
            x //= 65536
        states[i % 8] = x // shares[s] * 4096 + x % shares[s] + sum(shares[:s])
    return struct.pack(f"<8I{len(words)}H", *states, *reversed(words))


def huffman(levels, lengths):
    codes = {s: (length, code) for (length, code), s in reference_levels.canonical(lengths).items()}
    bits = []
    for s in levels:
        length, code = codes[s]
        bits += twins.low_bits(code, length)[::-1]
    return twins.to_bytes(bits)


def huffman_cost(counts):
    """Bits of the best prefix code, whatever its lengths."""
    heap, cost = [count for count in counts if count], 0
    heapq.heapify(heap)
    while len(heap) > 1:
        both = heapq.heappop(heap) + heapq.heappop(heap)
        cost += both
        heapq.heappush(heap, both)
    return cost
