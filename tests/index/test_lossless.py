"""The lossless index codecs against reference implementations, on inputs like real gradients; they stay in their arrays."""

import functools
import math

import numpy as np
import pytest
from support import codec_conformance, reference_decoder, reference_kernels
from support.arrays import gauss
from support.guards import survives
from support.reference_decoder import index as index_decoder
from support.reference_kernels import index as reference_index

import grace_ext
from grace_ext import ConfigError, ContainerError, registry
from grace_ext._util import scratch
from grace_ext.index.elias_fano import EliasFano
from grace_ext.index.gaps import GapCounts
from grace_ext.index.huffman import Huffman
from grace_ext.index.rice_adaptive import RiceAdaptive
from grace_ext.kernels.gap_huffman import plan_gap_codes
from grace_ext.kernels.runs import GOLOMB, best_run_code, numbers_decode, numbers_encode
from grace_ext.pipeline import spec

LOSSLESS = [name for name in codec_conformance.index_codecs() if registry.lookup("index", name).lossless]
FIXED = [
    name
    for name in LOSSLESS
    if registry.lookup("index", name).id is not None and not registry.lookup("index", name).composite
]
VARIANTS = [*FIXED, "huffman:bytes", "rice_adaptive:16", "rows", "rows:96", "rows:1"]
HUGE = 2**31 - 1


def ascending(d, k, seed=0):
    rng = np.random.default_rng(seed)
    return np.sort(rng.choice(d, k, replace=False)).astype(np.uint32)


def blocks(starts, length):
    return (np.asarray(starts)[:, None] + np.arange(length)).reshape(-1).astype(np.uint32)


@functools.cache
def inputs():
    """name -> (indices, d), as sparsified gradients have them; some thousand positions at most."""
    rng = np.random.default_rng(5)
    found = {
        "rows of an embedding": (blocks(96 * ascending(2000, 30), 96), 2000 * 96),
        "rows with holes": (blocks(96 * ascending(2000, 30), 96)[rng.random(30 * 96) < 0.8], 2000 * 96),
        "blocks of channels": (blocks(576 * ascending(64, 5), 9 * 7), 576 * 64),
        "two densities": (np.r_[ascending(10_000, 2000), 10_000 + ascending(300_000, 700)].astype(np.uint32), 310_000),
        "scales that vary": (
            np.cumsum(1 + rng.geometric(2.0 ** -np.repeat(rng.integers(1, 12, 20), 100))).astype(np.uint32),
            10**7,
        ),
        "every third": (np.arange(0, 9000, 3, dtype=np.uint32), 9000),
        "all": (np.arange(5000, dtype=np.uint32), 5000),
        "all but one": (np.delete(np.arange(5000), 2500).astype(np.uint32), 5000),
        "random 1 %": (ascending(200_000, 2000), 200_000),
        "first of many": (np.zeros(1, np.uint32), HUGE),
        "last of many": (np.array([HUGE - 1], np.uint32), HUGE),
        "both ends": (np.array([0, HUGE - 1], np.uint32), HUGE),
        "ends of many": (np.r_[0:700, HUGE - 900 : HUGE].astype(np.uint32), HUGE),
        "all lengths of gaps": (np.cumsum([1 << i for i in range(31)]).astype(np.uint32) - 1, HUGE),
    }
    for bits in (7, 14, 21, 28):  # where a varint gets a byte longer
        found[f"around 2**{bits}"] = (np.cumsum(1 + (1 << bits) + np.arange(-2, 3)).astype(np.uint32), HUGE)
    return found


def fits(name, d):
    return name != "bitmap" or d < 10**8  # a bitmap has d bits by definition


@pytest.mark.parametrize("name", inputs())
@pytest.mark.parametrize("text", ["auto", *VARIANTS])
def test_round_trip(text, name):
    indices, d = inputs()[name]
    if fits(text, d):
        codec_conformance.check_index_codec(spec.parse_stage("index", text), indices, d)


@pytest.mark.parametrize("name", inputs())
@pytest.mark.parametrize("text", VARIANTS)
def test_second_decoder(text, name):
    indices, d = inputs()[name]
    codec = spec.parse_stage("index", text)
    if fits(text, d):
        payload, _ = codec.encode(indices, d)
        assert list(reference_decoder.INDEX[codec.id](payload.tobytes(), d, indices.size)) == indices.tolist()


@pytest.mark.parametrize("name", inputs())
def test_reference_implementations(name):
    indices, d = inputs()[name]

    def encoded(codec):
        return registry.lookup("index", codec)().encode(indices, d)[0].tobytes()

    assert encoded("elias_fano") == reference_index.elias_fano(indices, d)
    assert encoded("huffman") == reference_index.huffman(indices)
    assert encoded("varint") == reference_index.varint(indices)
    rle = encoded("rle")
    assert rle == reference_index.rle(indices, list(rle[:2]))


