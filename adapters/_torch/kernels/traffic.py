"""A model of what kernels read and write in the accelerator's memory, for the spec topk/rice/qsgd with error feedback.

Bytes of each kernel's loads, stores and atomic operations (these count twice), as if there were no caches. One pass is to read
or write a gradient, 4 d bytes.
"""

from . import radix, rice, topk
from ._launch import blocks


def encode(
    d: int,
    n: int,
    candidates: int,
    sample: int,
    bits: int = 32,
    width: int = 7,
    bucket: int = 512,
    programs: int | None = None,
) -> dict[str, float]:
    """Bytes that encoding d elements moves, by kernel.

    n: selected elements; candidates: elements that the pass over the gradient collects; sample: sampled elements; bits: those of an
    element of the residual, 32 or 16; width and bucket: those of qsgd.
    programs: those of the pass over a gradient that lies in several tensors, of which a table has three numbers for each; None for one
    tensor.
    """
    state, entry = bits // 8, 0 if programs is None else 3 * 8
    programs = blocks(d, topk.BLOCK) if programs is None else programs
    counted = 2 * sample + 3 * candidates  # in two rounds of the one, and three of the other
    return {
        "sample_bits": (8 + state + entry) * sample,
        # A word of the bound, the two of the segment, and the atomic addition of its length, for each block.
        "add_and_collect": (4 + 2 * state) * d + 8 * candidates + (20 + entry) * programs,
        # All are counted in the first round, in the second at most those, and in the third only those of nearly equal magnitudes.
        "radix_histogram": 4 * counted + 8 * 2 * (sample + candidates),
        "radix_find": 5 * 8 * radix.SIZE,
        "count_kept": 4 * candidates + 20 * programs,
        "cumsum of blocks": 16 * programs,
        "compact": 4 * candidates + 12 * n + 36 * programs,
        "rice_quotients": 8 * n + 4 * blocks(n, rice.BLOCK),
        "cumsum of quotients": 8 * blocks(n, rice.BLOCK),
        # Both neighbours; a code is in one or two words of one stream, and in one of the other.
        "rice_write": 8 * n + 20 * n + 8 * blocks(n, rice.BLOCK),
        "qsgd_encode": (8 + state) * n + n * width / 8 + 4 * blocks(n, bucket),
    }


def decode(d: int, n: int, ranks: int, unary: int, width: int = 7, bucket: int = 512) -> dict[str, float]:
    """Bytes that summing the containers of all ranks moves, by kernel; unary: bytes of the upper bits of a rank's gaps."""
    return {
        "zeros": 4 * d,
        "rice_count_ones": 2 * unary * ranks,
        "cumsum of ones": 2 * unary * ranks,
        "rice_read": ranks * (2 * unary + 16 * n),  # two words of the lower bits for each code
        "cumsum of gaps": ranks * 12 * n,
        "rice_positions": ranks * 16 * n,
        "qsgd_decode": ranks * (4 * n + n * width / 8 + 4 * blocks(n, bucket)),
        "add_at": ranks * 16 * n,
    }


def passes(traffic: dict[str, float], d: int) -> float:
    """Passes over a gradient of d elements."""
    return sum(traffic.values()) / (4 * d)
