"""Numba kernels: arrays in, arrays out, without the GIL and without globals. All bit manipulation is here."""

from . import (  # noqa: F401  (so that warmup knows them)
    ans,
    bloom,
    byte_huffman,
    chunks,
    curves,
    dct,
    dexp,
    elias_fano,
    gap_huffman,
    half,
    level_blocks,
    level_huffman,
    level_signs,
    levels,
    lloyd,
    local_adamw,
    lowrank,
    minmax,
    natural,
    polyfit,
    rice_blocks,
    rows,
    runs,
    signs,
    sketch,
    sort,
    ternary,
    varint,
)
from ._compile import cache_folder, warmup
from ._helpers import NON_FINITE
from .accumulate import add_at, add_dense, mean_sparse, sum_sparse, sum_sparse_at, sum_sparse_squares, write_error
from .bits import bitmap_decode, bitmap_encode, pack_bits, unpack_bits
from .positions import draw_positions
from .qsgd import max_magnitude, qsgd_decode, qsgd_encode
from .rice import quotient_bits, rice_decode, rice_encode
from .topk import select_above, select_topk

__all__ = [
    "NON_FINITE",
    "add_at",
    "add_dense",
    "bitmap_decode",
    "bitmap_encode",
    "cache_folder",
    "draw_positions",
    "max_magnitude",
    "mean_sparse",
    "pack_bits",
    "qsgd_decode",
    "qsgd_encode",
    "quotient_bits",
    "rice_decode",
    "rice_encode",
    "select_above",
    "select_topk",
    "sum_sparse",
    "sum_sparse_at",
    "sum_sparse_squares",
    "unpack_bits",
    "warmup",
    "write_error",
]
