"""Levels, decoded slowly from docs/container-format.md, "Levels". For value codecs with an entropy option."""

import struct

from support import reference_kernels

SCALE = 4096


def levels(payload, alphabet, k):
    """k levels below `alphabet`."""
    mode, body = payload[0], payload[1:]
    if mode == 0:
        return reference_kernels.unpack(body, max(1, (alphabet - 1).bit_length()), k)
    if mode == 3:
        assert len(body) == 1
        return [body[0]] * k
    if mode == 4:
        return blocks(body, alphabet, k)
    if mode == 5:
        return mirrored(body, alphabet, k)
    return {1: huffman, 2: ans}[mode](body, alphabet, k)


def mirrored(body, alphabet, k):
    assert body[0] <= 4
    middle = (alphabet - 1) // 2
    found = [middle]
    for stored in levels(body, alphabet, k):
        found.append(2 * middle - stored if found[-1] < middle and stored <= 2 * middle else stored)
    return found[1:]


def blocks(body, alphabet, k):
    count = body[0]
    assert 2 <= count <= 8
    lengths, at = struct.unpack_from(f"<{count}I", body, 1), 1 + 4 * count
    payloads = []
    for length in lengths:
        payloads.append(body[at : at + length])
        at += length
    payloads.append(body[at:])
    assert all(payload[0] <= 3 for payload in payloads)
    classes = levels(payloads[0], count, -(-k // 64))
    sizes = [min(64, k - 64 * b) for b in range(len(classes))]
    streams = []
    for c in range(count):
        size = sum(n for n, owner in zip(sizes, classes, strict=True) if owner == c)
        assert size > 0
        streams.append(iter(levels(payloads[1 + c], alphabet, size)))
    return [next(streams[c]) for c, size in zip(classes, sizes, strict=True) for _ in range(size)]


def table(body, alphabet, mantissa_bits):
    """(classes, mantissas, bytes used)."""
    bits = iter(enumerate(reference_kernels.to_bits(body)))
    classes, mantissas, previous, at = [], [], 0, -1
    for _ in range(alphabet):
        ones = 0
        while (step := next(bits))[1]:
            ones += 1
        at = step[0]
        previous += -(ones + 1) // 2 if ones % 2 else ones // 2
        classes.append(previous)
        mantissa = 0
        for j in range(min(previous - 1, mantissa_bits)):
            at, bit = next(bits)
            mantissa |= bit << j
        mantissas.append(mantissa)
    return classes, mantissas, at // 8 + 1


def frequencies(classes, mantissas):
    weights = [2 ** (c - 1) + m * 2 ** max(0, c - 4) if c else 0 for c, m in zip(classes, mantissas, strict=True)]
    present = sum(w > 0 for w in weights)
    total = sum(weights) - present
    found, below = [], 0
    for w in weights:
        share = (below + max(w - 1, 0)) * (SCALE - present) // total - below * (SCALE - present) // total
        below += max(w - 1, 0)
        found.append(1 + share if w else 0)
    assert sum(found) == SCALE
    return found


def ans(body, alphabet, k):
    classes, mantissas, used = table(body, alphabet, 3)
    shares = frequencies(classes, mantissas)
    starts = [sum(shares[:s]) for s in range(alphabet)]
    owner = [s for s in range(alphabet) for _ in range(shares[s])]
    states = list(struct.unpack_from("<8I", body, used))
    words = iter(struct.unpack(f"<{(len(body) - used - 32) // 2}H", body[used + 32 :]))
    found = []
    for i in range(k):
        x = states[i % 8]
        s = owner[x % SCALE]
        x = shares[s] * (x // SCALE) + x % SCALE - starts[s]
        states[i % 8] = x if x >= 65536 else x * 65536 + next(words)
        found.append(s)
    assert next(words, None) is None and states == [65536] * 8
    return found


def canonical(lengths):
    """(length, code as an integer whose highest bit comes first) -> level."""
    code, previous, found = -1, 0, {}
    for length, s in sorted((length, s) for s, length in enumerate(lengths) if length):
        code = (code + 1) << (length - previous)
        previous = length
        found[length, code] = s
    return found


def huffman(body, alphabet, k):
    lengths, _, used = table(body, alphabet, 0)
    codes = canonical(lengths)
    sizes = struct.unpack_from("<3I", body, used)
    at, found = used + 12, []
    for t, size in enumerate((*sizes, len(body) - used - 12 - sum(sizes))):
        bits = iter(reference_kernels.to_bits(body[at : at + size]))
        at += size
        quarter = -(-k // 4)
        for _ in range(min(t * quarter, k), min((t + 1) * quarter, k)):
            length = code = 0
            while (length, code) not in codes:
                length, code = length + 1, 2 * code + next(bits)
            found.append(codes[length, code])
        rest = list(bits)
        assert len(rest) < 8 and not any(rest)
    return found
