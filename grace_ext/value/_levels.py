"""Levels of quantizers, packed at a fixed width or with an entropy code. Lossless; docs/container-format.md, "Levels".

Magnitudes of gradients change from place to place, so blocks of 64 levels are sorted into classes by their width, each with
a table of its own, where that is shorter.
"""

import numpy as np

from .._util.scratch import scratch
from ..errors import ConfigError, ContainerError
from ..kernels._helpers import MANTISSA
from ..kernels.ans import CLASSES, LANES, STATES, ans_classes, ans_decode, ans_encode, ans_frequencies
from ..kernels.level_blocks import BLOCK, MOST_CLASSES, choose_classes, class_sizes, merge_blocks, split_blocks
from ..kernels.level_huffman import MAX_LENGTH, STREAMS, huffman_decode, huffman_encode, huffman_lengths
from ..kernels.levels import TABLE_ROOM, count_levels, pack_levels_fixed, read_table, unpack_levels_fixed, write_table

ENTROPY = ("none", "huffman", "ans")
_FIXED, _HUFFMAN, _ANS, _CONSTANT, _BLOCKS = range(5)
_WORTH_CLASSES = 1 << 12  # number of levels from which on classes can save more than their tables cost


def check_entropy(name: str, entropy: str) -> str:
    """Return `entropy` if it is one of ENTROPY; otherwise raise ConfigError in the name of the codec."""
    if entropy not in ENTROPY:
        raise ConfigError(f"{name}: entropy={entropy}; allowed: {', '.join(ENTROPY)}")
    return entropy


def pack_levels(levels: np.ndarray, alphabet: int, entropy: str) -> np.ndarray:
    """Encode levels, uint8[k], k >= 1, each below `alphabet` (1 to 256), as uint8[m]. entropy is one of ENTROPY.

    With an entropy code, the payload is never longer than with the fixed width: at most ceil(k * width / 8) + 1 bytes.
    """
    payload = _pack_stream(levels, alphabet, entropy)
    if entropy != "none" and levels.size >= _WORTH_CLASSES and payload[0] != _CONSTANT:
        blocks = _pack_blocks(levels, alphabet, entropy)
        if blocks is not None and blocks.size < payload.size:
            return blocks
    return payload


