"""The bench: what it measures, prints and writes, that codecs added later are in it, and what it refuses."""

import datetime
import importlib.util
import io
import json
import sys

import numpy as np
import pytest

import grace_ext
from grace_ext import bench, cli, registry
from grace_ext.bench import end_to_end, parts, peers
from grace_ext.bench.subject import Subject
from grace_ext.bench.variants import variants
from grace_ext.index.base import IndexCodec
from grace_ext.index.raw import RawIndex
from grace_ext.pipeline import container
from grace_ext.pipeline.presets import PRESETS
from grace_ext.value.base import ValueCodec

pytestmark = pytest.mark.tier("test")


class Pairs(IndexCodec):
    """Rebuilds whole pairs of positions."""

    name, id, lossless = "test_pairs", 250, False
    sweep = {"flavour": ("plain", "spicy")}

    def __init__(self, flavour: str = "plain"):
        self.flavour = flavour

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
def files(tmp_path_factory, gradient):
    """What one small run printed and wrote, with the codecs of this file among all others."""
    folder = tmp_path_factory.mktemp("bench")
    saved = folder / "saved.npy"
    np.save(saved, gradient)
    argv = [
        "bench",
        "--quick",
        "--size",
        "20k",
        "--density",
        "0.1",
        "0.01",
        "--repetitions",
        "1",
        "--ranks",
        "3",
        "--spec",
        "topk:0.01/rice/qsgd:7",
        "topk:0.01/test_pairs/test_sorted",
        "dense/fp16",
        "--input",
        "heavy",
        str(saved),
        "--json",
        f"{folder}/figures.json",
        "--markdown",
        f"{folder}/codecs.md",
    ]
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
    one, other = figures["runs"]
    assert one["gradient"] == "heavy, 20,000 elements" and other["gradient"] == "saved.npy, 2,000 elements"
    assert one["d"] == 20_000 and other["d"] == 2000
    assert 0 < one["memcpy_seconds"]["minimum"] <= one["memcpy_seconds"]["median"]


def is_time(row) -> bool:
    return row["repetitions"] >= 1 and all(
        0 < row[unit][which] for unit in ("seconds", "memcpy") for which in ("median", "minimum")
    )


def test_bench_measures_every_index_codec(figures):
    rows = {(row["density"], row["stage"]): row for row in figures["runs"][0]["index"] if not row["peer"]}
    swept = [
        (density, str(codec)) for density in (0.01, 0.1) for codec in variants("index", density == 0.1) if codec.universal
    ]
    assert sorted(rows) == sorted(swept)
    assert (0.1, "test_pairs:spicy") in rows and (0.01, "test_pairs:spicy") not in rows
    for (density, _), row in rows.items():
        assert row["k"] == 20_000 * density and row["bound"] == pytest.approx(bench.index_bound(20_000, row["k"]))
        assert is_time(row["encode"]) and is_time(row["decode"]) and row["encode"]["per_second"] > 0
    assert rows[0.01, "raw"]["bits"] == 32 and rows[0.01, "bitmap"]["bits"] == 100
    assert rows[0.01, "rice"]["bits"] == pytest.approx(rows[0.01, "rice"]["bound"], rel=0.05)
    pairs = rows[0.01, "test_pairs"]
    assert pairs["support"] > pairs["k"] and pairs["kept"] == 1
    assert pairs["fpr"] == pytest.approx((pairs["support"] - pairs["k"]) / (20_000 - pairs["k"]))
    assert rows[0.01, "rice"]["kept"] is None and rows[0.01, "rice"]["fpr"] is None
    assert rows[0.01, "auto"]["chosen"] in registry.names("index")


def test_bench_measures_every_value_codec(figures):
    rows = {(row["values"], row["stage"]): row for row in figures["runs"][0]["value"] if not row["peer"]}
    assert {row["name"] for row in rows.values()} == set(registry.names("value"))
    assert all(is_time(row["encode"]) and is_time(row["decode"]) for row in rows.values())
    assert all(row["error"] == 0 for row in rows.values() if row["lossless"])
    assert rows["top 0.1", "test_sorted:plain"]["bits"] == 32 + 11  # 2,000 values: 11 bits of order each
    assert rows["dense", "raw"]["k"] == 20_000 and rows["dense", "raw"]["bits"] == 32
    swept = [stage for (values, stage), row in rows.items() if values == "dense" and row["curve"] == "qsgd"]
    assert swept == [f"qsgd:{bits}" for bits in range(2, 9)]
    errors = [rows["dense", stage]["error"] for stage in swept]
    assert errors == sorted(errors, reverse=True)
    for stage in swept:
        coded = rows["dense", f"{stage}:entropy=ans"]
        assert coded["curve"] == "qsgd:entropy=ans" and coded["error"] == rows["dense", stage]["error"]


def test_bench_measures_selection_beside_others(figures):
    rows = {(row["density"], row["name"], row["form"]): row for row in figures["runs"][0]["selection"]}
    assert all(map(is_time, rows.values()))
    for density in (0.01, 0.1):
        assert {(density, "topk", "plain"), (density, "topk", "fused")} <= set(rows)
        assert rows[density, "topk", "plain"]["selected"] == 20_000 * density
        names = {name for at, name, _ in rows if at == density}
        assert "np.argpartition" in names and ("torch.topk" in names) == bool(importlib.util.find_spec("torch"))


