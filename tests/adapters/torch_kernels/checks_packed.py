"""States in 8 and 16 bits: each kernel against the host's."""

import numpy as np
import torch
from inputs import KINDS, same, tensor, vector, with_special
from support.checking import check

from grace_ext import memory
from grace_ext.adapters._torch.device import TorchArrays
from grace_ext.memory.packed_vector import PackedVector

SIZES = (0, 1, 127, 128, 129, 1500)


def inputs():
    for d in SIZES:
        for kind in KINDS:
            yield vector(kind, d, d)
        if d:
            yield with_special(vector("normal", d), np.nan)
            yield with_special(vector("huge", d), np.inf)


@check
def states_in_fewer_bits_are_the_host_s():
    for bits in (8, 16):
        for given in inputs():
            if bits == 16 and not np.isfinite(given).all():
                continue  # a state is finite
            ours = TorchArrays("cpu").packed(given.size, bits)
            theirs = PackedVector(given.size, bits)
            assert len(ours) == given.size
            for step in range(3):  # what was packed once stays as it is; then it is multiplied
                if step < 2:
                    values = given if step == 0 else theirs.unpacked(np.empty_like(given))
                    ours.filled(tensor(values))
                    theirs.filled(values)
                else:
                    part = slice(given.size // 3, given.size)
                    ours.scale(part, np.float32(0.3))
                    theirs.scale(part, np.float32(0.3))
                assert same(ours._codes, theirs._codes), (bits, given[:5], step)
                assert bits == 16 or same(ours._scales, theirs._scales), (given[:5], step)
                assert same(ours.unpacked(torch.empty(given.size)), theirs.unpacked(np.empty_like(given)))


@check
def a_state_of_the_device_is_saved_as_float32_and_goes_on_anywhere():
    kept = memory("residual:bits=8")
    state, following = kept.begin("w", 500, TorchArrays("cpu"))
    assert isinstance(state, torch.Tensor) and not state.any()
    following.copy_(tensor(vector("normal", 500)))
    kept.commit()
    saved = kept.state_dict()
    assert saved["w"]["residual"].any()
    other = memory("residual:bits=8")
    other.load_state_dict(saved)
    assert same(kept.begin("w", 500, TorchArrays("cpu"))[0], other.begin("w", 500)[0])
