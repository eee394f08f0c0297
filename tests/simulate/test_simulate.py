"""The simulator: traces against a slow integral, Algorithm 3 against itself in plain numpy, and its command."""

import argparse
import csv
import dataclasses

import numpy as np
import pytest

from grace_ext import ConfigError
from grace_ext.cli import main
from grace_ext.simulate import EF21, FashionMnist, Kimad, KimadPlus, Quadratic, Setting, Trace, simulate, traces
from grace_ext.simulate.command import add_arguments, compare, equal_bytes, setting_of

pytestmark = pytest.mark.tier("test")

FAST = traces.constant(1e12)


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


class Plain:
    """Algorithm 3 with top-k of exact values, in numpy: model, estimates of the model and of each worker's update."""

    def __init__(self, task, workers, rate, up, down):
        self.task, self.rate, self.up, self.down = task, rate, up, down
        self.model, self.told = task.start.copy(), task.start.copy()
        self.estimates = [np.zeros_like(task.start) for _ in range(workers)]

    def _close(self, vector, estimate, density):
        for part in np.split(np.arange(vector.size), np.cumsum(self.task.layers)[:-1]):
            difference = vector[part] - estimate[part]
            largest = np.argsort(-np.abs(difference), kind="stable")[: max(1, round(density * part.size))]
            estimate[part[largest]] += difference[largest]

    def step(self, step):
        self._close(self.model, self.told, self.down)
        for worker, estimate in enumerate(self.estimates):
            self._close(self.task.gradient(self.told, worker, step)[0], estimate, self.up)
        self.model -= self.rate * np.mean(self.estimates, axis=0)


def test_it_is_algorithm_3():
    task = Quadratic(300, 3)
    setting = Setting([FAST] * 2, [FAST] * 2, compute=0.0, steps=25, rate=0.4, compression="topk:0.1/raw/raw")
    losses = [record.loss for record in simulate(task, EF21(0.1, 0.2), setting)]
    plain, expected = Plain(task, 2, 0.4, 0.1, 0.2), []
    for step in range(25):
        before = plain.told.copy()
        plain.step(step)
        assert step == 0 or not np.array_equal(before, plain.told)
        expected.append(task.gradient(plain.told, 0, step)[1])
    np.testing.assert_allclose(losses, expected, rtol=1e-3)
    assert losses[-1] < 0.5 * losses[0]


def links(workers, low=3e4, high=33e4, period=3.0):
    base = traces.sinusoid(low, high, period)
    return [base.shifted(period * worker / workers) for worker in range(workers)]


@pytest.fixture(scope="module")
def slow():
    """Eight thousand elements over links of 30 to 330 kB/s."""
    return Quadratic(8000, 4), Setting(links(4), links(4)[::-1], compute=0.02, steps=120, rate=0.1)


@pytest.fixture(scope="module")
def found(slow):
    return compare(*slow, ("ef21", "kimad", "kimad+"), 0.05)


def mean(records, name):
    return np.mean([getattr(record, name) for record in records])


def test_a_steps_time_is_what_its_transfers_take(slow):
    task, setting = slow
    setting = dataclasses.replace(
        setting, up=[traces.constant(1e5), traces.constant(2e5)], down=[traces.constant(4e5), traces.constant(1e6)], steps=5
    )
    now = 0.0
    for record in simulate(task, EF21(0.05, 0.05), setting):
        assert record.start == pytest.approx(now)
        slowest = record.down / 4e5 + 0.02 + record.sent / 1e5
        assert record.seconds == pytest.approx(slowest) and record.bandwidth == 1e5
        now += record.seconds


def test_kimad_keeps_the_time_and_a_fixed_density_does_not(found):
    kimad, fixed = found["Kimad"], found["EF21"]
    assert mean(kimad, "seconds") == pytest.approx(0.05, rel=0.12)
    assert mean(fixed, "up") == pytest.approx(mean(kimad, "up"), rel=0.15)
    assert mean(kimad, "seconds") < 0.8 * mean(fixed, "seconds")
    assert np.std([one.seconds for one in kimad]) < 0.5 * np.std([one.seconds for one in fixed])
    assert np.corrcoef([one.bandwidth for one in kimad], [one.sent for one in kimad])[0, 1] > 0.9
    for records in found.values():
        assert records[-1].loss < 0.3 * records[0].loss