def _pack_stream(levels: np.ndarray, alphabet: int, entropy: str) -> np.ndarray:
    width = max(1, (alphabet - 1).bit_length())
    fixed = -(-levels.size * width // 8)
    if entropy != "none":
        counts = np.empty(alphabet, np.int64)
        if count_levels(levels, counts) == levels.size:
            return np.array([_CONSTANT, levels[0]], np.uint8)
        coded = (_huffman if entropy == "huffman" else _ans)(levels, counts)
        if sum(part.size for part in coded) < fixed:
            return np.concatenate([np.array([_HUFFMAN if entropy == "huffman" else _ANS], np.uint8), *coded])
    payload = np.empty(1 + fixed + 8, np.uint8)
    payload[0] = _FIXED
    pack_levels_fixed(levels, width, payload[1:])
    return payload[: 1 + fixed]


def _pack_blocks(levels: np.ndarray, alphabet: int, entropy: str) -> np.ndarray | None:
    """Return a payload with a stream for each class of blocks, or None if that would save nothing."""
    numbers, sizes = np.empty(-(-levels.size // BLOCK), np.uint8), np.empty(MOST_CLASSES, np.int64)
    if choose_classes(levels, alphabet, numbers, sizes) <= 0:
        return None
    sizes = sizes[sizes > 0]
    parts = scratch("level_parts", np.uint8, levels.size)
    split_blocks(levels, numbers, sizes, parts)
    streams = [_pack_stream(numbers, sizes.size, entropy)]
    for end, size in zip(np.cumsum(sizes), sizes, strict=True):
        streams.append(_pack_stream(parts[end - size : end], alphabet, entropy))
    lengths = np.array([stream.size for stream in streams[:-1]], "<u4").view(np.uint8)
    return np.concatenate([np.array([_BLOCKS, sizes.size], np.uint8), lengths, *streams])


def _ans(levels: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
    classes, mantissas = np.empty((2, counts.size), np.uint8)
    ans_classes(counts, levels.size, classes, mantissas)
    table = np.empty(TABLE_ROOM, np.uint8)
    end = write_table(classes, mantissas, MANTISSA, table)
    ans_frequencies(classes, mantissas, counts)
    words = scratch("level_words", np.uint16, levels.size + 2 * LANES + 1)
    start = ans_encode(levels, counts, words)
    return [table[:end], words[start:].astype("<u2", copy=False).view(np.uint8)]


def _huffman(levels: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
    lengths = np.empty(counts.size, np.uint8)
    huffman_lengths(counts, lengths)
    table = np.empty(TABLE_ROOM, np.uint8)
    table = table[: write_table(lengths, lengths, 0, table)]
    quarter = -(-levels.size // STREAMS)
    out = scratch("level_bits", np.uint8, levels.size * MAX_LENGTH // 8 + 16 * STREAMS)
    sizes, end = np.empty(STREAMS, np.int64), 0
    for t in range(STREAMS):
        sizes[t] = huffman_encode(levels[t * quarter : (t + 1) * quarter], lengths, out[end:])
        end += int(sizes[t])
    return [table, sizes[:-1].astype("<u4").view(np.uint8), out[:end]]


def unpack_levels(payload: np.ndarray, alphabet: int, out: np.ndarray) -> None:
    """Decode uint8[m] from pack_levels to out, uint8[k], k >= 1, each below `alphabet` (1 to 256).

    The payload itself tells how it is coded. Raises ContainerError.
    """
    if payload.size and payload[0] == _BLOCKS:
        _unpack_blocks(payload[1:], alphabet, out)
    else:
        _unpack_stream(payload, alphabet, out)


def _unpack_stream(payload: np.ndarray, alphabet: int, out: np.ndarray) -> None:
    mode = int(payload[0]) if payload.size else -1
    body, k = payload[1:], out.size
    if mode == _FIXED:
        width = max(1, (alphabet - 1).bit_length())
        if body.size != -(-k * width // 8):
            raise ContainerError(f"levels: {body.size} bytes for {k} levels of {width} bits")
        if unpack_levels_fixed(body, width, out) >= alphabet or int(body[-1]) >> 8 - -k * width % 8:
            raise ContainerError("levels: a level is out of range")
    elif mode == _CONSTANT:
        if body.size != 1 or body[0] >= alphabet:
            raise ContainerError("levels: the constant is missing or out of range")
        out[:] = body[0]
    elif mode == _HUFFMAN:
        _unhuffman(body, alphabet, out)
    elif mode == _ANS:
        _unans(body, alphabet, out)
    else:
        raise ContainerError("levels: the mode is not known")


def _unpack_blocks(body: np.ndarray, alphabet: int, out: np.ndarray) -> None:
    classes = int(body[0]) if body.size else 0
    first = 1 + 4 * classes
    if not 2 <= classes <= MOST_CLASSES or body.size < first:
        raise ContainerError("levels: the number of classes is out of range or their lengths are missing")
    ends = first + np.cumsum(np.frombuffer(body[1:first], "<u4").astype(np.int64))
    if ends[-1] > body.size:
        raise ContainerError(f"levels: {body.size} bytes do not hold the streams")
    streams = np.split(body, [first, *ends])[1:]
    numbers, sizes = np.empty(-(-out.size // BLOCK), np.uint8), np.empty(classes, np.int64)
    _unpack_stream(streams[0], classes, numbers)
    if not class_sizes(numbers, out.size, sizes):
        raise ContainerError("levels: a class has no blocks")
    parts = scratch("level_parts", np.uint8, out.size)
    for stream, end, size in zip(streams[1:], np.cumsum(sizes), sizes, strict=True):
        _unpack_stream(stream, alphabet, parts[end - size : end])
    merge_blocks(parts, numbers, sizes, out)


def _unans(body: np.ndarray, alphabet: int, out: np.ndarray) -> None:
    classes, mantissas = np.empty((2, alphabet), np.uint8)
    frequencies = np.empty(alphabet, np.int64)
    start = read_table(body, MANTISSA, CLASSES, classes, mantissas)
    if start < 0 or body.size < start + STATES or not ans_frequencies(classes, mantissas, frequencies):
        raise ContainerError("levels: the table of frequencies is damaged")
    if not ans_decode(body[start:], frequencies, out):
        raise ContainerError("levels: the stream of states does not end where it began")


def _unhuffman(body: np.ndarray, alphabet: int, out: np.ndarray) -> None:
    lengths, unused = np.empty((2, alphabet), np.uint8)
    start = read_table(body, 0, MAX_LENGTH, lengths, unused)
    if start < 0 or body.size < start + 4 * STREAMS - 4:
        raise ContainerError("levels: the table of code lengths is damaged")
    data = body[start + 4 * STREAMS - 4 :]
    sizes = np.frombuffer(body[start : start + 4 * STREAMS - 4], "<u4").astype(np.int64)
    ends = np.append(np.cumsum(sizes), data.size)
    if ends[-2] > data.size or not huffman_decode(data, ends, lengths, out):
        raise ContainerError("levels: the codes do not fit the streams")