def encode_inside(fence, text):
    """Every array that the codec makes ends at a forbidden page, and so do those that it is given."""
    codec = spec.parse_stage("index", text)
    kept = np.empty, np.zeros
    good = True
    for indices, d in [*codec_conformance.supports().values(), *inputs().values()]:
        if not fits(text, d) or indices.size > 3000:
            continue
        scratch._thread.arrays.clear()
        given, chosen = fence(indices), codec.choose(indices, d)
        np.empty = lambda size, dtype=float: fence(kept[1](size, dtype))
        np.zeros = np.empty
        payload, _ = chosen.encode(given, d)
        np.empty, np.zeros = kept
        fenced, out = fence(payload), fence(kept[1](indices.size, np.uint32))
        type(chosen).decode(fenced, d, out)
        good &= np.array_equal(out, indices)
        for bad in codec_conformance.mutations(payload, count=6):
            codec_conformance.refused_or(
                lambda bytes_, into, c=chosen, d=d: type(c).decode(bytes_, d, into), fence(bad), out
            )
    return good


@pytest.mark.parametrize("text", VARIANTS)
def test_stays_inside_its_arrays(text):
    assert encode_inside(np.copy, text)  # which also compiles what the child needs
    assert survives(encode_inside, text)


# Elias-Fano's random access


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


# Runs


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


# Adaptive Rice


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


# Huffman


@pytest.mark.parametrize(
    "counts",
    [
        [1],
        [0, 5],
        [1, 1],
        [1, 2, 4, 8],
        [1 << i for i in range(30)],
        [3] * 120,
        [10**8, *range(119)],
        [i * i for i in range(120)],
    ],
)
def test_code_lengths(counts):
    """As the slow reference implementation's, in every context; the sizes add up."""
    rows = np.zeros((8, 128), np.int64)
    rows[:, : len(counts)] = counts
    rows[3] = 0  # a context that does not occur
    lengths = np.full((8, 128), 77, np.uint8)
    kept = rows.copy()
    plan_gap_codes(rows.reshape(-1), lengths.reshape(-1))
    expected = reference_index.package_merge([*counts, *[0] * (128 - len(counts))], 10)
    assert np.array_equal(rows, kept)
    assert lengths[0].tolist() == expected
    if (lengths[1] != 77).any():  # a code for each context was shorter
        assert lengths[7].tolist() == expected and not lengths[3].any()


@pytest.mark.parametrize("d", [1, 2, 255, 256, 257, 300, 65535, 65536, 65537, 70_000, 2**24 + 5, HUGE])
def test_bytes_under_a_code_of_all_positions(d):
    """The closed form of the second decoder is the true count where one can count; then both must agree on the code."""
    if d <= 70_000:
        counts = np.bincount(np.arange(d, dtype="<u4").view(np.uint8), minlength=256)
        assert counts.tolist() == index_decoder.byte_counts(d)
    for k in {1, 2, 3, 4, 5, 7, min(d, 1000)} - set(range(d + 1, 9)):
        indices = np.unique(np.linspace(0, d - 1, k).astype(np.uint32))
        payload, _ = Huffman("bytes").encode(indices, d)
        assert payload.size == Huffman("bytes").size(indices, d)
        assert index_decoder.huffman(payload.tobytes(), d, indices.size) == indices.tolist()
        out = np.empty(indices.size, np.uint32)
        Huffman.decode(payload, d, out)
        assert np.array_equal(out, indices)


def test_bytes_that_are_not_ascending_are_refused():
    code = {
        symbol: bits
        for bits, symbol in index_decoder.canonical(index_decoder.package_merge(index_decoder.byte_counts(300), 12)).items()
    }
    for positions, good in (((1, 2, 299), True), ((1, 2, 2), False), ((2, 1, 3), False), ((1, 2, 300), False)):
        streams = [
            reference_kernels.to_bytes([bit for byte in position.to_bytes(4, "little") for bit in code[byte]])
            for position in positions
        ]
        head = bytes(1) + b"".join(len(stream).to_bytes(4, "little") for stream in streams)
        out = np.empty(3, np.uint32)
        section = np.frombuffer(head + b"".join(streams), np.uint8)
        assert codec_conformance.refused_or(lambda bytes_, into: Huffman.decode(bytes_, 300, into), section, out) == good


def test_huffman_refuses_another_scheme():
    with pytest.raises(ConfigError, match="allowed: gaps, bytes"):
        Huffman("words")


