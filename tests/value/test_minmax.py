"""minmax: its error, and how its chunks follow those of a transform."""

import numpy as np
import pytest
from support.arrays import gauss
from support.value_sections import FLT_MAX, encoded

from grace_ext import ConfigError, compressor, decompress
from grace_ext.pipeline.container import parse
from grace_ext.policy.schedules import Schedules


@pytest.mark.parametrize("bits", range(1, 9))
def test_minmax_error_is_half_a_level(bits):
    for chunk in (0, 100, 1000):
        values = gauss(3001, bits) + np.float32(0.5)
        got = encoded(f"minmax:{bits}:chunk={chunk}", values)[1].astype(float)
        for start in range(0, 3001, chunk or 3001):
            part, found = values[start : start + (chunk or 3001)].astype(float), got[start : start + (chunk or 3001)]
            half = (part.max() - part.min()) / (2**bits - 1) / 2
            assert abs(found - part).max() <= half * (1 + 1e-5) + 1e-6
            assert found.min() == part.min() and found.max() == part.max()


@pytest.mark.parametrize("bits", [1, 2, 8])
def test_minmax_of_extreme_values(bits):
    for value in (0.0, -0.0, 1e-45, -1.25, FLT_MAX, -FLT_MAX):
        assert (encoded(f"minmax:{bits}", [value] * 9)[1] == np.float32(value)).all()
    for values in ([FLT_MAX, -FLT_MAX], [1e-45, 0], [FLT_MAX, np.nextafter(FLT_MAX, np.float32(0))]):
        assert np.array_equal(encoded(f"minmax:{bits}", values)[1], np.array(values, np.float32))


@pytest.mark.parametrize("density", [0.0001, 0.01, 0.045, 0.3])
def test_minmax_of_a_transforms_chunks_follows_the_sparsifier(density):
    """Every chunk has a range of its own, so a small chunk beside large ones keeps its accuracy. Panthalia's scheme."""
    scales = np.repeat([1.0, 1e-3, 1e3, 1e-6], 4096)
    gradient = (np.random.default_rng(0).standard_normal(scales.size) * scales).astype(np.float32)
    text = f"dct:64/topk:{density}:per=chunk/auto"
    container = parse(compressor(f"{text}/minmax:8:per=chunk").compress(gradient))
    assert int.from_bytes(container.value_section[1:5].tobytes(), "little") == round(density * 4096) or density < 1 / 4096
    exact, sent = (
        decompress(compressor(f"{text}/{value}").compress(gradient), gradient.size).reshape(4, -1)
        for value in ("raw", "minmax:8:per=chunk")
    )
    for one, other in zip(exact, sent, strict=True):
        assert np.linalg.norm(one - other) < 0.01 * np.linalg.norm(one)


def test_minmax_of_chunks_needs_chunks_of_equal_counts():
    for sparsifier in ("topk:0.01", "dct:64/topk:0.01", "dense"):
        with pytest.raises(ConfigError, match="needs a sparsifier that sends as many values of each"):
            compressor(f"{sparsifier}/raw/minmax:8:per=chunk")


def test_minmax_of_chunks_follows_a_schedule():
    schedules = Schedules({"density": lambda step: (0.01, 0.045)[step]})
    gradient = np.random.default_rng(0).standard_normal(8192).astype(np.float32)
    sent = [parse(schedules.at(compressor("panthalia"), step).compress(gradient)) for step in range(2)]
    assert [int.from_bytes(one.value_section[1:5].tobytes(), "little") for one in sent] == [41, 184]
