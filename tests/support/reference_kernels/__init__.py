"""Slow, readable reference implementations of the kernels: plain Python and numpy, one step after the other.

They are written from the docstrings and from docs/container-format.md, and share no code with the kernels.
"""

import math

import numpy as np

MAGNITUDE = 0x7FFFFFFF
WORD = 0xFFFFFFFF


def magnitudes(values):
    """The bits of float32 values without the sign, as int64[d]: their order is the order of the magnitudes."""
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) & MAGNITUDE).astype(np.int64)


# Selection


def topk(values, k):
    """The k largest magnitudes, ties to the lowest index, never an exact zero: int64[n], ascending."""
    magnitude = magnitudes(values)
    chosen = np.argsort(-magnitude, kind="stable")[:k]
    return np.sort(chosen[magnitude[chosen] > 0])


def sampled(d, room):
    """The positions that select_topk looks at first when its sample array has `room` elements."""
    whole = d // 16
    lines = min(room // 16, whole)
    state, positions = 0x9E3779B97F4A7C15, []
    for s in range(lines):
        first, last = s * whole // lines, (s + 1) * whole // lines
        state ^= state << 13 & (1 << 64) - 1
        state ^= state >> 7
        state ^= state << 17 & (1 << 64) - 1
        start = 16 * (first + (state >> 33) % (last - first))
        positions.extend(range(start, start + 16))
    return np.array(positions, np.int64)


def topk_bounds(values, k, sample_room):
    """The magnitudes between which select_topk expects the k-th largest after a look at its sample."""
    sample = np.sort(magnitudes(values)[sampled(len(values), sample_room)])[::-1]
    lower, upper = 1, MAGNITUDE
    if sample.size:
        rank = k / len(values) * sample.size
        margin = 4 * math.sqrt(2 * rank) + 8
        deep, high = int(rank + margin), int(rank - margin)
        if deep < sample.size:
            lower = max(1, int(sample[deep - 1]) & ~511)
        if high >= 1:
            upper = int(sample[high - 1]) | 511
    return lower, max(lower, upper)


def topk_branch(values, k, sample_room, candidates):
    """Which road select_topk takes. candidates: how many it has room for, the slack not counted."""
    lower, upper = topk_bounds(values, k, sample_room)
    count, certain = (int((magnitudes(values) >= bound).sum()) for bound in (lower, upper))
    if count > candidates:
        return "overflow"
    if count <= k and (count == k or lower == 1):
        return "all candidates"
    if count < k:
        return "too few"
    return "upper bound too low" if certain >= k else "band"


# Bits


def to_bytes(bits):
    """0s and 1s, least significant first -> bytes; the last byte is filled with 0."""
    return np.packbits(np.array(bits, np.uint8), bitorder="little").tobytes()


def to_bits(data):
    return np.unpackbits(np.frombuffer(bytes(data), np.uint8), bitorder="little").tolist()


def low_bits(number, width):
    return [number >> i & 1 for i in range(width)]


def pack(numbers, width):
    """Each number at `width` bits."""
    return to_bytes([bit for number in numbers for bit in low_bits(int(number), width)])


def unpack(data, width, count):
    bits = to_bits(data)
    return [sum(bits[i * width + j] << j for j in range(width)) for i in range(count)]


def bitmap(indices, d):
    chosen = np.zeros(d, np.uint8)
    chosen[np.asarray(indices, np.int64)] = 1
    return to_bytes(chosen)


# Rice


def rice(indices, e):
    """(remainders, quotients, bits of the quotients)."""
    remainders, quotients, previous = [], [], -1
    for index in indices:
        gap = int(index) - previous - 1
        remainders += low_bits(gap, e)
        quotients += [0] * (gap >> e) + [1]
        previous = int(index)
    return to_bytes(remainders), to_bytes(quotients), len(quotients)


def unrice(remainders, quotients, k, e):
    """The k indices of the two streams."""
    lows, unary = unpack(remainders, e, k), iter(to_bits(quotients))
    indices, previous = [], -1
    for low in lows:
        quotient = 0
        while next(unary) == 0:
            quotient += 1
        previous += (quotient << e) + low + 1
        indices.append(previous)
    return indices


# QSGD


def random32(i, low, high):
    """The counter-based random number of place i: murmur3's finalizer with a key before and one in the middle."""
    x = (i * 0x9E3779B1 & WORD) ^ low
    x = (x ^ x >> 16) * 0x85EBCA6B & WORD
    x = x + high & WORD
    x = (x ^ x >> 13) * 0xC2B2AE35 & WORD
    return x ^ x >> 16


def qsgd(values, s, bucket, low, high, two_norm=False):
    """(norms float32[ceil(k / bucket)], codes int[k]) of s levels; every operation in float32, in this order."""
    f = np.float32
    norms, codes = [], []
    for start in range(0, len(values), bucket):
        part = values[start : start + bucket]
        norm = f(min(norm2(part), 3.4028e38)) if two_norm else max(abs(x) for x in part)
        norm = min(norm, f(3.4028e38))
        norm = norm if norm >= f(2.0**-119) else f(0)
        scale = f(s) / norm if norm > 0 else f(0)
        norms.append(norm)
        for i, x in enumerate(part):
            uniform = (f(random32(start + i, low, high) >> 16) + f(0.5)) * f(2.0**-16)
            codes.append(int(min(max(f(x * scale) + f(f(s) + uniform), f(0)), f(2 * s))))
    return np.array(norms, np.float32), codes


def qsgd_wide(values, s, bucket, low, high, two_norm=False):
    """The same with 32 random bits and in float64."""
    f = np.float32
    norms, codes = [], []
    for start in range(0, len(values), bucket):
        part = values[start : start + bucket]
        norm = min(f(min(norm2(part), 3.4028e38)) if two_norm else max(abs(x) for x in part), f(3.4028e38))
        norm = norm if norm >= f(2.0**-110) else f(0)
        norms.append(norm)
        for i, x in enumerate(part):
            uniform = (random32(start + i, low, high) + 0.5) * 2.0**-32
            scaled = float(x) * (s / float(norm)) if norm > 0 else 0.0
            codes.append(int(min(max(scaled + (s + uniform), 0), 2 * s)))
    return np.array(norms, np.float32), codes


def norm2(values):
    """In float64: 16 sums in turn, then one after the other."""
    sums = [0.0] * 16
    for i, x in enumerate(values):
        sums[i % 16] += float(x) * float(x)
    total = 0.0
    for one in sums:
        total += one
    return math.sqrt(total)


def unqsgd(codes, s, bucket, norms):
    """level * (norm / s), both in float32."""
    f = np.float32
    with np.errstate(over="ignore"):
        return np.array([f(code - s) * (f(norms[i // bucket]) / f(s)) for i, code in enumerate(codes)], f)


# Sums


def sum_sparse(size, shares, weight):
    """weight * x added rank after rank, in float32. shares: [(positions, values)]."""
    out = np.zeros(size, np.float32)
    for positions, values in shares:
        for position, value in zip(positions, values, strict=True):
            out[position] = out[position] + np.float32(weight) * np.float32(value)
    return out


def mean_sparse(size, parts, shares):
    """The mean of each element over the ranks that have it, rank after rank, in float32. parts: [(positions, values)]."""
    out, total = np.zeros(size, np.float32), np.zeros(size, np.float32)
    for (positions, values), share in zip(parts, shares, strict=True):
        for position, value in zip(positions, values, strict=True):
            out[position] = out[position] + np.float32(share) * np.float32(value)
            total[position] = total[position] + np.float32(share)
    return np.array([value / weight if weight else 0 for value, weight in zip(out, total, strict=True)], np.float32)
