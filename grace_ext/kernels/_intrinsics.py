"""LLVM operations that Numba does not offer by itself. Only kernels use them."""

import numba
from llvmlite import ir
from numba import types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

LANES = 16
_I1, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (1, 16, 32, 64))
_VECTOR = ir.VectorType(_I32, LANES)

#: vpcompressd exists on this CPU. Numba's own cache is keyed by the same CPU features.
HAS_COMPRESS = "+avx512f" in cpu_target.target_context.codegen().magic_tuple()[2]


def _pointer(context, builder, array_type, array):
    return context.make_array(array_type)(context, builder, array).data


def _declare(builder, name, result, *arguments):
    found = builder.module.globals.get(name)
    return found if found is not None else ir.Function(builder.module, ir.FunctionType(result, arguments), name)


def _splat(builder, scalar):
    one = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, ir.Constant(_VECTOR, ir.Undefined), ir.Constant(_VECTOR, [0] * LANES))


def _past_caches(builder, store):
    """Let a store, which is aligned to 64 bytes, go to memory without fetching the line that it overwrites."""
    store.align = 64
    store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(_I32, 1)]))


def _lanes16(context, builder, signature, args, fused, streamed):
    """Load 16 floats at gradient[i]; if fused, add those of the residual and store the sums at out[i]. Returns uint32 lanes.

    If streamed, out[i] must be aligned to 64 bytes. The arguments of all intrinsics below begin with gradient, residual, out, i, bound.
    """
    floats = ir.VectorType(ir.FloatType(), LANES).as_pointer()

    def at(k):
        return builder.bitcast(builder.gep(_pointer(context, builder, signature.args[k], args[k]), [args[3]]), floats)

    lanes = builder.load(at(0))
    lanes.align = 4
    if fused:
        addend = builder.load(at(1))
        addend.align = 4
        lanes = builder.fadd(lanes, addend)
        store = builder.store(lanes, at(2))
        store.align = 4
        if streamed:
            _past_caches(builder, store)
    return builder.bitcast(lanes, _VECTOR)


def _at_least(builder, lanes, bound):
    magnitude = builder.and_(lanes, ir.Constant(_VECTOR, [0x7FFFFFFF] * LANES))
    return builder.icmp_unsigned(">=", magnitude, _splat(builder, bound))


def _make_mask16(fused, streamed=False):
    @intrinsic
    def mask16(typingctx, gradient, residual, out, i, bound):
        """Return a bit mask of the 16 elements from i on (of gradient, or gradient + residual) with magnitude >= bound."""
        signature = types.uint64(gradient, residual, out, types.int64, types.uint32)

        def generate(context, builder, signature, args):
            chosen = _at_least(builder, _lanes16(context, builder, signature, args, fused, streamed), args[4])
            return builder.zext(builder.bitcast(chosen, _I16), _I64)

        return signature, generate

    return mask16


def _make_collect16(fused, streamed=False):
    @intrinsic
    def collect16(typingctx, gradient, residual, out, i, bound, positions, bits, j):
        """Append the elements from i on with magnitude >= bound to positions[j:] and bits[j:]; return how many there are.

        Always writes 16 elements at j, so both outputs need 16 elements of slack. AVX-512 only. The compression goes through
        a register, because compressing straight to memory is microcoded on Zen 4 and 10 times slower.
        """
        signature = types.int64(gradient, residual, out, types.int64, types.uint32, positions, bits, types.int64)

        def generate(context, builder, signature, args):
            lanes = _lanes16(context, builder, signature, args, fused, streamed)
            chosen = _at_least(builder, lanes, args[4])
            compress = _declare(
                builder, "llvm.x86.avx512.mask.compress.v16i32", _VECTOR, _VECTOR, _VECTOR, ir.VectorType(_I1, LANES)
            )
            first = _splat(builder, builder.trunc(args[3], _I32))
            index = builder.add(first, ir.Constant(_VECTOR, list(range(LANES))))
            for what, k in ((index, 5), (lanes, 6)):
                at = builder.gep(_pointer(context, builder, signature.args[k], args[k]), [args[7]])
                packed = builder.call(compress, [what, ir.Constant(_VECTOR, [0] * LANES), chosen])
                builder.store(packed, builder.bitcast(at, _VECTOR.as_pointer())).align = 4
            count = _declare(builder, "llvm.ctpop.i16", _I16, _I16)
            return builder.zext(builder.call(count, [builder.bitcast(chosen, _I16)]), _I64)

        return signature, generate

    return collect16


mask16, add_mask16 = _make_mask16(False), _make_mask16(True)
collect16, add_collect16 = _make_collect16(False), _make_collect16(True)
stream_mask16, stream_collect16 = _make_mask16(True, streamed=True), _make_collect16(True, streamed=True)


