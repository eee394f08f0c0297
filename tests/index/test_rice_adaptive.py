"""rice_adaptive: a parameter for each block, the best or nearly so."""

import numpy as np
import pytest
from support import reference_kernels
from support.position_inputs import inputs
from support.reference_kernels import index as reference_index

from grace_ext import ConfigError, ContainerError
from grace_ext.index.rice_adaptive import RiceAdaptive


@pytest.mark.parametrize("name", inputs())
@pytest.mark.parametrize("block", [16, 128, 4096])
def test_rice_adaptive(name, block):
    """The same bits as the reference implementation's; no parameter takes over a tenth more bits than the best."""
    indices, d = inputs()[name]
    payload, _ = RiceAdaptive(block).encode(indices, d)
    blocks = -(-indices.size // block)
    shifts = reference_kernels.unpack(payload[1:].tobytes(), 5, blocks)
    assert payload.tobytes() == reference_index.rice_adaptive(indices, block, shifts)
    gaps = np.array(reference_index.gaps(indices))
    for number, e in enumerate(shifts):
        part = gaps[number * block : (number + 1) * block]
        bits = [part.size * (e + 1) + int((part >> e).sum()) for e in range(31)]
        assert bits[e] <= 1.1 * min(bits)


def test_rice_adaptive_refuses_parameters():
    for block in (0, -128, 8, 100, 8192):
        with pytest.raises(ConfigError, match="powers of two from 16 to 4096"):
            RiceAdaptive(block)
    indices, d = inputs()["random 1 %"]
    payload, _ = RiceAdaptive().encode(indices, d)
    for at, byte in ((0, 3), (0, 13), (0, 255), (1, 0xFF)):
        bad = payload.copy()
        bad[at] = byte
        with pytest.raises(ContainerError):
            RiceAdaptive.decode(bad, d, np.empty(indices.size, np.uint32))
