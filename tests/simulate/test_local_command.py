"""The command for local steps: its table, its file, and arguments that cannot work."""

import argparse
import csv

import pytest

from grace_ext import ConfigError
from grace_ext.policy.cost_model import Codec
from grace_ext.simulate import local_command

CODEC = Codec(lambda elements, summed: elements / 100, lambda elements: 0.0, lambda elements, containers: 0.0)
FLOAT32 = Codec(lambda elements, summed: 4 * elements, lambda elements: 0.0, lambda elements, containers: 0.0)


def run(*given):
    parser = argparse.ArgumentParser()
    local_command.add_arguments(parser)
    arguments = parser.parse_args(["--params", "10M", "--compute", "100ms", "--total", "60", *given])
    return local_command.run(arguments, lambda spec: FLOAT32 if spec == "dense/raw" else CODEC)


def test_it_compares_methods_for_each_number_of_workers(tmp_path, capsys):
    run("--workers", "4", "64", "--latency", "1ms", "--csv", str(tmp_path / "exchanges.csv"))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 2 * 4 and lines[0].split()[:2] == ["workers", "method"]
    hours = {(line.split()[0], line.split()[1]): float(line.split()[-3]) for line in lines[1:]}
    assert hours["4", "every"] >= hours["4", "sparseloco"]
    assert "allreduce" in lines[1] and "allgather" in lines[-2] and "sharded" in lines[-1] and lines[1].split()[-6] == "1"
    with open(tmp_path / "exchanges.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    of_preset = [row for row in rows if (row["workers"], row["method"]) == ("64", "sparseloco")]
    assert [row["step"] for row in of_preset] == ["30", "60", "60"]  # the last one has headers only
    assert float(of_preset[0]["sent"]) > 1000 * float(of_preset[2]["sent"]) / 64
    run("--workers", "4", "64", "--latency", "1ms")
    assert capsys.readouterr().out.splitlines() == lines


def test_a_preset_whose_mean_needs_each_worker_goes_by_allgather_unless_a_communicator_is_given(capsys):
    run("--workers", "64", "--methods", "sparseloco")
    assert "allgather" in capsys.readouterr().out
    run("--workers", "64", "--methods", "sparseloco", "--communicator", "sharded")
    assert "sharded" in capsys.readouterr().out


def test_links_of_workers_can_differ(capsys):
    options = ["--methods", "sparseloco", "--link", "step:10mbit:100mbit:4s"]
    found = []
    for more in ([], ["--phases"], ["--noise", "0.5"], ["--spread", "0.5"], ["--fragments", "3", "--delay", "5"]):
        run(*options, *more)
        found.append(capsys.readouterr().out)
    assert len(set(found)) == 5


def test_arguments_that_cannot_work(tmp_path):
    with pytest.raises(ConfigError, match="preset 'fedavg' has no usual number of steps: give --steps"):
        run("--methods", "fedavg")
    with pytest.raises(ConfigError, match="there is no folder"):
        run("--csv", str(tmp_path / "none" / "file.csv"))
    with pytest.raises(ConfigError, match="delay=40"):
        run("--methods", "sparseloco", "--delay", "40")
    with pytest.raises(ConfigError, match="trace 'wire'; allowed"):
        run("--link", "wire")
    with pytest.raises(ConfigError, match="no cost model of communicator 'majority'"):
        run("--communicator", "majority")


def test_sizes_are_those_of_the_real_codecs():
    """Of SparseLoCo: 64 of each 4,096 elements at 8 to 9.5 bits."""
    from grace_ext.policy.advisor import measure_codec
    from grace_ext.rounds.presets import PRESETS

    codec = measure_codec(PRESETS["sparseloco"].compression, 2**18)
    assert 8.0 / 8 < codec.size(10**9, 1) / (10**9 / 64) < 9.5 / 8
