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
    n = len(rows)
    if n == 1:
        return rows
    pairs = [(rows[i], rows[n - 1 - i]) for i in range(n // 2)]
    return [row for pair in zip(_even(builder, pairs, factor), _odd(builder, pairs, factor), strict=True) for row in pair]


def _even(builder, pairs, factor):
    """Return rows 0, 2, 4, ... of the DCT-II of rows that are given as pairs of mirrored ones."""
    return _forward(builder, [builder.fadd(a, b) for a, b in pairs], factor)


def _odd(builder, pairs, factor):
    """Return rows 1, 3, 5, ..."""
    differences = [builder.fmul(builder.fsub(a, b), factor(len(pairs) + i)) for i, (a, b) in enumerate(pairs)]
    rows = _forward(builder, differences, factor)
    return [builder.fadd(a, b) for a, b in zip(rows, rows[1:], strict=False)] + rows[-1:]


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

        Flat indices, float32; y is another array than x. factors: see kernels/dct.py. Row 0 of what _forward makes, or
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

            def load(r):
                found = builder.load(row(0, r))
                found.align = 4
                return found

            def store(rows, start, step):
                for k, result in enumerate(rows):
                    builder.store(result, row(6, start + step * k)).align = 4

            first, others = spread(args[3]), spread(args[4])

            if inverse:
                rows = [builder.fmul(load(r), others if r else first) for r in range(n)]
                store(_inverse(builder, rows, factor), 0, 1)
                return context.get_dummy_value()
            # The even rows are stored before the odd ones are begun: all at once do not fit into the registers.
            for part, start in ((_even, 0), (_odd, 1)):
                rows = part(builder, [(load(i), load(n - 1 - i)) for i in range(n // 2)], factor)
                store([builder.fmul(row, others if start + k else first) for k, row in enumerate(rows)], start, 2)
            return context.get_dummy_value()

        return signature, generate

    return columns


forward2, forward4, forward8, forward64 = (_make(n, False) for n in (2, 4, 8, 64))
inverse2, inverse4, inverse8, inverse64 = (_make(n, True) for n in (2, 4, 8, 64))