def test_bench_measures_compressors_end_to_end(figures):
    rows = {row["spec"]: row for row in figures["runs"][0]["end_to_end"]}
    assert list(rows) == ["topk:0.01/rice/qsgd:7", "topk:0.01/test_pairs/test_sorted", "dense/fp16"]
    assert all(is_time(row["compress"]) and is_time(row["decode"]) and row["ranks"] == 3 for row in rows.values())
    assert (
        rows["dense/fp16"]["bytes"]
        == container.parse(grace_ext.compressor("dense/fp16").compress(np.ones(20_000, np.float32))).nbytes
    )
    assert set(rows["dense/fp16"]["stages"]) == {"select", "index", "value", "container", "residual"}


def test_bench_reports_volume_and_error_of_compressors(figures):
    rows = {row["spec"]: row for row in figures["runs"][0]["end_to_end"]}
    for row in rows.values():
        assert row["volume"] * row["ratio"] == pytest.approx(1) and row["volume"] == row["bytes"] / 80_000
    assert rows["topk:0.01/test_pairs/test_sorted"]["value_error"] == 0
    assert 0 < rows["dense/fp16"]["value_error"] < 1e-3 < rows["topk:0.01/rice/qsgd:7"]["value_error"] < 0.1


def test_bench_measures_presets_unless_specs_are_given(figures):
    assert figures["runs"][0]["preset"] == []
    made = bench.plan().presets
    assert list(made) == list(PRESETS)
    assert all(str(one) == str(grace_ext.compressor(PRESETS[name])) for name, one in made.items())
    subject = Subject(np.random.default_rng(2).standard_normal(3000, np.float32), 1, False)
    (row,) = end_to_end.preset(subject, "dr-qsgd", made["dr-qsgd"])
    assert row["preset"] == "dr-qsgd" and row["ranks"] == 1 and row["spec"] == PRESETS["dr-qsgd"]


def test_bench_measures_transforms(figures):
    rows = {row["stage"]: row for row in figures["runs"][0]["transform"]}
    assert {"dct:64", "dct:64:dims=1"} <= set(rows)
    for row in rows.values():
        assert is_time(row["encode"]) and is_time(row["decode"])
        assert 0 < row["plain"] < 1 and 0 < row["whole"] <= row["chunks"] < 1


def test_what_a_transform_leaves_out_is_what_decoding_lacks():
    smooth = np.repeat(np.random.default_rng(3).standard_normal(20, np.float32), 100)
    (row,) = [row for row in parts.transforms(Subject(smooth, 1, False), 0.1) if row["stage"] == "dct:64:dims=1"]
    decoded = grace_ext.decompress(grace_ext.compressor("dct:64:dims=1/topk:0.1/raw/raw").compress(smooth), size=2000)
    assert row["whole"] == pytest.approx(np.linalg.norm(decoded - smooth) / np.linalg.norm(smooth), rel=0.02)
    assert row["whole"] < row["plain"]


def test_bench_measures_low_rank(figures):
    rows = {row["stage"]: row for row in figures["runs"][0]["lowrank"]}
    assert {"powersgd:1", "powersgd:4"} <= set(rows) and all(map(is_time, rows.values()))
    assert rows["powersgd:4"]["shape"] == [128, 156] and rows["powersgd:4"]["volume"] == 4 * (128 + 156) / (128 * 156)
    assert rows["powersgd:4"]["error"] < rows["powersgd:1"]["error"] < 1


def test_low_rank_of_a_low_rank_gradient_is_exact():
    rng = np.random.default_rng(4)
    gradient = rng.standard_normal((64, 2), np.float32) @ rng.standard_normal((2, 64), np.float32)
    for row in parts.low_rank(Subject(gradient.reshape(-1), 1, True)):
        assert row["shape"] == [64, 64] and (row["error"] < 1e-5) == (row["rank"] == 4), row


def test_bench_prints_and_writes_the_same_tables(files):
    printed, document = ((files / name).read_text() for name in ("stdout", "codecs.md"))
    for title in ("Selection", "Index codecs", "Value codecs", "Transforms", "Low rank", "End to end"):
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


SMALL = ("--quick", "--no-peers", "--repetitions", "1", "--density", "0.05", "--spec", "topk:0.05/auto/fp16")


@pytest.mark.parametrize("name", bench.SYNTHETIC)
def test_bench_on_synthetic_gradients_of_several_sizes(name, capsys):
    assert cli.main(["bench", *SMALL, "--input", name, "--size", "1", "3k"]) == 0
    out, err = capsys.readouterr()
    assert f"=== {name}, 1 elements" in out and f"=== {name}, 3,000 elements" in out
    assert "[12/12]" in err and "argpartition, abs" not in out


