"""The bench: what it measures, prints and writes, that codecs added later are in it, and what it refuses."""

import datetime
import importlib.util
import io
import json
import sys

import contract
import numpy as np
import pytest

import grace_ext
from grace_ext import bench, cli, container, registry
from grace_ext.index.base import IndexCodec
from grace_ext.index.raw import RawIndex
from grace_ext.value.base import ValueCodec


class Pairs(IndexCodec):
    """Rebuilds whole pairs of positions."""

    name, id, lossless = "test_pairs", 250, False

    def encode(self, indices, d):
        support = np.union1d(indices, np.minimum(indices ^ 1, d - 1)).astype(np.uint32)
        return support.view(np.uint8), support

    decode = staticmethod(RawIndex.decode)


class Sorted(ValueCodec):
    """Sends the values in descending order."""

    name, id, lossless = "test_sorted", 250, True

    def __init__(self, flavour: str = "plain"):
        self.flavour = flavour

    def encode(self, values, stream):
        order = np.argsort(-values, kind="stable").astype(np.uint32)
        return values[order].view(np.uint8), order

    @staticmethod
    def decode(payload, out):
        out[:] = payload.view(np.float32)


@pytest.fixture(scope="module", autouse=True)
def new_codecs():
    for cls in (Pairs, Sorted):
        registry.register(cls)
    yield
    for cls in (Pairs, Sorted):
        del registry._classes[cls.kind][cls.name]


@pytest.fixture(scope="module")
def gradient():
    return np.random.default_rng(1).standard_normal((40, 50), np.float32)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """What one small run printed and wrote, with the codecs of this file among all others."""
    folder = tmp_path_factory.mktemp("bench")
    argv = ["bench", "--quick", "--size", "20k", "--density", "0.1", "0.01", "--repetitions", "1", "--ranks", "3",
            "--spec", "topk:0.01/rice/qsgd:7", "topk:0.01/test_pairs/test_sorted", "dense/fp16",
            "--json", f"{folder}/figures.json", "--markdown", f"{folder}/codecs.md"]
    if importlib.util.find_spec("matplotlib"):
        argv += ["--plot", f"{folder}/codecs.png"]
    captured = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", captured)
        assert cli.main(argv) == 0
    (folder / "stdout").write_text(captured.getvalue())
    return folder


@pytest.fixture(scope="module")
def figures(files):
    return json.loads((files / "figures.json").read_text())


def test_bench_figures_say_when_where_and_how(figures):
    assert datetime.datetime.fromisoformat(figures["date"]).tzinfo
    machine = figures["machine"]
    assert machine["cpu"] and machine["cores"] >= 1 and isinstance(machine["simd"], list)
    assert {"python", "numpy", "numba"} <= set(figures["versions"])
    assert figures["command"].startswith("python -m grace_ext bench --quick --size 20k")
    assert [part["name"] for part in figures["catalogue"] if part["kind"] == "index"] == registry.names("index")
    (one,) = figures["runs"]
    assert one["d"] == 20_000 and 0 < one["memcpy_seconds"]["minimum"] <= one["memcpy_seconds"]["median"]


def is_time(row) -> bool:
    return row["repetitions"] >= 1 and all(0 < row[unit][which] for unit in ("seconds", "memcpy")
                                           for which in ("median", "minimum"))


def test_bench_measures_every_index_codec(figures):
    rows = {(row["density"], row["name"]): row for row in figures["runs"][0]["index"]}
    assert sorted(rows) == [(density, name) for density in (0.01, 0.1) for name in contract.index_codecs()]
    for (density, _), row in rows.items():
        assert row["k"] == 20_000 * density and row["bound"] == pytest.approx(bench.index_bound(20_000, row["k"]))
        assert is_time(row["encode"]) and is_time(row["decode"]) and row["encode"]["per_second"] > 0
    assert rows[0.01, "raw"]["bits"] == 32 and rows[0.01, "bitmap"]["bits"] == 100
    assert rows[0.01, "rice"]["bits"] == pytest.approx(rows[0.01, "rice"]["bound"], rel=0.05)
    assert rows[0.01, "test_pairs"]["support"] > rows[0.01, "test_pairs"]["k"]
    assert rows[0.01, "auto"]["chosen"] in registry.names("index")


def test_bench_measures_every_value_codec(figures):
    rows = {(row["values"], row["stage"]): row for row in figures["runs"][0]["value"]}
    assert {row["name"] for row in rows.values()} == set(registry.names("value"))
    assert all(is_time(row["encode"]) and is_time(row["decode"]) for row in rows.values())
    assert all(row["error"] == 0 for row in rows.values() if row["lossless"])
    assert rows["top 0.1", "test_sorted:plain"]["bits"] == 32 + 11  # 2,000 values: 11 bits of order each
    assert rows["dense", "raw"]["k"] == 20_000 and rows["dense", "raw"]["bits"] == 32
    swept = [stage for values, stage in rows if values == "dense" and stage.startswith("qsgd")]
    assert swept == [f"qsgd:{bits}" for bits in range(2, 9)]
    errors = [rows["dense", stage]["error"] for stage in swept]
    assert errors == sorted(errors, reverse=True)


def test_bench_measures_selection_beside_others(figures):
    rows = {(row["density"], row["name"], row["form"]): row for row in figures["runs"][0]["selection"]}
    assert all(map(is_time, rows.values()))
    for density in (0.01, 0.1):
        assert {(density, "topk", "plain"), (density, "topk", "fused")} <= set(rows)
        assert rows[density, "topk", "plain"]["selected"] == 20_000 * density
        names = {name for at, name, _ in rows if at == density}
        assert "np.argpartition" in names and ("torch.topk" in names) == bool(importlib.util.find_spec("torch"))


