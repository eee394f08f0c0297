"""Bits that are moved to the places that a mask says, by the CPU's pdep where it has it."""

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from ._intrinsics import helper

#: pdep exists on this CPU.
HAS_DEPOSIT = "+bmi2" in cpu_target.target_context.codegen().magic_tuple()[2]
_0, _1 = np.uint64(0), np.uint64(1)
_I64 = ir.IntType(64)


@intrinsic
def _deposit(typingctx, bits, mask):
    """As `spread`. Where HAS_DEPOSIT only."""

    def generate(context, builder, signature, args):
        name = "llvm.x86.bmi.pdep.64"
        found = builder.module.globals.get(name) or ir.Function(builder.module, ir.FunctionType(_I64, (_I64, _I64)), name)
        return builder.call(found, args)

    return types.uint64(types.uint64, types.uint64), generate


@helper
def spread(bits, mask):
    """Move the lowest bits of a uint64, one after the other, to the places of the mask's set bits."""
    if HAS_DEPOSIT:
        return _deposit(bits, mask)
    return spread_one_by_one(bits, mask)


@helper
def spread_one_by_one(bits, mask):
    """As `spread`, on any CPU."""
    moved = _0
    while bits != _0 and mask != _0:
        lowest = mask & (~mask + _1)
        if bits & _1:
            moved |= lowest
        bits >>= _1
        mask ^= lowest
    return moved
