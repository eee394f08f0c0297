"""Levels of quantizers, packed at a fixed width or with an entropy code. Lossless; docs/container-format.md, "Levels".

Magnitudes of gradients change from place to place, so blocks of 64 levels are sorted into classes by their width, each with
a table of its own, where that is shorter. Signs repeat from one value to the next in convolutional layers and where
activations have one sign, so each level may be told by the sign of the one before.
"""

import numpy as np

from .._util.scratch import scratch
from ..errors import ConfigError, ContainerError
from ..kernels.ans import LANES, ans_pack, ans_unpack
from ..kernels.level_blocks import BLOCK, MOST_CLASSES, choose_classes, class_sizes, merge_blocks, split_blocks
from ..kernels.level_huffman import MAX_LENGTH, STREAMS, huffman_pack, huffman_unpack
from ..kernels.level_signs import mirror_levels, signs_saved, unmirror_levels
from ..kernels.levels import pack_levels_fixed, unpack_levels_fixed

ENTROPY = ("none", "huffman", "ans")
_FIXED, _HUFFMAN, _ANS, _CONSTANT, _BLOCKS, _MIRRORED = range(6)
_WORTH_CLASSES = 1 << 12  # number of levels from which on classes can save more than their tables cost
_WORTH_MIRRORING = 64, 1 / 256  # bits that it must save: in all and a level, so that its pass is made for more than chance


def check_entropy(name: str, entropy: str) -> str:
    """Return `entropy` if it is one of ENTROPY; otherwise raise ConfigError in the name of the codec."""
    if entropy not in ENTROPY:
        raise ConfigError(f"{name}: entropy={entropy}; allowed: {', '.join(ENTROPY)}")
    return entropy


def pack_levels(levels: np.ndarray, alphabet: int, entropy: str, room: int = 0) -> np.ndarray:
    """Encode levels, uint8[k], k >= 1, each below `alphabet` (1 to 256), as uint8[m]. entropy is one of ENTROPY.

    With an entropy code, the payload is never longer than with the fixed width: at most ceil(k * width / 8) + 1 bytes. Ahead
    of it there are `room` bytes more, which the caller is to fill.
    """
    if entropy != "none" and levels.size > _WORTH_MIRRORING[0]:
        middle = _middle(alphabet)
        if signs_saved(levels, middle) > max(_WORTH_MIRRORING[0], _WORTH_MIRRORING[1] * levels.size):
            mirrored = scratch("mirrored_levels", np.uint8, levels.size)
            mirror_levels(levels, middle, mirrored)
            payload = _pack(mirrored, alphabet, entropy, room + 1)
            if payload[room + 1] != _FIXED:
                payload[room] = _MIRRORED
                return payload
    return _pack(levels, alphabet, entropy, room)


def _middle(alphabet: int) -> int:
    return (alphabet - 1) >> 1


def _pack(levels: np.ndarray, alphabet: int, entropy: str, room: int) -> np.ndarray:
    payload = _pack_stream(levels, alphabet, entropy, room)
    if entropy != "none" and levels.size >= _WORTH_CLASSES and payload[room] != _CONSTANT:
        blocks = _pack_blocks(levels, alphabet, entropy, room)
        if blocks is not None and blocks.size < payload.size:
            return blocks
    return payload


def _pack_stream(levels: np.ndarray, alphabet: int, entropy: str, room: int = 0) -> np.ndarray:
    width = max(1, (alphabet - 1).bit_length())
    fixed = -(-levels.size * width // 8)
    payload = np.empty(room + 1 + fixed + 8, np.uint8)
    body = payload[room + 1 :]
    used = -1 if entropy == "none" else _pack_coded(levels, alphabet, entropy, fixed, body)
    if used > 0:
        payload[room] = _HUFFMAN if entropy == "huffman" else _ANS
    elif used == 0:
        payload[room], body[0], used = _CONSTANT, levels[0], 1
    else:
        payload[room], used = _FIXED, fixed
        pack_levels_fixed(levels, width, body)
    return payload[: room + 1 + used]


def _pack_coded(levels: np.ndarray, alphabet: int, entropy: str, limit: int, out: np.ndarray) -> int:
    """Write table and codes to out, uint8[limit]; returns the bytes used, 0 if all levels are the same, -1 at `limit` bytes."""
    if entropy == "huffman":
        bits = scratch("level_bits", np.uint8, levels.size * MAX_LENGTH // 8 + 16 * STREAMS)
        return huffman_pack(levels, alphabet, limit, bits, out)
    return ans_pack(levels, alphabet, limit, scratch("level_words", np.uint16, levels.size + 2 * LANES + 1), out)


def _pack_blocks(levels: np.ndarray, alphabet: int, entropy: str, room: int) -> np.ndarray | None:
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
    head = np.zeros(room + 2, np.uint8)
    head[room:] = _BLOCKS, sizes.size
    return np.concatenate([head, lengths, *streams])


def unpack_levels(payload: np.ndarray, alphabet: int, out: np.ndarray) -> None:
    """Decode uint8[m] from pack_levels to out, uint8[k], k >= 1, each below `alphabet` (1 to 256).

    The payload itself tells how it is coded. Raises ContainerError.
    """
    mirrored = payload.size > 0 and payload[0] == _MIRRORED
    if mirrored:
        payload = payload[1:]
    if payload.size and payload[0] == _BLOCKS:
        _unpack_blocks(payload[1:], alphabet, out)
    else:
        _unpack_stream(payload, alphabet, out)
    if mirrored:
        unmirror_levels(out, _middle(alphabet))


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
    elif mode in (_HUFFMAN, _ANS):
        damage = (huffman_unpack if mode == _HUFFMAN else ans_unpack)(body, alphabet, out)
        if damage:
            raise ContainerError(_DAMAGE[mode, damage])
    else:
        raise ContainerError("levels: the mode is not known")


_DAMAGE = {
    (_HUFFMAN, -1): "levels: the table of code lengths is damaged",
    (_HUFFMAN, -2): "levels: the codes do not fit the streams",
    (_ANS, -1): "levels: the table of frequencies is damaged",
    (_ANS, -2): "levels: the stream of states does not end where it began",
}


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