@pytest.mark.parametrize("name", ["saved.npy", "saved.npz"])
def test_bench_on_saved_gradients(name, tmp_path, capsys, gradient):
    if name.endswith("npz"):
        np.savez(tmp_path / name, weight=gradient.astype(np.float16), bias=gradient[0].astype(np.float64))
    else:
        np.save(tmp_path / name, np.asfortranarray(gradient))
    assert cli.main(["bench", *SMALL, "--input", str(tmp_path / name)]) == 0
    assert f"=== {name}, {2050 if name.endswith('npz') else 2000:,} elements" in capsys.readouterr().out


@pytest.mark.parametrize(
    "array, message",
    [
        (np.array([1, np.nan], np.float32), "not finite"),
        (np.zeros(5, np.float32), "all zeros"),
        (np.zeros((0, 3), np.float32), "all zeros"),
        (np.arange(5), "int64"),
    ],
)
def test_bench_refuses_gradients_that_are_none(array, message, tmp_path, capsys):
    np.save(tmp_path / "saved.npy", array)
    assert cli.main(["bench", *SMALL, "--input", str(tmp_path / "saved.npy")]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04 not really"])
def test_bench_refuses_other_files(content, tmp_path, capsys):
    (tmp_path / "file").write_bytes(content)
    assert cli.main(["bench", *SMALL, "--input", str(tmp_path / "file")]) == 2
    assert "not a .npy or .npz file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--spec", "topk:0.01/rise/qsgd"], "known: "),
        (["--spec", "topkk"], "unknown sparsifier 'topkk'"),
        (["--density", "0"], "above 0 and at most 1"),
        (["--input", "heavyy"], "heavy, gauss"),
        (["--size", "3G"], "too large"),
        (["--json", "/no/such/folder/x.json"], "there is no folder /no/such/folder"),
        (["--spec", "topk:0.1", "powersgd:4"], "powersgd:4: makes no container"),
    ],
)
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
    assert cli.main(["bench", *[flag for flag in SMALL if flag != "--no-peers"]]) == 0
    out = capsys.readouterr().out
    assert "np.argpartition, abs" in out and "torch.topk, abs" not in out


def test_bench_notices_a_codec_that_loses_its_support(monkeypatch, capsys):
    monkeypatch.setattr(Pairs, "decode", staticmethod(lambda payload, d, out: out.fill(0)))
    assert cli.main(["bench", *SMALL]) == 1
    assert "'test_pairs' does not give its support back" in capsys.readouterr().err


def test_a_mix_of_inputs_takes_the_size_for_the_synthetic_ones(tmp_path, gradient):
    paths = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        paths.append(str(tmp_path / folder / "saved.npy"))
        np.save(paths[-1], gradient)
    plan = bench.plan(input=["gauss", *paths], size=[10, 30])
    assert list(plan.gradients) == [
        "gauss, 10 elements",
        "gauss, 30 elements",
        "saved.npy, 2,000 elements",
        f"{paths[1]}, 2,000 elements",
    ]
    assert [make().size for make in plan.gradients.values()] == [10, 30, 2000, 2000]


# Libraries beside ours


@pytest.mark.parametrize("name", ["zlib", "pyroaring", "pybloomfilter"])
def test_index_peers_give_the_positions_back(name):
    if name != "zlib":
        pytest.importorskip(name)
    for d, k in ((300, 40), (1_000_000, 3000), (5, 5)):
        indices = np.sort(np.random.default_rng(d).choice(d, k, replace=False)).astype(np.uint32)
        (peer,) = [peer for title, peer in peers.index(indices, d, True).items() if title.startswith(name)]
        payload = peer.encode()
        assert payload.dtype == np.uint8 and payload.size
        if name == "pybloomfilter":
            answers = np.array(peer.decode(payload))
            assert answers.sum() >= k * answers.size / d * 0.5  # asked in another order
            assert peer.decode_scale == max(1, d / 100_000) and (peer.fpr is None or 0 <= peer.fpr < 0.05)
        else:
            np.testing.assert_array_equal(peer.decode(payload), indices)
            np.testing.assert_array_equal(peer.positions(payload), indices)


def test_value_peers_give_the_values_back():
    values = np.random.default_rng(5).standard_normal(3000, np.float32)
    found = peers.value(values)
    assert "zlib, level 6" in found
    for title, peer in found.items():
        decoded, exact = peer.decode(peer.encode()), values
        if not peer.lossless:
            levels = int(title.split()[-2])
            assert np.abs(decoded - exact).max() <= np.abs(exact).max() / (levels // 2) * 0.51
        else:
            np.testing.assert_array_equal(decoded, exact)
    assert all(np.isfinite(peer.decode(peer.encode())).all() for peer in peers.value(np.zeros(9, np.float32)).values())


def test_bench_marks_peers(figures, files):
    names = {row["stage"] for row in figures["runs"][0]["index"] if row["peer"]}
    assert any(name.startswith("zlib") for name in names)
    for package, text in (
        ("pyroaring", "pyroaring BitMap (library)"),
        ("constriction", "ANS, 63 levels (library)"),
        ("pybloomfilter", "pybloomfilter, 0.001, naive queries (library)"),
        ("torch", "torch's PowerSGD hook, rank 4"),
    ):
        assert (text in (files / "codecs.md").read_text()) == bool(importlib.util.find_spec(package)), package
