"""inceptionn: bits by exponent, against GRACE's arithmetic on the bits of a float32."""

import numpy as np
import pytest
from support.arrays import gauss
from support.value_sections import encoded

import grace_ext
from grace_ext import ConfigError


def grace(value, lowest=117):
    """What GRACE makes of one float32: a marker before the mantissa, shifted right, of which the upper bits are kept."""
    bits = int(np.float32(value).view(np.uint32))
    exponent, mantissa = bits >> 23 & 0xFF, bits & 0x7FFFFF
    middle = lowest + -(-(127 - lowest) // 2)
    if exponent >= 127:
        return float(np.float32(value))
    if exponent < lowest:
        return 0.0
    width = 16 if exponent >= middle else 8
    kept = ((mantissa >> 1 | 1 << 22) >> (127 - exponent)) >> (8 if width == 16 else 16)
    marker = kept.bit_length()  # where GRACE's decoder finds it; the bits below are the mantissa's
    magnitude = 2.0 ** (1 - width) if marker == 0 else kept * 2.0 ** (2 - width)
    return -magnitude if bits >> 31 else magnitude


@pytest.mark.parametrize("text, lowest", [("inceptionn", 117), ("inceptionn:0.0002", 123), ("inceptionn:2", 127)])
def test_values_are_graces(text, lowest):
    values = np.concatenate([gauss(2000) * np.float32(2.0**-shift) for shift in range(0, 14, 2)])
    values[:6] = 1, -1, 2**-5, -(2**-10), 0, -0.0
    got = encoded(text, values)[1]
    assert got.tolist() == [grace(value, lowest) for value in values]


def test_bytes_of_the_four_kinds():
    for value, size in ((3.0, 4), (0.5, 2), (2**-7, 1), (1e-6, 0)):
        assert encoded("inceptionn", [value] * 1000)[0].size == 1 + 250 + 1000 * size


def test_options_out_of_range():
    for bound in ("0", "2.5", "nan"):
        with pytest.raises(ConfigError, match="error_bound=.*; allowed: above 0 and at most 2"):
            grace_ext.compressor(f"dense/inceptionn:{bound}")
