"""qsgd on average. Seeds are fixed; each bound says with what probability other seeds would break it."""

import math

import numpy as np
import pytest
from support.arrays import gauss
from support.codec_conformance import decode

from grace_ext._util.rng import Stream
from grace_ext.pipeline import spec
from grace_ext.value.qsgd import QSGD

STEPS = 300


K = 2048


def level_width(values, codec):
    """The distance between two levels, for each value."""
    buckets = values.astype(np.float64).reshape(-1, codec.bucket)
    norms = abs(buckets).max(1) if codec.norm == "max" else np.linalg.norm(buckets, axis=1)
    return np.repeat(norms, codec.bucket) / (codec.levels or 2 ** (codec.bits - 1) - 1)


SAMPLED = [
    "qsgd:2",
    "qsgd:4:bucket=64",
    "qsgd:7",
    "qsgd:8:bucket=2048",
    "qsgd:levels=5:entropy=ans",
    "qsgd:levels=1:bucket=8:norm=l2",
    "qsgd:4:norm=l2",
    "qsgd:8:norm=l2:entropy=huffman",
    "qsgd:levels=100:bucket=64:norm=l2:entropy=ans",
    "qsgd:levels=300:norm=l2",
]


@pytest.fixture(scope="module", params=SAMPLED)
def sample(request):
    """(values, width of a level, STEPS decoded versions) of one QSGD setting."""
    values, codec = gauss(K, 11), spec.parse_stage("value", request.param)
    decoded = np.stack([decode(codec, values, Stream(0, "w", step, 0)) for step in range(STEPS)])
    return values, level_width(values, codec), decoded


def test_qsgd_is_unbiased_at_every_value(sample):
    """Hoeffding: a value stays within one level, so its mean is off by more with probability 1e-9 / K at most."""
    values, width, decoded = sample
    bound = width * math.sqrt(math.log(2 * K / 1e-9) / (2 * STEPS))
    assert (abs(decoded.mean(0) - values) <= bound + 1e-6 * abs(values)).all()


def test_qsgd_is_unbiased_over_all(sample):
    """Hoeffding over STEPS * K independent errors, in units of a level: off by more with probability 1e-9 at most."""
    values, width, decoded = sample
    error = ((decoded - values) / width).mean()
    assert abs(error) <= math.sqrt(math.log(2 / 1e-9) / (2 * STEPS * K)) + 1e-5


def test_qsgd_has_the_variance_of_stochastic_rounding(sample):
    """width**2 p (1 - p), p the distance to the level below. The total is off by 5 % with probability < 1e-9."""
    values, width, decoded = sample
    p = np.modf(abs(values) / width)[0]
    expected = (width**2 * p * (1 - p)).sum()
    found = ((decoded - values) ** 2).sum(1).mean()
    assert abs(found / expected - 1) < 0.05


BOUNDED = [(2 ** (bits - 1) - 1, norm) for bits in range(2, 9) for norm in ("max", "l2")] + [(5, "l2"), (100, "l2")]


@pytest.mark.parametrize("n", [8, 512, 4096])
@pytest.mark.parametrize("s, norm", BOUNDED)
def test_qsgd_is_within_the_published_bound(s, norm, n):
    """Alistarh et al., Lemma 3.1: E |Q(v) - v|^2 <= min(n / s^2, sqrt(n) / s) |v|^2 in a bucket of n.

    The found mean is one of 50 steps. Bernstein: its error is beyond the margin with probability 1e-9 at most, as each
    of the 50 n squared errors is independent, at most width**2, and their expected sum is that of the bound or less.
    """
    for values in (
        gauss(n, n),
        np.sign(gauss(n, n)) * np.float32(0.3),
        np.eye(1, n, dtype=np.float32)[0],
        (gauss(n) ** 5).astype(np.float32),
    ):
        codec = QSGD(bucket=n, levels=s, norm=norm)
        errors = [decode(codec, values, Stream(1, "w", step, 0)) - values for step in range(50)]
        bound = min(n / s**2, math.sqrt(n) / s) * (values.astype(np.float64) ** 2).sum()
        square = level_width(values, codec)[0] ** 2
        log = math.log(1e9)
        margin = (square * log / 3 + math.sqrt((square * log / 3) ** 2 + 2 * log * square * 50 * bound)) / 50
        found = np.mean([error @ error for error in errors])
        assert found <= bound + margin
        assert norm == "l2" or found <= bound, "the largest magnitude is far below the 2-norm"


def rounded_up(values, codec, stream):
    """Which of the values, all between two levels, went to the upper one."""
    return decode(codec, values, stream) > values


def test_streams_look_independent():
    """For two of these streams, or one shifted: |correlation| < 6 sigma (probability 2e-9 each, about 900 pairs)."""
    k, codec = 16384, QSGD(2, 32768)
    values = np.full(k, 0.5, np.float32)
    values[-1] = 1
    keys = [
        Stream(),
        *(Stream(seed=i) for i in (1, 2, -1)),
        *(Stream(step=i) for i in (1, 2, 1000)),
        *(Stream(rank=i) for i in (1, 2, 63)),
        *(Stream(name=n) for n in ("a", "b", "conv1.weight")),
        Stream(step=1, rank=1),
        Stream(seed=1, step=1),
    ]
    bits = np.stack([rounded_up(values, codec, key)[:-1] for key in keys]).astype(np.float64) * 2 - 1
    limit = 6 / math.sqrt(k)
    assert abs(bits.mean(1)).max() < limit, "up and down are not equally likely"
    across = bits @ bits.T / (k - 1)
    assert abs(across - np.eye(len(keys))).max() < limit
    for row in bits:
        for lag in [*range(1, 33), 64, 128, 256, 512, 1024, 4096]:
            assert abs(row[lag:] @ row[:-lag]) / (k - lag) < 6 / math.sqrt(k - lag), f"lag {lag}"


def test_places_of_equal_values_in_different_buckets_differ():
    values = np.tile(gauss(512), 4)
    parts = decode(QSGD(4, 512), values, Stream()).reshape(4, 512)
    assert all((parts[i] != parts[j]).mean() > 0.1 for i in range(4) for j in range(i))


@pytest.mark.parametrize("bits", [2, 7, 8])
def test_zeros_stay_zeros(bits):
    """Trap: in float32 a level plus a number just below 1 rounds up, and one zero in 250,000 became the lowest level."""
    values = np.zeros(2_000_000, np.float32)
    values[::512] = 1
    decoded = np.empty_like(values)
    codec = QSGD(bits)
    codec.decode(codec.encode(values, Stream())[0], decoded)
    np.testing.assert_array_equal(decoded, values)
