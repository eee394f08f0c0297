"""terngrad: three levels a bucket, and packings that differ in size only."""

import numpy as np
import pytest
from support.arrays import gauss, same_bits
from support.value_sections import encoded


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
