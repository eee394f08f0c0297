"""Cosine transforms of the columns of a matrix, 16 columns at once and with all rows in registers: for kernels/dct.py."""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ._intrinsics import LANES

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_ROW = ir.VectorType(ir.FloatType(), LANES)
_UNDEFINED = ir.Constant(_ROW, ir.Undefined)


def _forward(builder, rows, factor):
    """Return the DCT-II of the rows, unscaled, by Lee's recursion: sums and scaled differences of mirrored rows."""
    n, half = len(rows), len(rows) // 2
    if n == 1:
        return rows
    pairs = [(rows[i], rows[n - 1 - i]) for i in range(half)]
    even = _forward(builder, [builder.fadd(a, b) for a, b in pairs], factor)
    differences = [builder.fmul(builder.fsub(a, b), factor(half + i)) for i, (a, b) in enumerate(pairs)]
    odd = _forward(builder, differences, factor)
    odd = [builder.fadd(a, b) for a, b in zip(odd, odd[1:], strict=False)] + odd[-1:]
    return [row for pair in zip(even, odd, strict=True) for row in pair]


def _inverse(builder, rows, factor):
    """Return what _forward makes rows of, unscaled: the transposed steps in reverse order."""
    n, half = len(rows), len(rows) // 2
    if n == 1:
        return rows
    even, odd = rows[::2], rows[1::2]
    odd = odd[:1] + [builder.fadd(b, a) for a, b in zip(odd, odd[1:], strict=False)]
    even, odd = _inverse(builder, even, factor), _inverse(builder, odd, factor)
    odd = [builder.fmul(row, factor(half + i)) for i, row in enumerate(odd)]
    pairs = list(zip(even, odd, strict=True))
    return [builder.fadd(a, b) for a, b in pairs] + [builder.fsub(a, b) for a, b in reversed(pairs)]


def _make(n, inverse):
    @intrinsic
    def columns(typingctx, x, i, stride, first, others, factors, y, j, target_stride):
        """Transform x[i + r * stride : ... + 16], r = 0 to n - 1, into y[j + r * target_stride : ... + 16].

        Flat indices, float32; y may be x, with the same indices. factors: see kernels/dct.py. Row 0 of what _forward makes, or
        _inverse is given, is multiplied by `first`, all others by `others`.
        """
        signature = types.void(
            x, types.int64, types.int64, types.float32, types.float32, factors, y, types.int64, types.int64
        )

        def generate(context, builder, signature, args):
            def pointer(k):
                return context.make_array(signature.args[k])(context, builder, args[k]).data

            def row(k, r):
                at = builder.add(args[k + 1], builder.mul(args[k + 2], ir.Constant(_I64, r)))
                return builder.bitcast(builder.gep(pointer(k), [at]), _ROW.as_pointer())

            def spread(number):
                one = builder.insert_element(_UNDEFINED, number, ir.Constant(_I32, 0))
                return builder.shuffle_vector(one, _UNDEFINED, ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES))

            def factor(k):
                return spread(builder.load(builder.gep(pointer(5), [ir.Constant(_I64, k)])))

            def scaled(rows):
                first, others = spread(args[3]), spread(args[4])
                return [builder.fmul(row, others if r else first) for r, row in enumerate(rows)]

            rows = [builder.load(row(0, r)) for r in range(n)]
            for load in rows:
                load.align = 4
            rows = _inverse(builder, scaled(rows), factor) if inverse else scaled(_forward(builder, rows, factor))
            for r, result in enumerate(rows):
                builder.store(result, row(6, r)).align = 4
            return context.get_dummy_value()

        return signature, generate

    return columns


forward8, forward64 = _make(8, False), _make(64, False)
inverse8, inverse64 = _make(8, True), _make(64, True)
