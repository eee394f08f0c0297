"""The published settings."""

import math

import numpy as np
import pytest

import grace_ext
from grace_ext import ConfigError
from grace_ext.outer import make_outer
from grace_ext.policy import Rules
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
    compressor = grace_ext.compressor(PRESETS["sparseloco"].compression)
    gradient = np.random.default_rng(0).standard_normal(2**20).astype(np.float32)
    blob = compressor.compress(gradient)
    sent = 2**20 * 64 // 4096
    assert np.count_nonzero(grace_ext.decompress(blob, size=gradient.size)) <= sent
    assert 8 * blob.size / sent <= 9.5, 8 * blob.size / sent


def test_sparseloco_sends_a_small_transformer_in_a_215th_of_float32_with_its_small_tensors():
    """Of 1.2 million parameters half a percent is in small tensors. As float32 they would be as long as all the rest."""
    found, random = PRESETS["sparseloco"], np.random.default_rng(0)
    rules = Rules(found.compression, small=found.small)
    block = [(128, 384), (384,), (128, 128), (128,), (128, 512), (512,), (512, 128), (128,), *[(128,)] * 4]
    by_compressor = {}
    for shape in [(2048, 128), (64, 128), *4 * block, (128,), (128,), (2048, 128)]:
        size = math.prod(shape)
        values = random.standard_normal(size) * np.abs(random.standard_normal(size)) ** 2
        by_compressor.setdefault(str(rules.choose("", size, len(shape))), []).append(values.astype(np.float32))
    sent = {spec: grace_ext.compressor(spec).compress(np.concatenate(values)).size for spec, values in by_compressor.items()}
    whole = 4 * sum(value.size for values in by_compressor.values() for value in values)
    assert set(sent) == {str(grace_ext.compressor(spec)) for spec in (found.compression, found.small)}
    assert 215 * sum(sent.values()) <= whole, sent


def test_another_name_is_refused():
    with pytest.raises(ConfigError, match="'loco'; allowed: sparseloco, diloco"):
        preset("loco")