@intrinsic
def trailing_zeros(typingctx, x):
    """Return the number of zero bits below the lowest set bit of a uint64; 64 for 0."""

    def generate(context, builder, signature, args):
        function = _declare(builder, "llvm.cttz.i64", _I64, _I64, _I1)
        return builder.call(function, [args[0], ir.Constant(_I1, 0)])

    return types.uint64(types.uint64), generate


@intrinsic
def popcount(typingctx, x):
    """Return the number of set bits of a uint64."""

    def generate(context, builder, signature, args):
        return builder.call(_declare(builder, "llvm.ctpop.i64", _I64, _I64), args)

    return types.uint64(types.uint64), generate


@intrinsic
def load64(typingctx, buffer, at):
    """Load the 8 bytes at buffer[at:at+8] as a little-endian uint64, at any alignment. The caller has checked the bounds."""
    signature = types.uint64(buffer, types.int64)

    def generate(context, builder, signature, args):
        address = builder.gep(_pointer(context, builder, signature.args[0], args[0]), [args[1]])
        word = builder.load(builder.bitcast(address, _I64.as_pointer()))
        word.align = 1
        return word

    return signature, generate


@intrinsic
def store64(typingctx, buffer, at, word):
    """Write a uint64 to buffer[at:at+8], little-endian, at any alignment. The caller has checked the bounds."""
    signature = types.void(buffer, types.int64, types.uint64)

    def generate(context, builder, signature, args):
        address = builder.gep(_pointer(context, builder, signature.args[0], args[0]), [args[1]])
        builder.store(args[2], builder.bitcast(address, _I64.as_pointer())).align = 1
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def stream16(typingctx, source, i, out, j):
    """Write out[j:j+16] = source[i:i+16] (float32) past the caches. out[j] must be aligned to 64 bytes."""
    signature = types.void(source, types.int64, out, types.int64)

    def generate(context, builder, signature, args):
        lanes = builder.load(_row16(context, builder, signature.args[0], *args[:2]))
        lanes.align = 4
        _past_caches(builder, builder.store(lanes, _row16(context, builder, signature.args[2], *args[2:])))
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def float_of(typingctx, bits):
    """Return the float32 that has these uint32 bits."""
    return types.float32(types.uint32), lambda context, builder, signature, args: builder.bitcast(args[0], ir.FloatType())


@intrinsic
def bits_of(typingctx, value):
    """Return the bits of a float32 as a uint32."""
    return types.uint32(types.float32), lambda context, builder, signature, args: builder.bitcast(args[0], _I32)


@intrinsic
def quotient(typingctx, x, y):
    """Return x / y, float32, without Python's error for y = 0, so that loops vectorise."""
    return types.float32(types.float32, types.float32), lambda context, builder, signature, args: builder.fdiv(*args)


helper = numba.njit(nogil=True)  # compiled as part of each kernel that calls it
numpy_helper = numba.njit(nogil=True, error_model="numpy")  # the same, without a test for zero before each division


@intrinsic
def negative16(typingctx, values, i):
    """Return 16 bits: bit j tells whether values[i + j] < 0, j = 0 to 15 (float32; a zero of either sign is not)."""
    signature = types.uint64(values, types.int64)

    def generate(context, builder, signature, args):
        lanes = builder.load(_row16(context, builder, signature.args[0], *args))
        lanes.align = 4
        below = builder.fcmp_ordered("<", lanes, ir.Constant(lanes.type, [0.0] * LANES))
        return builder.zext(builder.bitcast(below, _I16), _I64)

    return signature, generate


@intrinsic
def choose16(typingctx, mask, clear, set_, out, i):
    """Set out[i + j] to set_ where bit j of the mask is set, else to clear, j = 0 to 15 (float32)."""
    signature = types.void(types.uint64, types.float32, types.float32, out, types.int64)

    def generate(context, builder, signature, args):
        floats = ir.VectorType(ir.FloatType(), LANES)
        bits = builder.bitcast(builder.trunc(args[0], _I16), ir.VectorType(_I1, LANES))
        clear, set_ = (builder.bitcast(_splat(builder, builder.bitcast(x, _I32)), floats) for x in (args[1], args[2]))
        address = builder.gep(_pointer(context, builder, signature.args[3], args[3]), [args[4]])
        builder.store(builder.select(bits, set_, clear), builder.bitcast(address, floats.as_pointer())).align = 4
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def bit_length(typingctx, x):
    """Return the number of bits up to the highest set bit of a uint64; 0 for 0."""

    def generate(context, builder, signature, args):
        function = _declare(builder, "llvm.ctlz.i64", _I64, _I64, _I1)
        return builder.sub(ir.Constant(_I64, 64), builder.call(function, [args[0], ir.Constant(_I1, 0)]))

    return types.uint64(types.uint64), generate


