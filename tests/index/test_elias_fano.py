"""elias_fano: one position is read without decoding the others."""

import numpy as np
import pytest
from support import codec_conformance
from support.position_inputs import inputs

from grace_ext import ContainerError
from grace_ext.index.elias_fano import EliasFano


@pytest.mark.parametrize("name", inputs())
def test_one_position_of_elias_fano(name):
    indices, d = inputs()[name]
    payload, _ = EliasFano().encode(indices, d)
    for i in {0, indices.size // 3, indices.size - 1, *range(0, indices.size, 97)}:
        assert EliasFano.position(payload, d, indices.size, i) == indices[i]
    for i in (-1, indices.size):
        with pytest.raises(IndexError):
            EliasFano.position(payload, d, indices.size, i)


def test_one_position_of_a_broken_section():
    indices, d = inputs()["random 1 %"]
    payload, _ = EliasFano().encode(indices, d)
    for bad in codec_conformance.mutations(payload, count=200):
        for i in (0, 1234, 1999):
            try:
                assert 0 <= EliasFano.position(bad, d, 2000, i) < d
            except ContainerError:
                pass
    with pytest.raises(ContainerError, match="not below"):
        EliasFano.position(np.zeros_like(payload), d, 2000, 0)
