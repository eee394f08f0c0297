"""The Bloom filter's part of the second decoder (the package's `decode`), written from docs/container-format.md."""

from collections import Counter

WORD = 0xFFFFFFFF


def mix(x):
    x ^= x >> 16
    x = x * 0x85EBCA6B & WORD
    x ^= x >> 13
    x = x * 0xC2B2AE35 & WORD
    return x ^ x >> 16


def derived(seed, a):
    return mix(seed + a * 0x9E3779B9 & WORD)


def below(x, y):
    return x * y >> 32


def bits_of(i, d, hashes, seed, words):
    """The bits of the filter that position i has, one for each hash function."""
    stride = -(-d // 64)
    c = i // stride
    g = (i - c * stride + below(mix(c ^ derived(seed, 1)), stride)) % stride
    hashed = [mix(g ^ derived(seed, 2 + j)) for j in range(hashes)]
    return [64 * below(h, words) + (c + h) % 64 for h in hashed]


def filter_of(indices, d, hashes, seed, words):
    """The filter of these positions, as bytes."""
    content = sum(1 << bit for bit in {bit for i in indices for bit in bits_of(i, d, hashes, seed, words)})
    return content.to_bytes(8 * words, "little")


def positives_of(content, d, hashes, seed):
    """[(position, its bits)] of all that are in the filter."""
    found = ((i, bits_of(i, d, hashes, seed, len(content) // 8)) for i in range(d))
    return [(i, bits) for i, bits in found if all(content[bit >> 3] >> (bit & 7) & 1 for bit in bits)]


def scores_of(positives):
    sizes = Counter(bit for _, bits in positives for bit in bits)
    sure = [any(sizes[bit] == 1 for bit in bits) for _, bits in positives]
    explained = {bit for (_, bits), certain in zip(positives, sure, strict=True) if certain for bit in bits}
    return [
        8193 if certain else sum(1024 // min(255, sizes[bit]) for bit in bits if bit not in explained)
        for (_, bits), certain in zip(positives, sure, strict=True)
    ]


def choose(found, scores, k, seed):
    last = sorted(scores, reverse=True)[k - 1]
    rest, left = scores.count(last), k - sum(score > last for score in scores)
    tied, chosen = 0, []
    for i, score in zip(found, scores, strict=True):
        taken = score > last
        if score == last:
            taken = below(mix(tied ^ derived(seed, 0)), rest - tied) < left
            left, tied = left - taken, tied + 1
        if taken:
            chosen.append(i)
    return chosen


def bloom(section, d, k):
    policy, hashes, seed = section[0], section[1], int.from_bytes(section[2:6], "little")
    positives = positives_of(section[6:], d, hashes, seed)
    found = [i for i, _ in positives]
    if policy == 0:
        return found
    if policy in (1, 2):
        return choose(found, scores_of(positives) if policy == 2 else [0] * len(found), k, seed)
    first = {3: 0, 4: (len(found) - k) // 2, 5: len(found) - k, 6: 0}[policy]
    return found[first : first + k]


INDEX = {9: bloom}
