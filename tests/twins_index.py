"""Slow twins of the index codecs, written from docs/container-format.md."""

import twins


def gaps(indices):
    """The zeros before each index."""
    return [int(x) - int(before) - 1 for before, x in zip([-1, *indices[:-1]], indices, strict=True)]


def elias_fano(indices, d):
    k = len(indices)
    e = 0
    while k << (e + 1) <= d:
        e += 1
    highs = [0] * ((int(indices[-1]) >> e) + k)
    for i, x in enumerate(indices):
        highs[(int(x) >> e) + i] = 1
    return twins.pack([int(x) & (1 << e) - 1 for x in indices], e) + twins.to_bytes(highs)


def varint(indices):
    out = []
    for gap in gaps(indices):
        while gap >= 128:
            out.append(gap & 127 | 128)
            gap >>= 7
        out.append(gap)
    return bytes(out)


def runs(indices):
    """(runs of zeros, runs of ones) as numbers."""
    zeros, ones = [], []
    for gap in gaps(indices):
        if gap or not zeros:
            zeros.append(gap - 1 if zeros else gap)
            ones.append(0)
        else:
            ones[-1] += 1
    return zeros, ones


def prefix_and_suffix(v, code):
    """Bits of a number in a code of "Runs"."""
    e = code & 127
    if code < 128:
        return [0] * (v >> e) + [1], twins.low_bits(v, e)
    n = ((v >> e) + 1).bit_length() - 1
    return [0] * n + [1], twins.low_bits(v - ((1 << n) - 1 << e), n + e)


def numbers(values, code):
    """(bits of the prefixes, bits of the suffixes)."""
    parts = [prefix_and_suffix(v, code) for v in values]
    return [b for prefix, _ in parts for b in prefix], [b for _, suffix in parts for b in suffix]


def rle(indices, codes):
    zeros, ones = runs(indices)
    (zero_prefixes, zero_suffixes), (one_prefixes, one_suffixes) = numbers(zeros, codes[0]), numbers(ones, codes[1])
    prefixes = twins.to_bytes(zero_prefixes + one_prefixes)
    head = bytes(codes) + len(zeros).to_bytes(4, "little") + len(prefixes).to_bytes(4, "little")
    return head + prefixes + twins.to_bytes(zero_suffixes + one_suffixes)
