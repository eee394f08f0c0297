"""What kernels of several files have in common. The counterpart of grace_ext/kernels/_helpers.py.

Atomic operations are relaxed everywhere: only kernels that run later read what they have made. Triton's default costs a fence for each.
"""

import triton
import triton.language as tl

MAGNITUDE = tl.constexpr(0x7FFFFFFF)  # the bits of a float32 without its sign
NON_FINITE = tl.constexpr(0x7F800000)  # magnitudes from here on are Inf and NaN
LARGEST = tl.constexpr(0x7F7FFFFF)  # the largest finite magnitude
ROWS = 8  # of a histogram; see count_in_rows
_ROWS = tl.constexpr(ROWS)


@triton.jit
def bits_of(x):
    """The bits of a float32 as a uint32."""
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def float_of(bits):
    """The float32 that has these uint32 bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def magnitude_of(x):
    """The bits of a float32 without its sign, uint32."""
    return bits_of(x) & MAGNITUDE


@triton.jit
def ordered(x):
    """The bits of a float32 as an integer in the order of the values, or back; int32."""
    return x ^ ((x >> 31) & MAGNITUDE)


@triton.jit
def random32(i, low, high):
    """The core's counter-based random uint32 (kernels/_helpers.py). i: uint32; low, high: the key, uint32."""
    x = (i * 0x9E3779B1) ^ low
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = x + high
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def wide(n):
    """An integer argument in 64 bits. Triton compiles an argument that is 1 as a constant, which has no method `to`."""
    return tl.cast(n, tl.int64)


@triton.jit
def uint32_of(key):
    """An integer argument's bits as a uint32."""
    return wide(key).to(tl.uint32)


@triton.jit
def block_offsets(BLOCK: tl.constexpr):
    """The positions of this program's block. In 64 bits: behind the last of 2**31 - 1 elements, 32 would overflow."""
    return tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def load_source(values, residual, at, inside, special, FUSED: tl.constexpr, SPARSE: tl.constexpr):
    """values[at], with the residual if FUSED. If not SPARSE, special, int32[1], is made other than 0 where one is not finite."""
    x = tl.load(values + at, mask=inside, other=0.0)
    if FUSED:
        x += tl.load(residual + at, mask=inside, other=0.0)
    if not SPARSE:
        largest = tl.max(magnitude_of(x).to(tl.int32))
        tl.atomic_max(special, largest, mask=largest >= NON_FINITE, sem="relaxed")
    return x


@triton.jit
def count_in_rows(histogram, bin_, at, counted, BINS: tl.constexpr):
    """Add 1 to the bin of each element, in global memory. histogram: int32[ROWS, BINS], whose rows whoever reads it adds up.

    counted: which elements. Elements that are four positions apart use other rows, so that fewer wait for each other where many
    have the same bin.
    """
    row = (at // 4 % _ROWS).to(tl.int32)
    tl.atomic_add(histogram + row * BINS + bin_, 1, mask=counted, sem="relaxed")


@triton.jit
def random16(x, at):
    """A hash of 16 bits of each value and its position, uint32 (grace_ext/kernels/packed.py)."""
    return random32(at.to(tl.uint32), bits_of(x), tl.zeros(at.shape, tl.uint32)) >> 16


@triton.jit
def half_of(x, at):
    """The bits of bfloat16, int16, rounded at random to one of both neighbors; never to Inf. at: the values' positions."""
    magnitude = tl.minimum((bits_of(x) & MAGNITUDE) + random16(x, at), LARGEST)
    half = (magnitude | (bits_of(x) & 0x80000000)) >> 16
    return half.to(tl.uint16).to(tl.int16, bitcast=True)


@triton.jit
def load_state(state, at, inside):
    """state[at], float32; the state is float32 or the bits of bfloat16, int16."""
    x = tl.load(state + at, mask=inside, other=0)
    if state.dtype.element_ty == tl.int16:
        x = float_of(x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16)
    return x


@triton.jit
def store_state(state, at, x, inside):
    """state[at] = x, where the state is float32 or the bits of bfloat16, int16."""
    if state.dtype.element_ty == tl.int16:
        tl.store(state + at, half_of(x, at), mask=inside)
    else:
        tl.store(state + at, x, mask=inside)


@triton.jit
def store_remainder(remainder, positions, at, inside, error, SPARSE: tl.constexpr):
    """Write what the codes of values do not carry to remainder[at], or to remainder[positions[at]] if SPARSE; see store_state."""
    if SPARSE:
        store_state(remainder, tl.load(positions + at, mask=inside, other=0), error, inside)
    else:
        store_state(remainder, at, error, inside)


@triton.jit
def bucket_offsets(BUCKET: tl.constexpr):
    """The positions of this program's bucket, int64[BUCKET / 8, 8]."""
    first = tl.program_id(0).to(tl.int64) * BUCKET
    return first + tl.arange(0, BUCKET // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]


@triton.jit
def store_codes(out, codes, first, n, WIDTH: tl.constexpr):
    """Pack codes at WIDTH bits each, the least significant bit first, as squeeze does on the host.

    codes: int64[groups, 8], zero behind the last value; first: the position of the first of these values, a multiple of 8; n:
    number of all values. out: uint8[ceil(n * WIDTH / 8)].
    """
    groups: tl.constexpr = codes.shape[0]
    words = tl.sum(codes << (tl.arange(0, 8) * WIDTH)[None, :].to(tl.int64), axis=1)
    start = (first // 8 + tl.arange(0, groups)) * WIDTH
    end = (wide(n) * WIDTH + 7) // 8
    for byte in tl.static_range(WIDTH):
        tl.store(out + start + byte, ((words >> (8 * byte)) & 0xFF).to(tl.uint8), mask=start + byte < end)


@triton.jit
def load_codes(packed, first, n, WIDTH: tl.constexpr, GROUPS: tl.constexpr):
    """The inverse of store_codes: int64[GROUPS, 8]."""
    start = (first // 8 + tl.arange(0, GROUPS)) * WIDTH
    end = (wide(n) * WIDTH + 7) // 8
    words = tl.zeros([GROUPS], tl.int64)
    for byte in tl.static_range(WIDTH):
        part = tl.load(packed + start + byte, mask=start + byte < end, other=0)
        words |= part.to(tl.int64) << (8 * byte)
    shifts = (tl.arange(0, 8) * WIDTH)[None, :].to(tl.int64)
    return (words[:, None] >> shifts) & ((1 << WIDTH) - 1)
