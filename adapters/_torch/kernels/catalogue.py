"""All kernels, with the types and constants that they are compiled for: what tests compile and docs/gpu.md lists."""

import dataclasses
from typing import Any

from . import (
    accumulate,
    block_topk,
    dct,
    half,
    lloyd,
    lowrank,
    minmax,
    natural,
    packed,
    qsgd,
    radix,
    ranges,
    rice,
    rows,
    signs,
    sketch,
    sketchml,
    tables,
    ternary,
    threelc,
    topk,
)


@dataclasses.dataclass(frozen=True)
class Variant:
    """A kernel with its constants.

    types: those of the arguments that are no constants, in order. hot: whether it goes over all of a gradient, so that a
    register that is spilled would be paid for with memory traffic. note: what tells it from another one with the same constants.
    """

    kernel: Any
    types: str
    constants: dict[str, Any]
    warps: int = 4
    hot: bool = False
    note: str = ""

    @property
    def name(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in self.constants.items())
        return f"{self.kernel.__name__}({options})" + (f" {self.note}" if self.note else "")


def _qsgd(**constants) -> Variant:
    types = "*fp32 *fp32 *i32 *fp32 *fp32 *u8 *i32 i32 i32 i32 i32"
    dense = not constants["SPARSE"]
    return Variant(qsgd.qsgd_encode, types, constants, max(1, min(8, constants["BUCKET"] // 256)), hot=dense)


_PER_BLOCK = "*i32 *i32 *i32 *i32 *i32 *i32 i32 i32"
_COMPACT = "*i32 *i32 *i32 *i32 *i32 *i32 *i32 *i32 *i32 i32 *i32 *i32 i32 i32"
_COLLECT = "*fp32 *fp32 *fp32 *i32 *i32 *i32 *i32 *i32 *i32 i32 i32 i32"
_ROUNDED = _COLLECT.replace("*fp32 *fp32 *fp32", "*fp32 *i16 *i16")
_ONEBIT = "*fp32 *fp32 *i32 *fp32 *fp32 *u8 *i32 i32"
_KEPT = {"KEEP": True, "SPARSE": False}
_DENSE = {"FUSED": True, "KEEP": True, "SPARSE": False}
_DEFAULT = {"WIDTH": 7, "BUCKET": 512, "TWO_NORM": False}

VARIANTS = [
    Variant(topk.sample_bits, "*fp32 *fp32 *i32 i32 i32 i32", {"FUSED": True, "PARTS": False, "BLOCK": 1024}),
    Variant(topk.add_and_collect, _COLLECT, {"FUSED": True, "PARTS": False, "BLOCK": topk.BLOCK}, topk.WARPS, hot=True),
    Variant(topk.add_and_collect, _COLLECT, {"FUSED": False, "PARTS": False, "BLOCK": topk.BLOCK}, topk.WARPS, hot=True),
    Variant(
        topk.add_and_collect,
        _ROUNDED,
        {"FUSED": True, "PARTS": False, "BLOCK": topk.BLOCK},
        topk.WARPS,
        hot=True,
        note="of bfloat16",
    ),
    Variant(topk.sample_bits, "*i64 *fp32 *i32 i32 i32 i32", {"FUSED": True, "PARTS": True, "BLOCK": 1024}),
    Variant(
        topk.add_and_collect,
        _COLLECT.replace("*fp32", "*i64", 1),
        {"FUSED": True, "PARTS": True, "BLOCK": topk.BLOCK},
        topk.WARPS,
        hot=True,
    ),
    Variant(
        topk.add_and_collect,
        _ROUNDED.replace("*fp32", "*i64", 1),
        {"FUSED": True, "PARTS": True, "BLOCK": topk.BLOCK},
        topk.WARPS,
        hot=True,
        note="of bfloat16",
    ),
    *(
        Variant(radix.radix_histogram, "*i32 *i32 *i32 i32", {"SHIFT": shift, "WIDTH": width, "BLOCK": radix.BLOCK})
        for shift, width in radix.ROUNDS
    ),
    *(Variant(radix.radix_find, "*i32 *i32 i32 i32", {"SHIFT": shift}) for shift, _ in radix.ROUNDS),
    Variant(topk.count_kept, _PER_BLOCK, {"WHOLE": False, "LANES": topk.LANES}, 1),
    Variant(topk.count_kept, _PER_BLOCK, {"WHOLE": True, "LANES": 8 * topk.LANES}, hot=True),
    Variant(topk.compact, _COMPACT, {"WHOLE": False, "LANES": topk.LANES}, 1),
    Variant(topk.compact, _COMPACT, {"WHOLE": True, "LANES": 8 * topk.LANES}, hot=True),
    Variant(
        block_topk.select_in_blocks,
        "*fp32 *fp32 *fp32 *i64 *i32 *i32 *i64 *i32 *i32 *i32 *i32",
        {"FUSED": True, "ZEROS": False, "BLOCK": block_topk.MOST_ELEMENTS},
        16,
        hot=True,
    ),
    Variant(block_topk.join_blocks, "*i32 *i32 *i64 *i32 *i32 *i32 *i32", {"BLOCK": 128}, 1),
    *(
        Variant(
            dct.transform_rows,
            "*fp32 *fp32 *i32 *i32 *fp32 *fp32 i32 i32",
            {"STEPS": 12, "SIZE": 64, "ROWS": dct.ELEMENTS // 64, "COLUMNS": columns, "CUT": not columns},
            hot=True,
        )
        for columns in (False, True)
    ),
    Variant(rice.rice_quotients, "*i32 *i32 i32 i32", {"BLOCK": rice.BLOCK}),
    Variant(rice.rice_write, "*i32 *i32 *i32 *i32 *i32 i32 i32", {"BLOCK": rice.BLOCK}),
    Variant(rice.rice_count_ones, "*i32 *i32 i32", {"BLOCK": rice.BLOCK}),
    Variant(rice.rice_read, "*i32 *i32 *i32 *i32 *i32 i32 i32 i32", {"BLOCK": rice.BLOCK}),
    Variant(rice.rice_positions, "*i32 *i64 *i32 i32 i32", {"BLOCK": rice.BLOCK}),
    _qsgd(**_DEFAULT, FUSED=False, KEEP=True, SPARSE=True),
    _qsgd(**_DEFAULT, FUSED=False, KEEP=False, SPARSE=True),
    _qsgd(**_DEFAULT, FUSED=True, KEEP=True, SPARSE=False),
    _qsgd(WIDTH=7, BUCKET=512, TWO_NORM=True, FUSED=True, KEEP=True, SPARSE=False),
    _qsgd(WIDTH=8, BUCKET=qsgd.MOST_BUCKET, TWO_NORM=False, FUSED=True, KEEP=True, SPARSE=False),
    Variant(qsgd.qsgd_decode, "*u8 *fp32 *fp32 *i32 i32 i32", {"WIDTH": 7, "BUCKET": 512}, 2, hot=True),
    Variant(signs.onebit_encode, _ONEBIT, {"BUCKET": 512, **_DENSE}, 2, hot=True),
    Variant(signs.onebit_decode, "*u8 *fp32 *fp32 i32", {"BUCKET": 512}, 2, hot=True),
    *(
        Variant(
            half.half_encode,
            "*fp32 *fp32 *i32 *fp32 *i16 *i32 i32",
            {"BRAIN": brain, **_DENSE, "BLOCK": half.BLOCK},
            hot=True,
        )
        for brain in (False, True)
    ),
    Variant(half.half_decode, "*i16 *fp32 i32", {"BRAIN": False, "BLOCK": half.BLOCK}, hot=True),
    Variant(
        ranges.value_range, "*fp32 *fp32 *i32 *i32 i32", {"FUSED": True, "SPARSE": False, "BLOCK": ranges.BLOCK}, hot=True
    ),
    Variant(
        ternary.ternary_encode, "*fp32 *i32 *fp32 *i32 *fp32 *u8 i32 i32 i32", {**_KEPT, "BLOCK": ternary.BLOCK}, hot=True
    ),
    Variant(ternary.ternary_decode, "*u8 *fp32 *fp32 *i32 i32", {"BLOCK": ternary.BLOCK}, hot=True),
    Variant(
        minmax.minmax_encode, "*fp32 *i32 *fp32 *i32 *fp32 *u8 i32", {"WIDTH": 8, **_KEPT, "BLOCK": minmax.BLOCK}, hot=True
    ),
    Variant(minmax.minmax_decode, "*u8 *fp32 *fp32 i32", {"WIDTH": 8, "BLOCK": minmax.BLOCK}, hot=True),
    Variant(
        minmax.encode_chunks,
        "*fp32 *fp32 *i32 *fp32 *fp32 *u8 *i32 i32 i32",
        {"WIDTH": 8, **_DENSE, "BLOCK": minmax.MOST_CHUNK},
        8,
        hot=True,
    ),
    Variant(minmax.decode_chunks, "*u8 *fp32 *fp32 i32 i32", {"WIDTH": 8, "BLOCK": minmax.BLOCK}, hot=True),
    Variant(
        natural.nonzero_range,
        "*fp32 *fp32 *i32 *i32 i32",
        {"FUSED": True, "SPARSE": False, "BLOCK": natural.BLOCK},
        hot=True,
    ),
    Variant(
        natural.natural_encode,
        "*fp32 *i32 *fp32 *i32 *i32 *u8 i32 i32 i32",
        {"WIDTH": 5, **_KEPT, "BLOCK": natural.BLOCK},
        hot=True,
    ),
    Variant(natural.natural_decode, "*u8 *fp32 *i32 i32 i32 i32", {"WIDTH": 5, "BLOCK": natural.BLOCK}, hot=True),
    Variant(
        threelc.nearest_encode, "*fp32 *i32 *fp32 *i32 *fp64 *fp32 *u8 i32", {**_KEPT, "BLOCK": threelc.BLOCK}, hot=True
    ),
    Variant(threelc.last_nonzero, "*u8 *i32 i32", {"BLOCK": threelc.FOLD_BLOCK}, 2, hot=True),
    Variant(threelc.fold_count, "*u8 *i32 *i32 i32", {"BLOCK": threelc.FOLD_BLOCK}, 2, hot=True),
    Variant(threelc.fold_write, "*u8 *i32 *i32 *i32 *u8 i32", {"BLOCK": threelc.FOLD_BLOCK}, 2, hot=True),
    Variant(
        lloyd.square_sums,
        "*fp32 *fp64 *i32 i32",
        {"BLOCK": lloyd.SQUARES_BLOCK, "TOGETHER": lloyd.TOGETHER, "UNROLLED": lloyd.UNROLLED},
        hot=True,
    ),
    Variant(lloyd.sum_blocks, "*fp64 *i32 *fp64 i32", {"UNROLLED": lloyd.UNROLLED}, 1),
    Variant(lloyd.magnitude_histogram, "*fp32 *fp64 *fp64 *i32 i32 i32", {"BINS": lloyd.BINS, "BLOCK": lloyd.BLOCK}),
    Variant(lloyd.nearest_levels, "*fp32 *fp32 *u8 *i32 i32 i32", {"BLOCK": lloyd.BLOCK}, hot=True),
    Variant(sketchml.count_bins, "*fp32 *i32 *i32 i32 i32", {"BLOCK": sketchml.BLOCK}, hot=True),
    Variant(sketchml.cut_bins, "*i32 *u8 *i32 *i32 i32 i32", {"BLOCK": sketchml.BLOCK}),
    Variant(sketchml.assign_levels, "*fp32 *i32 *u8 *u8 *i16 i32 i32", {"BLOCK": sketchml.BLOCK}, hot=True),
    Variant(
        sketchml.mean_of_lists,
        "*fp32 *i64 *i32 *fp32",
        {"LANES": sketchml.LANES, "UNROLLED": sketchml.UNROLLED},
        1,
        hot=True,
    ),
    Variant(tables.pack_levels, "*u8 *u8 i32", {"WIDTH": 6, "BLOCK": tables.BLOCK}, hot=True),
    Variant(
        tables.subtract_levels, "*fp32 *u8 *fp32 *i32 *fp32 i32 i32", {"SPARSE": False, "BLOCK": tables.BLOCK}, hot=True
    ),
    Variant(tables.look_up, "*u8 *fp32 *fp32 i32", {"BLOCK": tables.BLOCK}, hot=True),
    Variant(sketch.sketch_blocks, "*fp32 *i64 *i64 *i64 *fp32 i32 i32", {"AT_ONCE": sketch.AT_ONCE}, hot=True),
    Variant(sketch.sketch_tensors, "*fp32 *i64 *i64 *i64 *fp32 *fp32 i32 i32", {}, sketch.WARPS),
    Variant(
        lowrank.expand_factors,
        "*fp32 *fp32 *fp32 fp32 *fp32 *fp32 *i32 i32 i32 i32",
        {"KEEP": True, "BLOCK": lowrank.BLOCK},
        hot=True,
    ),
    Variant(packed.pack8, "*fp32 *i8 *fp32 i32", {"ROWS": packed.ROWS, "BLOCK": packed.BLOCK}, hot=True),
    Variant(packed.unpack8, "*i8 *fp32 *fp32 i32", {"WIDE": packed.WIDE, "BLOCK": packed.BLOCK}, hot=True),
    Variant(packed.pack16, "*fp32 *i16 i32", {"WIDE": packed.WIDE}, hot=True),
    Variant(packed.store_at, "*fp32 *i32 *i16 i32", {"WIDE": packed.WIDE}),
    Variant(rows.sum_rows, "*fp32 *i64 *i64 *fp32 i32", {"BLOCK": rows.BLOCK}, hot=True),
    Variant(accumulate.add_at, "*fp32 *i32 *fp32 fp32 i32 i32", {"BLOCK": accumulate.BLOCK}),
    Variant(accumulate.add_dense, "*fp32 *fp32 fp32 i32", {"BLOCK": accumulate.BLOCK}, hot=True),
]
