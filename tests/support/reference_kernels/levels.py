"""Slow reference implementations of the encoders of levels: kernels/levels.py, ans.py and the files whose names begin with level_."""

import heapq
import math
import struct

from support import reference_kernels
from support.reference_decoder import levels as levels_decoder


def table(classes, mantissas, width):
    bits, previous = [], 0
    for c, m in zip(classes, mantissas, strict=True):
        step = c - previous
        bits += (
            [1] * (2 * step if step >= 0 else -2 * step - 1) + [0] + reference_kernels.low_bits(m, max(0, min(c - 1, width)))
        )
        previous = c
    return reference_kernels.to_bytes(bits)


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
    codes = {s: (length, code) for (length, code), s in levels_decoder.canonical(lengths).items()}
    bits = []
    for s in levels:
        length, code = codes[s]
        bits += reference_kernels.low_bits(code, length)[::-1]
    return reference_kernels.to_bytes(bits)


def huffman_cost(counts):
    """Bits of the best prefix code, whatever its lengths."""
    heap, cost = [count for count in counts if count], 0
    heapq.heapify(heap)
    while len(heap) > 1:
        both = heapq.heappop(heap) + heapq.heappop(heap)
        cost += both
        heapq.heappush(heap, both)
    return cost


def fine_class(block, alphabet):
    """0 for a width of 0, else four an octave."""
    width = sum(abs(level - (alphabet - 1) // 2) for level in block)
    octave = width.bit_length() - 1
    return 1 + 4 * octave + (4 * width >> octave) - 4 if width else 0


def parts(levels, numbers):
    """The levels of each class."""
    found = [[] for _ in range(max(numbers) + 1)]
    for b, c in enumerate(numbers):
        found[c] += levels[64 * b : 64 * b + 64]
    return found


def entropy(counts):
    """Bits of as many symbols in all."""
    return sum(n * math.log2(sum(counts) / n) for n in counts if n)


def stream_cost(levels, alphabet):
    """Bits that the choice of the classes reckons with: the levels, 4 for each that occurs, 1 for others, 320."""
    counts = [levels.count(s) for s in range(alphabet)]
    return entropy(counts) + sum(4 if n else 1 for n in counts) + 320


def mirrored(levels, middle):
    before = [middle, *levels[:-1]]
    return [
        2 * middle - level if b < middle and level <= 2 * middle else level for b, level in zip(before, levels, strict=True)
    ]


def saved_by_mirroring(levels, middle):
    """The entropy of the signs behind a sign, less that of whether they are the same."""
    signs = [(level > middle) - (level < middle) for level in levels]
    pairs = [(a, b) for a, b in zip(signs, signs[1:], strict=False) if a and b]
    same = sum(a == b for a, b in pairs)
    negative = sum(b < 0 for _, b in pairs)
    return entropy([negative, len(pairs) - negative]) - entropy([same, len(pairs) - same])
