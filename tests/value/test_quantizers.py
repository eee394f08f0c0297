"""The quantizers as codecs: options, sizes, what each promises beyond the contract, and sections that are refused."""

import numpy as np
import pytest
from support import codec_conformance
from support.arrays import gauss, same_bits

from grace_ext import ConfigError, ContainerError, compressor, decompress
from grace_ext.pipeline import spec
from grace_ext.pipeline.container import parse
from grace_ext.policy.schedules import Schedules
from grace_ext.value._levels import ENTROPY

FLT_MAX = np.finfo(np.float32).max


def encoded(text, values):
    """(section, what it decodes to)."""
    codec = spec.parse_stage("value", text)
    section = codec.encode(np.asarray(values, np.float32), codec_conformance.STREAM)[0].copy()
    return section, decoded(codec, section, len(values))


def decoded(codec, section, k):
    out = np.full(k, np.nan, np.float32)
    codec.decode(section, out)
    return out


@pytest.mark.parametrize(
    "text, allowed",
    [
        ("minmax:0", "1 to 8"),
        ("minmax:9", "1 to 8"),
        ("minmax:chunk=1", "2 to 2147483647"),
        ("minmax:chunk=-5", "2 to"),
        ("minmax:chunk=2147483648", "2 to 2147483647"),
        ("minmax:entropy=zip", "none, huffman, ans"),
        ("minmax:per=tensor", "all, chunk"),
        ("minmax:chunk=41:per=chunk", "only one of the two"),
        ("natural:1", "2 to 8"),
        ("natural:9", "2 to 8"),
        ("natural:entropy=zip", "none, huffman, ans"),
        ("onebit:4", "power of two from 8 to 32768"),
        ("onebit:65536", "power of two"),
        ("onebit:500", "power of two"),
        ("terngrad:bucket=-8", "power of two"),
        ("terngrad:five", "trits, bits, huffman, ans"),
        ("threelc:0.99", "from 1 to below 2"),
        ("threelc:2", "from 1 to below 2"),
        ("threelc:nan", "from 1 to below 2"),
    ],
)
def test_options_out_of_range(text, allowed):
    with pytest.raises(ConfigError, match=allowed):
        spec.parse_stage("value", text)


REFUSED = {
    "minmax": [
        (slice(0, 4), "parameters"),
        ((0, 0), "parameters"),
        ((0, 9), "parameters"),
        (slice(0, 12), "too short"),
        ((8, 0x7F), "not finite"),
        ((8, 0x41), "above its largest"),
        (slice(0, -1), "levels"),
    ],
    "onebit": [
        (slice(0, 0), "empty"),
        ((0, 2), "bucket"),
        ((0, 16), "bucket"),
        (slice(0, 7), "too short"),
        ((4, 0x7F), "not finite"),
        (slice(0, -1), "signs"),
        ((-1, 0xFF), "signs"),
    ],
    "natural": [
        (slice(0, 1), "exponents"),
        ((0, 0), "exponents"),
        ((0, 255), "exponents"),
        ((1, 128), "exponents"),
        (slice(0, -1), "levels"),
        ((-1, 0xFF), "levels"),
    ],
    "terngrad": [
        (slice(0, 1), "parameters"),
        ((1, 2), "parameters"),
        ((0, 1), "bucket"),
        (slice(0, 5), "too short"),
        ((5, 0x7F), "not finite"),
        ((5, 0xBF), "negative"),
        (slice(0, -1), "ternary digits"),
        ((-1, 0xFF), "ternary digits"),
        ((-1, 0), "ternary digits"),
    ],
    "threelc": [
        (slice(0, 3), "too short"),
        ((3, 0x7F), "not finite"),
        ((3, 0xBF), "negative"),
        (slice(0, -1), "ternary digits"),
        ((-1, 0xFF), "ternary digits"),
        ((-1, 0), "ternary digits"),
    ],
    "bf16": [(slice(0, -1), "bytes for 11 values")],
}


@pytest.mark.parametrize("name, change, message", [(name, *case) for name, cases in REFUSED.items() for case in cases])
def test_refused_sections(name, change, message):
    """Cut, or with one byte changed; 11 values, so that bits and digits fill up the last byte."""
    section, good = encoded(name, [0.5, -1.5, 2, 2, -1, 0.25, -2, 1, 1, -2, 1])
    assert np.isfinite(good).all()
    bad = section.copy()
    if isinstance(change, slice):
        bad = bad[change]
    else:
        if change == (8, 0x41):  # the smallest value's sign and exponent
            assert section[8] == 0xC0
        bad[change[0]] = change[1]
        if change[1] == 0x7F:
            bad[change[0] - 1] = 0xFF
    with pytest.raises(ContainerError, match=message):
        decoded(spec.parse_stage("value", name), bad, good.size)


def test_bf16_keeps_the_range():
    values = np.array([FLT_MAX, -FLT_MAX, 1e-40, 0, -0.0, 1], np.float32)
    got = encoded("bf16", values)[1]
    assert np.isfinite(got).all() and np.allclose(got, values, rtol=2**-8, atol=1e-41)
    assert np.array_equal(np.signbit(got), np.signbit(values))


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


