"""The command line: every command, what it says about bad input, and that new codecs show up by themselves."""

import datetime
import importlib.util
import io
import json
import re
import subprocess
import sys

import numpy as np
import pytest

import grace_ext
from grace_ext import bench, cli, container, registry
from grace_ext.errors import GraceError
from grace_ext.index.base import IndexCodec
from grace_ext.index.raw import RawIndex
from grace_ext.value.base import ValueCodec


class Pairs(IndexCodec):
    """Rebuilds whole pairs of positions.

    More about it.
    """

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


def run(*argv):
    """A real process: status, stdout, stderr."""
    done = subprocess.run([sys.executable, "-m", "grace_ext", *map(str, argv)], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def usage_error(*argv) -> int:
    with pytest.raises(SystemExit) as error:
        cli.main([*argv])
    return error.value.code


# warmup, help, version


def test_warmup_tells_where_the_kernels_are(capsys):
    assert cli.main(["warmup"]) == 0
    out, err = capsys.readouterr()
    assert str(grace_ext.kernels.cache_folder()) in out and re.search(r"\d+ kernels are ready after [\d.]+ s", out)
    total = int(re.match(r"(\d+)", out)[1])
    lines = [line for line in err.splitlines() if line.startswith("[")]
    assert len(lines) == total and lines[-1].startswith(f"[{total}/{total}] ")


def test_progress_is_rewritten_in_place_on_a_terminal(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    progress = cli.Progress()
    progress(1, 2, "one")
    assert "\n" not in terminal.getvalue()
    progress(2, 2, "two")
    assert terminal.getvalue().endswith("[2/2] two\n") and terminal.getvalue().count("\r") == 2


def test_module_runs_and_needs_no_framework():
    assert run("--version") == (0, f"grace_ext {grace_ext.__version__}\n", "")
    code = "import sys, grace_ext.cli; print({'torch', 'tensorflow', 'matplotlib', 'mpi4py'}.isdisjoint(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "True\n"


def test_usage_errors():
    assert usage_error() == 2
    assert usage_error("compress") == 2
    assert usage_error("bench", "--size", "0") == 2
    assert usage_error("bench", "--size", "1.5") == 2
    assert usage_error("bench", "--size", "M") == 2
    assert usage_error("bench", "--ranks", "nan") == 2


@pytest.mark.parametrize("text, count", [("25.6M", 25_600_000), ("25.6e6", 25_600_000), ("17", 17), ("2k", 2000)])
def test_counts(text, count):
    assert cli._count(text) == count


# codecs


def test_codecs_lists_all_that_is_registered(capsys):
    assert cli.main(["codecs"]) == 0
    out = capsys.readouterr().out
    for kind in registry.KINDS:
        assert not registry.names(kind) or f"\n{kind}\n{'=' * len(kind)}\n" in "\n" + out
        for name in registry.names(kind):
            assert re.search(rf"^  {name}\b", out, re.MULTILINE)
    assert "test_pairs  (container id 250, lossy)" in out and "Rebuilds whole pairs of positions." in out
    assert "More about it" not in out
    assert "test_sorted:flavour=plain  (container id 250, lossless)" in out
    assert "qsgd:bits=8:bucket=512  (container id 3, lossy)" in out and "Alistarh et al." in out


def test_codecs_as_json(capsys):
    assert cli.main(["codecs", "--json"]) == 0
    parts = json.loads(capsys.readouterr().out)
    assert [(part["kind"], part["name"]) for part in parts] == [
        (kind, name) for kind in registry.KINDS for name in registry.names(kind)]
    by_name = {(part["kind"], part["name"]): part for part in parts}
    assert by_name["sparsifier", "topk"]["options"] == {"density": 0.01}
    assert by_name["value", "fp16"]["traits"] == ["lossy", "summable as float16"]
    assert by_name["index", "rice"]["id"] == 3 and "1971" in by_name["index", "rice"]["papers"][0]
    assert by_name["value", "deflate"]["papers"] == []  # "RFC 1951" in its first paragraph is no year
    assert by_name["memory", "residual"]["traits"] == ["keeps state"]
    assert "test_sorted" not in [part["name"] for part in parts if part["kind"] != "value"]


def test_a_closed_pipe_is_no_error():
    command = f"'{sys.executable}' -m grace_ext codecs | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.stdout == "sparsifier\n" and done.stderr == ""


# inspect


def test_inspect_shows_header_and_sections(tmp_path, capsys, gradient):
    blob = grace_ext.compressor("topk:0.01/rice/qsgd:7").compress(gradient.astype(np.float64), shape=True)
    blob.tofile(tmp_path / "one.bin")
    assert cli.main(["inspect", str(tmp_path / "one.bin")]) == 0
    out = capsys.readouterr().out
    parsed = container.parse(blob)
    index, value = parsed.index_section.size, parsed.value_section.size
    for line in (f"container 0 at byte 0: {blob.size} bytes, checksum ok", "dtype    float64", "shape    40 x 50",
                 "d        2,000", "k        20 (density 1.0000%)",
                 f"index    rice (id 3), {index} bytes, {8 * index / 20:.2f} bits per index; "
                 f"uniformly random positions need {bench.index_bound(2000, 20):.2f}",
                 f"value    qsgd (id 3), {value} bytes, {8 * value / 20:.2f} bits per value",
                 f"overhead {blob.size - index - value} bytes", f"ratio    {8000 / blob.size:.2f} : 1"):
        assert line in out


def test_inspect_shows_every_container_of_an_allgather(tmp_path, capsys, gradient):
    broken = gradient.copy()
    broken[3, 4] = np.inf
    blobs = [grace_ext.compressor("dense/fp16").compress(gradient), grace_ext.compressor("topk").compress(broken),
             grace_ext.compressor("topk").compress(0 * gradient), grace_ext.compressor("topk").compress(gradient[:0])]
    np.concatenate(blobs).tofile(tmp_path / "all.bin")
    assert cli.main(["inspect", str(tmp_path / "all.bin")]) == 0
    dense, non_finite, zeros, nothing = re.split(r"^container.*\n", capsys.readouterr().out, flags=re.MULTILINE)[1:]
    assert "all elements are here" in dense and "fp16 (id 2), 4,000 bytes, 16.00 bits per value" in dense
    assert "held a NaN or an Inf" in non_finite and "value" not in non_finite
    assert "k        0 (density 0.0000%)" in zeros
    assert "d        0\n" in nothing


def test_inspect_shows_the_order_section(tmp_path, capsys):
    section = np.arange(5, dtype=np.float32).view(np.uint8)
    order = np.array([4, 3, 2, 1, 0], np.uint32)
    container.pack(5, 5, 0, np.empty(0, np.uint8), 1, section, order=order).tofile(tmp_path / "ordered.bin")
    assert cli.main(["inspect", str(tmp_path / "ordered.bin")]) == 0
    assert "order    2 bytes, 3.20 bits per value" in capsys.readouterr().out


@pytest.mark.parametrize("damage, message", [
    (lambda blob: blob[:-1], "the sections need"),
    (lambda blob: blob[:3], "the buffer ends before"),
    (lambda blob: np.append(blob[:-1], blob[-1] ^ np.uint8(1)), "checksum"),
    (lambda blob: np.append(blob, np.uint8(7)), "container 1 at byte"),
    (lambda blob: blob[1:], "magic"),
    (lambda blob: blob[:0], "is empty"),
])
def test_inspect_tells_what_is_wrong(tmp_path, gradient, damage, message):
    damage(grace_ext.compressor("topk:0.01/rice/qsgd").compress(gradient)).tofile(tmp_path / "bad.bin")
    status, _, err = run("inspect", tmp_path / "bad.bin")
    assert status == 1 and message in err and "bad.bin" in err
    assert err.startswith("grace_ext: ") and err.count("\n") == 1


def test_inspect_goes_on_behind_a_section_that_does_not_decode(tmp_path, capsys):
    section = np.frombuffer(b"\x03\xff\xff", np.uint8)
    values = np.zeros(8, np.uint8)
    bad = [container.pack(100, 2, 3, section, 1, values), container.pack(100, 2, 99, section, 1, values),
           container.pack(2**31 - 1, 2**31 - 1, 3, section, 1, values)]
    np.concatenate([*bad, container.pack_non_finite(7)]).tofile(tmp_path / "bad.bin")
    assert cli.main(["inspect", str(tmp_path / "bad.bin")]) == 1
    out, err = capsys.readouterr()
    assert out.count("checksum ok") == 4 and "unknown (id 99)" in out
    assert [line.split(": ")[2] for line in err.splitlines()] == [
        f"container {i} at byte {at}" for i, at in enumerate(np.cumsum([0, bad[0].size, bad[1].size]))]
    assert "index codec 99 is not known" in err


def test_inspect_without_a_file(tmp_path, capsys):
    assert cli.main(["inspect", str(tmp_path / "none")]) == 1
    assert cli.main(["inspect", str(tmp_path)]) == 1
    assert "No such file" in capsys.readouterr().err


# bench


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
    assert sorted(rows) == [(density, name) for density in (0.01, 0.1) for name in registry.names("index")]
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


def test_interruption_is_quiet(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "measure", interrupted)
    assert cli.main(["bench", "--quick"]) == 130
    assert capsys.readouterr().err == "grace_ext: interrupted\n"


def test_errors_of_the_package_have_no_traceback(monkeypatch, capsys):
    def failing(*_):
        raise GraceError("something specific")

    monkeypatch.setattr(bench, "measure", failing)
    assert cli.main(["bench", "--quick"]) == 1
    assert capsys.readouterr().err == "grace_ext: something specific\n"