def test_kimad_plus_has_a_smaller_error_from_as_many_bytes(found):
    assert mean(found["Kimad+"], "up") <= 1.03 * mean(found["Kimad"], "up")
    assert mean(found["Kimad+"], "error") < 0.85 * mean(found["Kimad"], "error")


def test_who_knows_the_bandwidth_is_closer_to_the_time(slow):
    task, setting = slow
    known = simulate(task, Kimad(0.05), dataclasses.replace(setting, measured=False))
    assert mean(known, "seconds") == pytest.approx(0.05, rel=0.08)


def test_equal_bytes(slow):
    task, setting = slow
    policy = equal_bytes(task, setting, 2000.0, 3000.0)
    records = simulate(task, policy, setting)
    assert mean(records, "up") == pytest.approx(2000, rel=0.15) and mean(records, "down") == pytest.approx(3000, rel=0.15)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: EF21(0.0, 0.1), "density=0.0; allowed"),
        (lambda: Kimad(0.0), "seconds=0.0; allowed"),
        (lambda: KimadPlus(float("nan")), "seconds=nan; allowed"),
        (lambda: Quadratic(3, 4), "4 layers of 3"),
        (lambda: Setting([FAST], [], 0.1, 1, 0.1), "1 traces up, 0 down"),
        (lambda: Setting([FAST], [FAST], 0.1, 0, 0.1), "steps=0; allowed"),
        (lambda: Setting([FAST], [FAST], float("nan"), 1, 0.1), "compute=nan; allowed"),
        (lambda: FashionMnist("/nowhere"), "there is no /nowhere"),
        (
            lambda: simulate(Quadratic(), EF21(1, 1), Setting([FAST], [FAST], 0, 1, 0.1, compression="dense/raw")),
            "no density",
        ),
    ],
)
def test_mistakes(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_the_first_workers_links_do_not_depend_on_how_many_there_are():
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    arguments = parser.parse_args(["--noise", "0.2", "--phases"])
    two, four = setting_of(2, arguments), setting_of(4, arguments)
    assert [trace.rate(0.3) for trace in four.up[:2]] == [trace.rate(0.3) for trace in two.up]
    assert len({trace.rate(0.3) for trace in four.up + four.down}) == 8


COMMAND = [
    "simulate",
    "--workers",
    "1",
    "2",
    "--steps",
    "12",
    "--time",
    "20ms",
    "--compute",
    "5ms",
    "--noise",
    "0.2",
    "--up",
    "sinusoid:300kbit:3300kbit:500ms",
]


def test_the_command_writes_the_same_table_file_and_plot_each_time(tmp_path, capsys):
    texts, files = [], []
    for number in range(2):
        path = tmp_path / f"{number}.csv"
        assert main([*COMMAND, "--csv", str(path), "--plot", str(tmp_path / "plot.png")]) == 0
        texts.append(capsys.readouterr().out)
        files.append(path.read_bytes())
    assert texts[0] == texts[1] and files[0] == files[1]
    assert [line.split()[:2] for line in texts[0].splitlines()[1:]] == [
        [str(workers), label] for workers in (1, 2) for label in ("Kimad", "Kimad+", "EF21")
    ]
    rows = list(csv.DictReader(files[0].decode().splitlines()))
    assert len(rows) == 2 * 3 * 12 and float(rows[0]["seconds"]) > 0.005
    assert (tmp_path / "plot.png").stat().st_size > 1000


@pytest.mark.parametrize("more", [[], ["--density", "0.1"]])
def test_what_is_compared_is_what_was_asked_for(more, capsys):
    assert main([*COMMAND, "--policies", "ef21", *more]) == 0
    out, err = capsys.readouterr()
    assert [line.split()[:2] for line in out.splitlines()[1:]] == [["1", "EF21"], ["2", "EF21"]]
    assert [line for line in err.splitlines() if line.startswith("[12/12]")] == err.splitlines()[11::12]


@pytest.mark.parametrize(
    "more, message",
    [
        (["--task", "cnn"], "needs --data"),
        (["--up", "nothing"], "allowed: constant"),
        (["--csv", "/nowhere/a.csv"], "no folder"),
        (["--noise", "-1"], "noise=-1.0; allowed"),
        (["--compression", "dense/raw"], "no density"),
    ],
)
def test_arguments_that_cannot_work(more, message, capsys):
    assert main([*COMMAND, *more]) == 2
    assert message in capsys.readouterr().err