@pytest.mark.parametrize("text", ["minmax:4:chunk=300", "natural:8"])
def test_entropy_changes_the_size_only(text):
    values = np.random.default_rng(0).standard_t(2, 5000).astype(np.float32)
    sections, arrays = zip(*(encoded(f"{text}:entropy={entropy}", values) for entropy in ENTROPY), strict=True)
    assert all(same_bits(array, arrays[0]) for array in arrays)
    assert sections[1].size < sections[0].size and sections[2].size < sections[0].size


def test_packings_of_terngrad_differ_in_size_only():
    values = gauss(10_000)
    sections, arrays = zip(*(encoded(f"terngrad:{p}", values) for p in ("trits", "bits", "huffman", "ans")), strict=True)
    assert all(same_bits(array, arrays[0]) for array in arrays)
    assert [section.size for section in sections[:2]] == [2 + 4 + 2000, 2 + 4 + 1 + 2500]
    assert sections[3].size < sections[2].size < sections[0].size


@pytest.mark.parametrize("bucket", [0, 64])
def test_terngrad_is_ternary(bucket):
    values = gauss(1000)
    got = encoded(f"terngrad:bucket={bucket}", values)[1]
    for start in range(0, 1000, bucket or 1000):
        part, found = values[start : start + (bucket or 1000)], got[start : start + (bucket or 1000)]
        assert set(abs(found)) <= {0, abs(part).max()}
        assert ((found == 0) | (np.sign(found) == np.sign(part))).all()
        largest = abs(part).argmax()
        assert found[largest] == part[largest], "the largest is certain"


def test_onebit_sends_the_means_of_both_signs():
    values = gauss(1000) + np.float32(0.3)
    for bucket in (0, 128):
        got = encoded(f"onebit:{bucket}", values)[1]
        for start in range(0, 1000, bucket or 1000):
            part = values[start : start + (bucket or 1000)].astype(float)
            means = np.where(part < 0, part[part < 0].mean(), part[part >= 0].mean())
            np.testing.assert_allclose(got[start : start + (bucket or 1000)], means, rtol=1e-6)
    assert (encoded("onebit", [FLT_MAX] * 20)[1] == FLT_MAX).all()


def test_natural_rounds_to_a_neighbouring_power_of_two():
    values = np.concatenate([gauss(5000), np.float32(2.0) ** np.arange(-60, 60)]).astype(np.float32)
    got = encoded("natural:8", values)[1]
    below = np.float32(2.0) ** np.floor(np.log2(abs(values)))
    kept = got != 0  # 8 bits reach from 2**59 down to 2**-66
    assert kept.all() and (np.sign(got) == np.sign(values)).all()
    assert ((abs(got) == below) | (abs(got) == 2 * below)).all()
    assert np.array_equal(got[5000:], values[5000:]), "powers of two stay as they are"
    low = np.array([1.0, 2.0**-20, 1e-30], np.float32)
    assert set(encoded("natural:3", np.tile(low, 1000))[1]) <= {1, 0.25, 0}


def test_natural_takes_as_few_bits_as_the_exponents_need():
    values = np.where(gauss(8000) < 0, -1, 1) * np.linspace(1, 3.9, 8000)  # 1, 2, 4 of both signs, and 0
    assert encoded("natural:8", values)[0].size == 2 + 1 + 3000
    assert encoded("natural:2", values)[0].size == 2 + 1 + 2000


def test_natural_never_rounds_to_infinity():
    got = encoded("natural:8", [FLT_MAX, -FLT_MAX, 2.0**127, 1e-45] * 100)[1]
    assert set(abs(got)) <= {2.0**127, 2.0, 0.0} and (abs(got[::4]) == 2.0**127).all()


@pytest.mark.parametrize("s", [1.0, 1.25, 1.5, 1.75, 1.999999999])
def test_threelc_rounds_to_the_nearest(s):
    """Lim et al.: M = s max |T|, T / M rounded."""
    values = gauss(1000) ** 3
    section, got = encoded(f"threelc:{s}", values)
    m = np.float32(s * float(abs(values).max()))
    assert np.array_equal(got, m * np.sign(values) * (abs(values) >= m / 2))
    assert got[abs(values).argmax()] == m * np.sign(values[abs(values).argmax()])
    assert section.size <= 4 + 200
    assert (encoded(f"threelc:{s}", [1e-45, 0, -0.0, -1e-45] * 3)[1][[1, 2, 5, 6]] == 0).all()
    assert np.isfinite(encoded(f"threelc:{s}", [FLT_MAX, -1])[1]).all()


def test_threelc_folds_zeros():
    """5 zeros a byte, 14 such bytes in one."""
    values = np.zeros(70 * 100, np.float32)
    assert encoded("threelc", values)[0].size == 4 + 100
    values[0] = 1
    assert encoded("threelc", values)[0].size == 4 + 1 + 100
    assert parse(codec_conformance.grace_ext.compressor("dense/threelc").compress(values)).value_section.size == 105


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
