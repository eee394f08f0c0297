"""The published settings."""

import pytest

import grace_ext
from grace_ext import ConfigError
from grace_ext.outer import make_outer
from grace_ext.rounds.presets import PRESETS, preset


@pytest.mark.parametrize("name", PRESETS)
def test_each_can_be_built(name):
    found = preset(name)
    compressor, memory, outer = (
        grace_ext.compressor(found.compression),
        grace_ext.memory(found.memory),
        make_outer(found.outer),
    )
    assert memory.stateful or compressor.dense, "what is left out has to be sent later"
    assert outer.lr > 0 and (found.steps is None or found.steps > 0) and found.source


def test_sparseloco_sends_64_of_4096_and_at_most_9_5_bits_for_each():
    import numpy as np

    compressor = grace_ext.compressor(PRESETS["sparseloco"].compression)
    gradient = np.random.default_rng(0).standard_normal(2**20).astype(np.float32)
    blob = compressor.compress(gradient)
    sent = 2**20 * 64 // 4096
    assert np.count_nonzero(grace_ext.decompress(blob, size=gradient.size)) <= sent
    assert 8 * blob.size / sent <= 9.5, 8 * blob.size / sent


def test_another_name_is_refused():
    with pytest.raises(ConfigError, match="'loco'; allowed: sparseloco, diloco"):
        preset("loco")
