"""rle: the codes of run lengths, and what whole rows cost."""

import numpy as np
import pytest
from support.position_inputs import HUGE, inputs
from support.reference_kernels import index as reference_index

from grace_ext import registry
from grace_ext.kernels.runs import GOLOMB, best_run_code, numbers_decode, numbers_encode


def number_lists():
    rng = np.random.default_rng(0)
    return {
        "zeros": [0] * 100,
        "one": [7],
        "small": rng.geometric(0.3, 300).tolist(),
        "large": rng.geometric(1e-6, 60).tolist(),
        "heavy tail": np.minimum(rng.pareto(0.4, 500), 2**30).astype(int).tolist(),
        "largest": [HUGE - 1, 0, HUGE - 1],
        "a long prefix": [0] * 70 + [5000] + [0] * 70,
    }


@pytest.mark.parametrize("code", [0, 1, 4, 12, 30, GOLOMB, GOLOMB + 1, GOLOMB + 5, GOLOMB + 30])
@pytest.mark.parametrize("name", number_lists())
def test_numbers_in_every_code(name, code):
    values = number_lists()[name]
    prefixes, suffixes = reference_index.numbers(values, code) if code > 8 or max(values) < 10**5 else (None, None)
    if prefixes is None:
        return  # a prefix of millions of bits
    low, high = np.full(len(prefixes) // 8 + 9, 255, np.uint8), np.full(len(suffixes) // 8 + 9, 255, np.uint8)
    low[0] = high[0] = 5  # three bits are there already
    bits = numbers_encode(np.array(values, np.uint32), code, 3, 3, low, high)
    assert bits == (3 + len(prefixes), 3 + len(suffixes))
    for stream, expected in ((low, prefixes), (high, suffixes)):
        assert np.unpackbits(stream, bitorder="little")[: 3 + len(expected)].tolist() == [1, 0, 1] + expected
    out = np.empty(len(values), np.uint32)
    assert numbers_decode(low, high, 3, 3, code, max(values) + 1, out) == bits and out.tolist() == values
    assert numbers_decode(low, high, 3, 3, code, max(values), out) == (-1, -1), "a number is too large"
    short = low[: (bits[0] - 1) // 8]
    assert numbers_decode(short, high, 3, 3, code, max(values) + 1, out) == (-1, -1), "the last prefix is missing"


@pytest.mark.parametrize("name", number_lists())
def test_the_code_of_the_runs_is_about_the_best(name):
    """The e of the search is at a local minimum: at most a tenth above the best of all codes."""
    values = number_lists()[name]
    code, prefix_bits, suffix_bits = best_run_code(np.array(values, np.uint32), np.empty(len(values), np.uint32))
    assert (prefix_bits, suffix_bits) == tuple(map(len, reference_index.numbers(values, code)))

    def bits(code):
        e = code & 127
        parts = [((v >> e) + 1).bit_length() - 1 for v in values] if code >= GOLOMB else [v >> e for v in values]
        return len(values) * (e + 1) + sum(parts) * (2 if code >= GOLOMB else 1)

    assert prefix_bits + suffix_bits == bits(code)
    assert bits(code) <= 1.1 * min(map(bits, [*range(31), *range(GOLOMB, GOLOMB + 31)]))


def test_rare_large_runs_do_not_make_the_code_long():
    """A sample of the runs decides; one that it misses must not cost millions of bits."""
    values = np.zeros(100_000, np.uint32)
    values[777] = 2**30
    code, prefix_bits, suffix_bits = best_run_code(values, np.empty(4096, np.uint32))
    assert code >= GOLOMB and prefix_bits + suffix_bits < 101_000


def test_rle_of_whole_rows_costs_next_to_nothing():
    indices, d = inputs()["rows of an embedding"]
    assert registry.lookup("index", "rle")().size(indices, d) < 100 < indices.size / 25
