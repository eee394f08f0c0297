"""A second, slow decoder of the lossless index codecs, written from docs/container-format.md alone."""

import itertools
import struct

from support import reference_kernels


def ascending(gaps):
    return [total + i for i, total in enumerate(itertools.accumulate(gaps))]


def rle(section, d, k):
    zeros_code, ones_code, n, prefix_bytes = struct.unpack_from("<BBII", section)
    prefixes = iter(reference_kernels.to_bits(section[10 : 10 + prefix_bytes]))
    suffixes = iter(reference_kernels.to_bits(section[10 + prefix_bytes :]))

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
    highs = [at - i for i, at in enumerate(at for at, bit in enumerate(reference_kernels.to_bits(section[split:])) if bit)]
    return [high << e | low for high, low in zip(highs, reference_kernels.unpack(section[:split], e, k), strict=True)]


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


def canonical(lengths):
    """{bits of the code as a tuple: symbol}."""
    code, previous, found = 0, 0, {}
    for length, symbol in sorted((length, symbol) for symbol, length in enumerate(lengths) if length):
        code <<= length - previous
        found[tuple(code >> i & 1 for i in reversed(range(length)))] = symbol
        code, previous = code + 1, length
    return found


def next_symbol(bits, code):
    read = ()
    while read not in code:
        read += (next(bits),)
        assert len(read) <= 32
    return code[read]


def byte_counts(d):
    """How often each byte value occurs in the four bytes of 0 to d - 1."""
    counts = [0] * 256
    for place in range(4):
        unit = 256**place
        for value in range(256):
            full, rest = divmod(d, 256 * unit)
            counts[value] += full * unit + sorted((0, rest - value * unit, unit))[1]
    return counts


def package_merge(counts, limit):
    items = sorted((count, value) for value, count in enumerate(counts) if count)
    lengths = [0] * len(counts)
    if len(items) == 1:
        lengths[items[0][1]] = 1
        return lengths
    row = items = [(count, 0, [value]) for count, value in items]
    for _ in range(limit - 1):
        pairs = [(a[0] + b[0], 1, a[2] + b[2]) for a, b in zip(row[::2], row[1::2], strict=False)]
        row = sorted(items + pairs, key=lambda entry: entry[:2])
    for value in itertools.chain(*(values for _, _, values in row[: 2 * len(items) - 2])):
        lengths[value] += 1
    return lengths


def huffman_bytes(section, d, k):
    code, quarter, found, at = canonical(package_merge(byte_counts(d), 12)), -(-k // 4), [], 13
    ends = [*itertools.accumulate(struct.unpack_from("<3I", section, 1), initial=13)][1:] + [len(section)]
    for stream, end in enumerate(ends):
        bits = iter(reference_kernels.to_bits(section[at:end]))
        for _ in range(quarter * stream, min(k, quarter * (stream + 1))):
            found.append(sum(next_symbol(bits, code) << 8 * place for place in range(4)))
        assert not any(bits)
        at = end
    return found


def huffman(section, d, k):
    if section[0] == 0:
        return huffman_bytes(section, d, k)
    bits, tables = iter(reference_kernels.to_bits(section[2:])), []
    for _ in range(section[0]):
        lengths, length = [], 0
        for _ in range(section[1]):
            ones = sum(1 for _ in itertools.takewhile(bool, bits))
            length += (0, -1, 1, -2, 2, -3, 3, -4, 4, -5, 5, -6, 6, -7, 7, -8, 8, -9, 9, -10, 10)[ones]
            lengths.append(length)
        tables.append(canonical(lengths))
    gaps, gap = [], 0
    for _ in range(k):
        context = [0, 1, 2, 3, 4, 5, 6, 6, *[7] * 24][gap.bit_length()] if len(tables) > 1 else 0
        symbol = next_symbol(bits, tables[context])
        extra = max(0, symbol // 4 - 1)
        gap = (symbol - 4 * extra << extra) + sum(next(bits) << i for i in range(extra))
        gaps.append(gap)
    assert not any(bits)
    return ascending(gaps)


def rice_adaptive(section, d, k):
    block = 1 << section[0]
    blocks = -(-k // block)
    split = 1 + (5 * blocks + 7) // 8
    shifts = [e for e in reference_kernels.unpack(section[1:split], 5, blocks) for _ in range(block)][:k]
    low_bytes = (sum(shifts) + 7) // 8
    lows, unary = (
        iter(reference_kernels.to_bits(part)) for part in (section[split : split + low_bytes], section[split + low_bytes :])
    )
    gaps = []
    for e in shifts:
        low = sum(next(lows) << i for i in range(e))
        gaps.append((sum(1 for _ in itertools.takewhile(lambda bit: not bit, unary)) << e) + low)
    assert not any(lows) and not any(unary)
    return ascending(gaps)


def rows(section, d, k):
    from support import reference_decoder  # which collects the decoders of this module

    row_codec, codec, width, r, split = struct.unpack_from("<BBIII", section)

    def part(id, section, domain, count):
        if id == 0:
            assert not section and count == domain
        return list(reference_decoder.INDEX[id](section, domain, count)) if id else list(range(domain))

    touched = part(row_codec, section[14 : 14 + split], -(-d // width), r)
    elements = [x for row in touched for x in range(row * width, min(d, (row + 1) * width))]
    found = [elements[i] for i in part(codec, section[14 + split :], len(elements), k)]
    assert len({x // width for x in found}) == r
    return found


def row_context(section, d, k):
    from support import reference_decoder

    if section[0] == 0:
        return list(struct.unpack(f"<{k}I", section[1:]))
    at = 0

    def number():
        nonlocal at
        found = shift = 0
        while section[at] > 127:
            found |= (section[at] & 127) << shift
            at, shift = at + 1, shift + 7
        at += 1
        return found | section[at - 1] << shift

    def part(id, size, domain, count):
        nonlocal at
        own, at = section[at : at + size], at + size
        if id == 0:
            assert not own and count in (0, domain)
            return list(range(count))
        return list(reference_decoder.INDEX[id](own, domain, count))

    history, width, r, row_codec, row_bytes = (number() for _ in range(5))
    head = [[number() for _ in range(4)] for _ in range(1 << history)]
    rows = part(row_codec, row_bytes, -(-d // width), r)
    classes = [set(part(codec, size, elements, count)) for codec, count, elements, size in head]
    seen, held = [0] * len(classes), set()
    touched = [(q, x) for q, row in enumerate(rows) for x in range(row * width, min(d, (row + 1) * width))]
    for q, x in touched:
        h = sum(((q - j - 1, x % width) in held) << j for j in range(history))
        if seen[h] in classes[h]:
            held.add((q, x % width))
        seen[h] += 1
    assert at == len(section) and seen == [elements for _, _, elements, _ in head]
    return [x for q, x in touched if (q, x % width) in held]


INDEX = {4: rle, 5: huffman, 6: rice_adaptive, 7: elias_fano, 8: varint, 11: rows, 12: row_context}
