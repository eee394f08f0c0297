"""The quantizers: options, sections that are refused, and entropy codes that change nothing but the size."""

import numpy as np
import pytest
from support.arrays import same_bits
from support.value_sections import decoded, encoded

from grace_ext import ConfigError, ContainerError
from grace_ext.pipeline import spec
from grace_ext.value._levels import ENTROPY


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


@pytest.mark.parametrize("text", ["minmax:4:chunk=300", "natural:8"])
def test_entropy_changes_the_size_only(text):
    values = np.random.default_rng(0).standard_t(2, 5000).astype(np.float32)
    sections, arrays = zip(*(encoded(f"{text}:entropy={entropy}", values) for entropy in ENTROPY), strict=True)
    assert all(same_bits(array, arrays[0]) for array in arrays)
    assert sections[1].size < sections[0].size and sections[2].size < sections[0].size
