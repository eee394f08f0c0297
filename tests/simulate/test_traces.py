"""Bandwidth over time: transfers against a slow integral, and files that are no traces."""

import numpy as np
import pytest

from grace_ext import ConfigError
from grace_ext.simulate import Trace, traces

pytestmark = pytest.mark.tier("test")


def slow_end(trace, start, nbytes, step=1e-4):
    """By small steps."""
    time = start
    while nbytes > 0:
        nbytes -= trace.rate(time + step / 2) * step
        time += step
    return time


@pytest.mark.parametrize(
    "trace",
    [
        Trace([0.3, 0.2, 0.5], [100.0, 0.0, 40.0]),
        traces.sinusoid(30.0, 330.0, 2.0),
        traces.step(10.0, 50.0, 0.8),
        traces.sinusoid(30.0, 330.0, 2.0).shifted(0.7),
        traces.step(10.0, 50.0, 0.8).noisy(0.5, np.random.default_rng(1)),
    ],
)
@pytest.mark.parametrize("start, nbytes", [(0.0, 3.0), (0.25, 20.0), (1.37, 160.0), (4.0, 500.0)])
def test_a_transfer_ends_when_the_bytes_are_through(trace, start, nbytes):
    end = trace.end(start, nbytes)
    assert trace.sent(end) - trace.sent(start) == pytest.approx(nbytes)
    assert end == pytest.approx(slow_end(trace, start, nbytes), abs=5e-4)
    assert trace.end(start, 0) == start


def test_a_transfer_does_not_wait_for_a_rate_of_0_at_the_end_of_the_trace():
    trace = Trace([1, 1], [1, 0])
    assert [trace.end(0, nbytes) for nbytes in (0.5, 1, 1.5, 2, 3)] == [0.5, 1, 2.5, 3, 5]
    assert trace.end(1.5, 1) == 3 and trace.shifted(0.5).end(0, 0.5) == 0.5


def test_the_sinusoid_is_that_of_the_paper():
    trace = traces.sinusoid(30.0, 330.0, 4.0)
    for time in np.linspace(0, 9, 50):
        assert trace.rate(time) == pytest.approx(300 * np.sin(np.pi / 4 * time) ** 2 + 30, abs=4)
    assert trace.mean == pytest.approx(180) and trace.shifted(2.0).rate(0.0) == pytest.approx(330, abs=1)


def test_noise_keeps_the_mean_and_is_the_links_own():
    trace = traces.constant(100.0)
    one, other = (trace.noisy(0.3, np.random.default_rng(seed)) for seed in (1, 2))
    assert one.mean == pytest.approx(100, rel=0.1)
    assert len({one.rate(t / 16 + 0.01) for t in range(16)}) == 16 and one.rate(0.0) != other.rate(0.0)
    assert trace.noisy(0.0, np.random.default_rng(1)) is trace


def test_a_trace_from_a_file(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("time,Mbit/s\n0,8\n1.5,0\n2,80\n4,1\n")
    trace = traces.parse(f"csv:{path}")
    assert trace.period == 4 and [trace.rate(t) for t in (0, 1.6, 3.9, 4.1)] == [1e6, 0, 1e7, 1e6]


@pytest.mark.parametrize(
    "text, message",
    [
        ("sawtooth:1mbit", "allowed: constant:RATE"),
        ("constant", "allowed"),
        ("constant:0mbit", "allowed"),
        ("sinusoid:1mbit:2mbit", "allowed"),
        ("step:1mbit:2mbit:1s:3", "allowed"),
        ("constant:fast", "allowed"),
    ],
)
def test_traces_that_make_no_sense(text, message):
    with pytest.raises(ConfigError, match=message):
        traces.parse(text)


@pytest.mark.parametrize(
    "rows, message",
    [
        ("0,8\n", "at least 2"),
        ("0,8\n0,9\n", "above 0"),
        ("0,8\n1,x\n", "two numbers"),
        ("0\n1\n", "two numbers"),
        ("0,0\n1,5\n", "not all 0"),
        ("0,nan\n1,5\n", "finite"),
    ],
)
def test_files_that_are_no_traces(tmp_path, rows, message):
    path = tmp_path / "trace.csv"
    path.write_text(rows)
    with pytest.raises(ConfigError, match=message):
        traces.parse(f"csv:{path}")
