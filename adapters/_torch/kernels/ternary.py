"""Three levels as the digits 0, 1 and 2, five in a byte. The counterpart of grace_ext/kernels/ternary.py, for one bucket."""

import triton
import triton.language as tl

from ._helpers import bits_of, block_offsets, float_of, magnitude_of, random32, store_remainder, uint32_of
from ._launch import blocks, launch, signed32
from .ranges import range_of

BLOCK = 256  # bytes of a program
_SMALLEST = tl.constexpr(2.0**-100)  # below it, 2**23 / norm would overflow; such values are sent as zeros


@triton.jit(do_not_specialize=["low", "high"])  # a key of each step must not mean a compilation
def ternary_encode(
    values, positions, remainder, found, norm_out, out, n, low, high,
    KEEP: tl.constexpr, SPARSE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Round float32[n] to 0 or +- the largest magnitude, unbiased. found: what value_range gave; norm_out: float32[1].

    out: uint8[ceil(n / 5)]. For the rest see qsgd_encode.
    """
    smallest, largest = range_of(found)
    norm = float_of(tl.maximum(magnitude_of(smallest), magnitude_of(largest)))
    norm = tl.where(norm >= _SMALLEST, norm, 0.0)
    if tl.program_id(0) == 0:
        tl.store(norm_out, norm)
    scale = tl.where(norm > 0, tl.math.div_rn(tl.full([], 8388608.0, tl.float32), tl.where(norm > 0, norm, 1.0)), 0.0)
    byte = block_offsets(BLOCK)
    packed = tl.zeros([BLOCK], tl.int32)
    for i in tl.static_range(5):
        at = 5 * byte + i
        inside = at < n
        x = tl.load(values + at, mask=inside, other=0.0)
        random = random32(at.to(tl.uint32), uint32_of(low), uint32_of(high)) >> 9
        uniform = random.to(tl.int32).to(tl.float32) + 0.5
        step = (uniform <= float_of(magnitude_of(x)) * scale).to(tl.int32)
        step = tl.where(bits_of(x) >= 0x80000000, -step, step)
        packed = 3 * packed + tl.where(inside, 1 + step, 1)
        if KEEP:
            store_remainder(remainder, positions, at, inside, x - step.to(tl.float32) * norm, SPARSE)
    tl.store(out + byte, packed.to(tl.uint8), mask=5 * byte < n)


@triton.jit
def ternary_decode(packed, norms, out, bad, n, BLOCK: tl.constexpr):
    """The inverse of ternary_encode. out: float32[n]; bad: int32[1], set to 1 if a byte is not that of five digits."""
    byte = block_offsets(BLOCK)
    rest = tl.load(packed + byte, mask=5 * byte < n, other=121).to(tl.int32)
    wrong = (rest >= 243).to(tl.int32)
    norm = tl.load(norms)
    for i in tl.static_range(5):
        at = 5 * byte + 4 - i
        digit = rest % 3
        rest = rest // 3
        tl.store(out + at, (digit - 1).to(tl.float32) * norm, mask=at < n)
        wrong |= ((at >= n) & (digit != 1)).to(tl.int32)
    tl.atomic_max(bad, 1, mask=tl.max(wrong) > 0, sem="relaxed")


def encode(source, found, norm, out, key: tuple[int, int]) -> None:
    """See the kernel. source: a device_values.Source without a residual."""
    n, flags = source.values.numel(), source.flags()
    values, _, positions, remainder = source.arrays(norm)
    launch(
        ternary_encode, blocks(blocks(n, 5), BLOCK), values, positions, remainder, found, norm, out, n, *map(signed32, key),
        KEEP=flags["KEEP"], SPARSE=flags["SPARSE"], BLOCK=BLOCK,
    )  # fmt: skip


def decode(packed, norm, out, bad) -> None:
    """See the kernel."""
    n = out.numel()
    launch(ternary_decode, blocks(blocks(n, 5), BLOCK), packed, norm, out, bad, n, BLOCK=BLOCK)