def test_bench_measures_the_whole_road(figures):
    rows = {row["spec"]: row for row in figures["runs"][0]["road"]}
    assert list(rows) == ["topk:0.01/rice/qsgd:7", "topk:0.01/test_pairs/test_sorted", "dense/fp16"]
    assert all(is_time(row["compress"]) and is_time(row["decode"]) and row["ranks"] == 3 for row in rows.values())
    assert rows["dense/fp16"]["bytes"] == container.parse(
        grace_ext.compressor("dense/fp16").compress(np.ones(20_000, np.float32))).nbytes
    assert set(rows["dense/fp16"]["stages"]) == {"select", "index", "value", "container", "residual"}


def test_bench_prints_and_writes_the_same_tables(files):
    printed, document = ((files / name).read_text() for name in ("stdout", "codecs.md"))
    for title in ("Selection", "Index codecs", "Value codecs", "The whole road"):
        assert f"--- {title}" in printed and f"### {title}" in document
    for name in ("test_pairs (rebuilds", "test_sorted:plain", "topk:0.01/rice/qsgd:7"):
        assert name in printed and f"| {name}" in document
    assert "median of 1 repetitions" in printed and "median of 1 repetitions" in document
    assert "python -m grace_ext bench --quick" in document and "Alistarh" in document
    header = [line for line in document.splitlines() if line.startswith("| ")]
    assert all(line.endswith(" |") for line in header)


@pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="matplotlib is not installed")
def test_bench_draws(files):
    assert (files / "codecs.png").read_bytes().startswith(b"\x89PNG")
    assert "](codecs.png)" in (files / "codecs.md").read_text()


SMALL = ("--quick", "--no-rivals", "--repetitions", "1", "--density", "0.05", "--spec", "topk:0.05/auto/fp16")


@pytest.mark.parametrize("name", bench.SYNTHETIC)
def test_bench_on_synthetic_gradients_of_several_sizes(name, capsys):
    assert cli.main(["bench", *SMALL, "--input", name, "--size", "1", "3k"]) == 0
    out, err = capsys.readouterr()
    assert f"=== {name}, 1 elements" in out and f"=== {name}, 3,000 elements" in out
    assert "[8/8]" in err and "argpartition, abs" not in out


@pytest.mark.parametrize("name", ["saved.npy", "saved.npz"])
def test_bench_on_saved_gradients(name, tmp_path, capsys, gradient):
    if name.endswith("npz"):
        np.savez(tmp_path / name, weight=gradient.astype(np.float16), bias=gradient[0].astype(np.float64))
    else:
        np.save(tmp_path / name, np.asfortranarray(gradient))
    assert cli.main(["bench", *SMALL, "--input", str(tmp_path / name)]) == 0
    assert f"=== {name}, {2050 if name.endswith('npz') else 2000:,} elements" in capsys.readouterr().out


@pytest.mark.parametrize("array, message", [
    (np.array([1, np.nan], np.float32), "not finite"),
    (np.zeros(5, np.float32), "all zeros"),
    (np.zeros((0, 3), np.float32), "all zeros"),
    (np.arange(5), "int64"),
])
def test_bench_refuses_gradients_that_are_none(array, message, tmp_path, capsys):
    np.save(tmp_path / "saved.npy", array)
    assert cli.main(["bench", *SMALL, "--input", str(tmp_path / "saved.npy")]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04 not really"])
def test_bench_refuses_other_files(content, tmp_path, capsys):
    (tmp_path / "file").write_bytes(content)
    assert cli.main(["bench", *SMALL, "--input", str(tmp_path / "file")]) == 2
    assert "not a .npy or .npz file" in capsys.readouterr().err


@pytest.mark.parametrize("argv, message", [
    (["--spec", "topk:0.01/rise/qsgd"], "known: "),
    (["--spec", "topkk"], "unknown sparsifier 'topkk'"),
    (["--density", "0"], "above 0 and at most 1"),
    (["--input", "heavyy"], "heavy, gauss"),
    (["--size", "3G"], "too large"),
    (["--json", "/no/such/folder/x.json"], "there is no folder /no/such/folder"),
    (["--spec", "topk:0.1", "powersgd:4"], "powersgd:4: makes no container"),
])
def test_bench_refuses_at_once_what_cannot_work(argv, message, capsys):
    assert cli.main(["bench", *argv]) == 2
    assert message in capsys.readouterr().err


def test_bench_without_size_for_files(tmp_path, capsys, gradient):
    np.save(tmp_path / "saved.npy", gradient)
    assert cli.main(["bench", "--input", str(tmp_path / "saved.npy"), "--size", "5"]) == 2
    assert "--size is for synthetic gradients" in capsys.readouterr().err


def test_bench_without_optional_packages(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main(["bench", "--quick", "--plot", str(tmp_path / "x.png")]) == 2
    assert "--plot needs matplotlib" in capsys.readouterr().err
    assert cli.main(["bench", *[flag for flag in SMALL if flag != "--no-rivals"]]) == 0
    out = capsys.readouterr().out
    assert "np.argpartition, abs" in out and "torch.topk, abs" not in out


def test_bench_notices_a_codec_that_loses_its_support(monkeypatch, capsys):
    monkeypatch.setattr(Pairs, "decode", staticmethod(lambda payload, d, out: out.fill(0)))
    assert cli.main(["bench", *SMALL]) == 1
    assert "'test_pairs' does not give its support back" in capsys.readouterr().err
