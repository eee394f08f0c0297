"""Slow reference implementations of the index codecs, written from docs/container-format.md."""

from support import reference_kernels


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
    return reference_kernels.pack([int(x) & (1 << e) - 1 for x in indices], e) + reference_kernels.to_bytes(highs)


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
        return [0] * (v >> e) + [1], reference_kernels.low_bits(v, e)
    n = ((v >> e) + 1).bit_length() - 1
    return [0] * n + [1], reference_kernels.low_bits(v - ((1 << n) - 1 << e), n + e)


def numbers(values, code):
    """(bits of the prefixes, bits of the suffixes)."""
    parts = [prefix_and_suffix(v, code) for v in values]
    return [b for prefix, _ in parts for b in prefix], [b for _, suffix in parts for b in suffix]


def rle(indices, codes):
    zeros, ones = runs(indices)
    (zero_prefixes, zero_suffixes), (one_prefixes, one_suffixes) = numbers(zeros, codes[0]), numbers(ones, codes[1])
    prefixes = reference_kernels.to_bytes(zero_prefixes + one_prefixes)
    head = bytes(codes) + len(zeros).to_bytes(4, "little") + len(prefixes).to_bytes(4, "little")
    return head + prefixes + reference_kernels.to_bytes(zero_suffixes + one_suffixes)


def rice_adaptive(indices, block, shifts):
    """The section with these parameters, one a block."""
    lows, unary = [], []
    for i, gap in enumerate(gaps(indices)):
        e = shifts[i // block]
        lows += reference_kernels.low_bits(gap, e)
        unary += [0] * (gap >> e) + [1]
    head = bytes([block.bit_length() - 1]) + reference_kernels.pack(shifts, 5)
    return head + reference_kernels.to_bytes(lows) + reference_kernels.to_bytes(unary)


def split_rows(indices, width):
    """(touched rows, positions among their elements)."""
    rows = sorted({int(x) // width for x in indices})
    return rows, [rows.index(int(x) // width) * width + int(x) % width for x in indices]


# Huffman


def class_of(gap):
    """(class, extra bits)."""
    extra = max(0, gap.bit_length() - 3)
    return 4 * extra + (gap >> extra), extra


def context_after(gap):
    return min(gap.bit_length(), 6) if gap.bit_length() < 8 else 7


def class_counts(indices):
    """[context][class]."""
    counts, before = [[0] * 128 for _ in range(8)], 0
    for gap in gaps(indices):
        counts[context_after(before)][class_of(gap)[0]] += 1
        before = gap
    return counts


def package_merge(counts, limit):
    """Lengths of an optimal code of at most `limit` bits, from sets of symbols with their weight."""
    coins = sorted((count, symbol, [symbol]) for symbol, count in enumerate(counts) if count)
    lengths = [0] * len(counts)
    if len(coins) == 1:
        lengths[coins[0][1]] = 1
        return lengths
    row = []
    for _ in range(limit):
        pairs = [(a[0] + b[0], 999, a[2] + b[2]) for a, b in zip(row[::2], row[1::2], strict=False)]
        row = sorted(coins + pairs, key=lambda coin: coin[:2])
    for _, _, symbols in row[: 2 * len(coins) - 2]:
        for symbol in symbols:
            lengths[symbol] += 1
    return lengths


def canonical(lengths):
    """{symbol: bits of its code, in the order of the stream}."""
    code, previous, found = 0, 0, {}
    for length, symbol in sorted((length, symbol) for symbol, length in enumerate(lengths) if length):
        code <<= length - previous
        found[symbol] = [code >> i & 1 for i in reversed(range(length))]
        code, previous = code + 1, length
    return found


def huffman_with(indices, rows):
    """The section with 1 or 8 tables."""
    counts = class_counts(indices)
    if rows == 1:
        counts = [[sum(column) for column in zip(*counts, strict=True)]]
    classes = max(symbol for row in counts for symbol, count in enumerate(row) if count) + 1
    tables, bits, before = [package_merge(row, 10) for row in counts], [], 0
    for table in tables:
        for length, previous in zip(table[:classes], [0, *table], strict=False):
            step = length - previous
            bits += [1] * (2 * step if step >= 0 else -2 * step - 1) + [0]
    codes = [canonical(table) for table in tables]
    for gap in gaps(indices):
        symbol, extra = class_of(gap)
        bits += codes[context_after(before) if rows > 1 else 0][symbol] + reference_kernels.low_bits(gap, extra)
        before = gap
    return bytes([rows, classes]) + reference_kernels.to_bytes(bits)


def huffman(indices):
    return min(huffman_with(indices, 1), huffman_with(indices, 8), key=len)


def classes_by_history(compact, width, domain, history):
    """For each class [(elements, [positions])]: a column's class is a number, bit j for the touched row j + 1 above."""
    found, held = [[0, []] for _ in range(1 << history)], set(compact)
    for x in range(domain):
        h = sum(((x - (j + 1) * width) in held) << j for j in range(history))
        if x in held:
            found[h][1].append(found[h][0])
        found[h][0] += 1
    return found


def repetitions(indices, width, windows, size):
    """How many standard deviations more columns of a touched row are held by the one above than are held 5 columns aside.

    0 if no more are after two windows.
    """
    rows, hits, others = [(None, set())], 0, 0
    for window in range(windows):
        if window == 2 and hits <= others:
            return 0
        first = (2 * window + 1) * (len(indices) - size) // (2 * windows)
        for x in indices[first : first + size]:
            row, column = divmod(x, width)
            if row != rows[-1][0]:
                rows.append((row, set()))
            if column + 5 < width:
                above = rows[-2][1]
                hits += column in above and column + 5 not in above
                others += column not in above and column + 5 in above
            rows[-1][1].add(column)
    return (hits - others) / (hits + others + 1) ** 0.5


def likely_width(indices, widths, windows, size, more):
    """The width with the most repetitions: 5 at least, of more positions if need be where 2.5 of some are found."""
    found = {width: repetitions(indices, width, windows, size) for width in widths}
    if more > size and max(found.values()) <= 5:
        found = {width: repetitions(indices, width, windows, more) for width, times in found.items() if times > 2.5}
    best = 0
    for width, times in found.items():
        if times > max(5, found[best] * (1.5 if width % best == 0 else 1) if best else 0):
            best = width
    return best