def test_huffman_uses_contexts_where_they_help():
    rng = np.random.default_rng(0)
    clustered = np.cumsum(1 + rng.geometric(2.0 ** -np.repeat(rng.integers(1, 12, 400), 50))).astype(np.uint32)
    first = {
        name: registry.lookup("index", "huffman")().encode(indices, HUGE)[0][0]
        for name, indices in (("clustered", clustered), ("random", ascending(10**7, 20_000)))
    }
    assert first == {"clustered": 8, "random": 1}


def test_rle_of_whole_rows_costs_next_to_nothing():
    indices, d = inputs()["rows of an embedding"]
    assert registry.lookup("index", "rle")().size(indices, d) < 100 < indices.size / 25


# auto


def fixed(d):
    return [registry.lookup("index", name)() for name in FIXED if fits(name, d)]


@pytest.mark.parametrize("name", inputs())
def test_statistics_and_bounds(name):
    """What auto goes by: the size from the statistics is the size, and no bound is above it."""
    indices, d = inputs()[name]
    gaps = GapCounts(indices, d)
    assert gaps.counts.reshape(8, -1).tolist() == reference_index.class_counts(indices)
    for codec in fixed(d):
        size = codec.encode(indices, d)[0].size
        assert codec.size_from_gaps(gaps) == codec.size(indices, d) == size >= codec.size_lower_bound(gaps), codec.name


@pytest.mark.parametrize("name", [*inputs(), *codec_conformance.supports()])
def test_auto_takes_about_the_shortest_without_encoding(name, monkeypatch):
    indices, d = {**inputs(), **codec_conformance.supports()}[name]
    sizes = {codec.name: codec.encode(indices, d)[0].size for codec in fixed(d)}
    for text in FIXED:
        monkeypatch.setattr(registry.lookup("index", text), "encode", None)
    chosen = registry.lookup("index", "auto")().choose(indices, d)
    assert sizes[chosen.name] <= min(sizes.values()) * 1.005
    assert sizes[chosen.name] == min(sizes.values()) or min(sizes, key=sizes.get) == "huffman"


def test_auto_leaves_huffman_where_it_saves_next_to_nothing():
    """At random positions Rice is as short within half a percent, and three times as fast; where they cluster it is not."""
    names = [
        registry.lookup("index", "auto")().choose(indices, d).name
        for indices, d in ((ascending(10**6, 100_000), 10**6), inputs()["scales that vary"])
    ]
    assert names == ["rice", "huffman"]


def test_bounds_spare_the_sizes_of_codecs_that_cannot_win(monkeypatch):
    indices = ascending(10**6, 10_000)
    monkeypatch.setattr(registry.lookup("index", "rle"), "size", None)
    assert registry.lookup("index", "auto")().choose(indices, 10**6).name in ("rice", "huffman")


@pytest.mark.parametrize("density", [0.0001, 0.001, 0.01, 0.1, 0.3, 0.5])
def test_auto_is_within_2_percent_of_the_bound_on_random_positions(density):
    d = 4_000_000
    indices = ascending(d, round(density * d))
    k = indices.size
    bound = (math.lgamma(d + 1) - math.lgamma(k + 1) - math.lgamma(d - k + 1)) / math.log(2)
    assert 8 * registry.lookup("index", "auto")().encode(indices, d)[0].size <= 1.02 * bound


def test_auto_on_clustered_positions():
    """Far below the bound for random positions, which real gradients are not."""
    for name, share in (
        ("rows of an embedding", 0.04),
        ("rows with holes", 0.4),
        ("blocks of channels", 0.2),
        ("two densities", 0.9),
        ("scales that vary", 0.75),
    ):
        indices, d = inputs()[name]
        k = indices.size
        bound = (math.lgamma(d + 1) - math.lgamma(k + 1) - math.lgamma(d - k + 1)) / math.log(2)
        assert 8 * registry.lookup("index", "auto")().encode(indices, d)[0].size <= share * bound, name


def test_the_choice_is_shown():
    rows = np.zeros(96 * 2000, np.float32)
    rows[inputs()["rows of an embedding"][0]] = 1
    cases = (
        (rows, "topk:1.0", "rle"),
        (gauss(20_000), "topk:0.01/bitmap", "raw"),
        (gauss(20_000), "topk:0.1/elias_fano", "elias_fano"),
        (gauss(100), "dense", None),
        (np.full(100, np.nan, np.float32), "topk", None),
    )
    for gradient, spec_, expected in cases:
        assert grace_ext.compressor(spec_).encode(gradient, codec_conformance.STREAM).index_codec == expected
