"""LLVM operations that add up vectors, in the same order on every processor. Only kernels use them."""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ._intrinsics import _pointer

_I32, _I64 = ir.IntType(32), ir.IntType(64)


def _make_add_signed(rows):
    @intrinsic
    def add_signed(typingctx, values, at, word, sums):
        """sums[j] += values[at + j] ± values[at + 8 + j] ± … for j = 0 to 7: rows of 8, row i negative if bit i of word is set.

        values, sums: float32. Four sums are kept for each j, because each addition waits for the one before.
        """
        signature = types.void(values, types.int64, types.uint32, sums)

        def generate(context, builder, signature, args):
            eight, bits = ir.VectorType(ir.FloatType(), 8), ir.VectorType(_I32, 8)
            one = builder.insert_element(ir.Constant(bits, ir.Undefined), args[2], ir.Constant(_I32, 0))
            words = builder.shuffle_vector(one, ir.Constant(bits, ir.Undefined), ir.Constant(bits, [0] * 8))
            sign, totals = ir.Constant(bits, [1 << 31] * 8), [ir.Constant(eight, [0.0] * 8)] * 4
            first = builder.gep(_pointer(context, builder, signature.args[0], args[0]), [args[1]])
            for i in range(rows):
                row = builder.load(builder.bitcast(builder.gep(first, [ir.Constant(_I64, 8 * i)]), eight.as_pointer()))
                row.align = 4
                flip = builder.and_(builder.shl(words, ir.Constant(bits, [31 - i] * 8)), sign)
                signed = builder.bitcast(builder.xor(builder.bitcast(row, bits), flip), eight)
                totals[i % 4] = builder.fadd(totals[i % 4], signed)
            place = builder.bitcast(_pointer(context, builder, signature.args[3], args[3]), eight.as_pointer())
            before = builder.load(place)
            before.align = 4
            total = builder.fadd(builder.fadd(totals[0], totals[1]), builder.fadd(totals[2], totals[3]))
            builder.store(builder.fadd(before, total), place).align = 4
            return context.get_dummy_value()

        return signature, generate

    return add_signed


add_signed64, add_signed256 = _make_add_signed(8), _make_add_signed(32)