@intrinsic
def bit_length32(typingctx, x):
    """Return the number of bits up to the highest set bit of a uint32; 0 for 0. It vectorises in loops."""

    def generate(context, builder, signature, args):
        function = _declare(builder, "llvm.ctlz.i32", _I32, _I32, _I1)
        return builder.sub(ir.Constant(_I32, 32), builder.call(function, [args[0], ir.Constant(_I1, 0)]))

    return types.uint32(types.uint32), generate


def _make_transpose(n):
    floats = ir.VectorType(ir.FloatType(), n)
    low, high = (
        ir.Constant(ir.VectorType(_I32, n), [first + half for half in range(n // 2) for first in (start, start + n)])
        for start in (0, n // 2)
    )

    @intrinsic
    def transpose(typingctx, source, i, stride, target, j, target_stride):
        """target[j + c * target_stride + r] = source[i + r * stride + c] for r, c = 0 to n - 1. Flat indices, float32."""
        signature = types.void(source, types.int64, types.int64, target, types.int64, types.int64)

        def generate(context, builder, signature, args):
            def row(k, r):
                place = builder.add(args[k + 1], builder.mul(args[k + 2], ir.Constant(_I64, r)))
                address = builder.gep(_pointer(context, builder, signature.args[k], args[k]), [place])
                return builder.bitcast(address, floats.as_pointer())

            rows = [builder.load(row(0, r)) for r in range(n)]
            for load in rows:
                load.align = 4
            for _ in range(n.bit_length() - 1):  # each time the bits of (row, column) rotate by one
                rows = [
                    builder.shuffle_vector(rows[r], rows[r + n // 2], mask) for r in range(n // 2) for mask in (low, high)
                ]
            for r in range(n):
                builder.store(rows[r], row(3, r)).align = 4
            return context.get_dummy_value()

        return signature, generate

    return transpose


transpose8, transpose16 = _make_transpose(8), _make_transpose(16)


def _row16(context, builder, array_type, array, at):
    """Return a pointer to 16 floats at a flat index of a float32 array."""
    address = builder.gep(_pointer(context, builder, array_type, array), [at])
    return builder.bitcast(address, ir.VectorType(ir.FloatType(), LANES).as_pointer())


def _two_rows16(operate):
    """Make the code of an intrinsic (x, i, j, factor, y, t, d).

    operate(builder, x[i:i + 16], x[j:j + 16], factor) returns what is stored at y[t:t + 16] and at y[d:d + 16]. Products and
    sums stay separate operations.
    """

    def generate(context, builder, signature, args):
        rows = [builder.load(_row16(context, builder, signature.args[0], args[0], at)) for at in args[1:3]]
        for load in rows:
            load.align = 4
        factor = builder.bitcast(_splat(builder, builder.bitcast(args[3], _I32)), ir.VectorType(ir.FloatType(), LANES))
        for row, at in zip(operate(builder, *rows, factor), args[5:], strict=True):
            builder.store(row, _row16(context, builder, signature.args[4], args[4], at)).align = 4
        return context.get_dummy_value()

    return generate


@intrinsic
def butterfly16(typingctx, x, i, j, factor, y, t, d):
    """y[t:t + 16] = a + b, y[d:d + 16] = (a - b) * factor, with a = x[i:i + 16], b = x[j:j + 16]. Flat indices, float32."""
    signature = types.void(x, types.int64, types.int64, types.float32, y, types.int64, types.int64)
    return signature, _two_rows16(
        lambda builder, a, b, factor: (builder.fadd(a, b), builder.fmul(builder.fsub(a, b), factor))
    )


@intrinsic
def unbutterfly16(typingctx, x, i, j, factor, y, t, d):
    """y[t:t + 16] = a + b, y[d:d + 16] = a - b, with a = x[i:i + 16], b = x[j:j + 16] * factor. Flat indices, float32."""

    def operate(builder, a, b, factor):
        b = builder.fmul(b, factor)
        return builder.fadd(a, b), builder.fsub(a, b)

    return types.void(x, types.int64, types.int64, types.float32, y, types.int64, types.int64), _two_rows16(operate)


@intrinsic
def add16(typingctx, x, i, z, j, y, t):
    """y[t:t + 16] = x[i:i + 16] + z[j:j + 16]; a copy of the first, and z[i:i + 16] is read, if j < 0. Flat indices, float32."""
    signature = types.void(x, types.int64, z, types.int64, y, types.int64)

    def generate(context, builder, signature, args):
        alone = builder.icmp_signed("<", args[3], ir.Constant(_I64, 0))
        first = builder.load(_row16(context, builder, signature.args[0], args[0], args[1]))
        second = builder.load(_row16(context, builder, signature.args[2], args[2], builder.select(alone, args[1], args[3])))
        first.align = second.align = 4
        row = builder.select(alone, first, builder.fadd(first, second))
        builder.store(row, _row16(context, builder, signature.args[4], args[4], args[5])).align = 4
        return context.get_dummy_value()

    return signature, generate
