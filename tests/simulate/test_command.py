"""The simulator's command: its table, its file, and arguments that cannot work."""

import csv
import dataclasses

import pytest
from support.simulations import mean

from grace_ext.cli import main
from grace_ext.simulate import simulate
from grace_ext.simulate.command import compare, equal_bytes

pytestmark = pytest.mark.tier("test")


@pytest.mark.parametrize("warmup", [0, 20])
def test_equal_bytes(slow, warmup):
    """Without the steps of the warm-up, in which all messages are exact."""
    task, setting = slow
    setting = dataclasses.replace(setting, warmup=warmup)
    policy = equal_bytes(task, setting, 2000.0, 3000.0)
    records = simulate(task, policy, setting)[warmup:]
    assert mean(records, "up") == pytest.approx(2000, rel=0.15) and mean(records, "down") == pytest.approx(3000, rel=0.15)


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


def test_a_fixed_density_is_compared_that_sends_as_many_bytes_after_the_warm_up(slow):
    task, setting = slow
    runs = compare(task, dataclasses.replace(setting, warmup=20), ("ef21", "kimad"), 0.04)
    kimad, ef21 = (mean(runs[label][20:], "up") for label in ("Kimad", "EF21"))
    assert ef21 == pytest.approx(kimad, rel=0.15)
