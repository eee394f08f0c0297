"""A second, slow decoder of the lossless index codecs, written from docs/container-format.md alone."""

import itertools
import struct

import twins


def ascending(gaps):
    return [total + i for i, total in enumerate(itertools.accumulate(gaps))]


def rle(section, d, k):
    zeros_code, ones_code, n, prefix_bytes = struct.unpack_from("<BBII", section)
    prefixes = iter(twins.to_bits(section[10:10 + prefix_bytes]))
    suffixes = iter(twins.to_bits(section[10 + prefix_bytes:]))

    def number(code):
        prefix, e = 0, code & 127
        while not next(prefixes):
            prefix += 1
        width, start = (e, prefix << e) if code < 128 else (prefix + e, (1 << prefix) - 1 << e)
        return start + sum(next(suffixes) << i for i in range(width))

    zeros = [number(zeros_code) + (i > 0) for i in range(n)]
    ones = [number(ones_code) + 1 for _ in range(n)]
    found, at = [], 0
    for empty, full in zip(zeros, ones, strict=True):
        found += range(at + empty, at + empty + full)
        at += empty + full
    assert len(found) == k and not any(prefixes) and not any(suffixes)
    return found


def elias_fano(section, d, k):
    e = (d // k).bit_length() - 1
    split = (k * e + 7) // 8
    highs = [at - i for i, at in enumerate(at for at, bit in enumerate(twins.to_bits(section[split:])) if bit)]
    return [high << e | low for high, low in zip(highs, twins.unpack(section[:split], e, k), strict=True)]


def varint(section, d, k):
    gaps, gap, shift = [], 0, 0
    for byte in section:
        gap |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            gaps.append(gap)
            gap = shift = 0
    assert len(gaps) == k
    return ascending(gaps)


INDEX = {4: rle, 7: elias_fano, 8: varint}
