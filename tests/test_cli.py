"""The commands warmup, codecs and inspect, and what the command line says about bad input."""

import io
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

import grace_ext
from grace_ext import cli, inspection, registry
from grace_ext._util import units
from grace_ext.bench import command, index_bound
from grace_ext.errors import GraceError
from grace_ext.pipeline import container
from grace_ext.value.base import ValueCodec


class Sample(ValueCodec):
    """Stands for a codec that is added later.

    More about it.
    """

    name, id, lossless = "test_sample", 250, True

    def __init__(self, flavour: str = "plain"):
        self.flavour = flavour


@pytest.fixture
def sample():
    registry.register(Sample)
    yield
    del registry._classes["value"]["test_sample"]


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
    assert units.count(text) == count


# codecs


def test_codecs_lists_all_that_is_registered(sample, capsys):
    assert cli.main(["codecs"]) == 0
    out = capsys.readouterr().out
    for kind in registry.KINDS:
        assert not registry.names(kind) or f"\n{kind}\n{'=' * len(kind)}\n" in "\n" + out
        for name in registry.names(kind):
            assert re.search(rf"^  {name}\b", out, re.MULTILINE)
    assert "test_sample:flavour=plain  (container id 250, lossless)" in out
    assert "Stands for a codec that is added later.\n" in out and "More about it" not in out
    assert "qsgd:bits=8:bucket=512:levels=0:norm=max:entropy=none  (container id 3, lossy)" in out
    assert "Alistarh et al." in out
    assert re.search(r"^  dr-bf-p0 +topk:0.01/bloom:p0:fpr=0.001/raw$", out, re.MULTILINE)


def test_codecs_as_json(sample, capsys):
    assert cli.main(["codecs", "--json"]) == 0
    parts = json.loads(capsys.readouterr().out)
    assert [(part["kind"], part["name"]) for part in parts] == [
        (kind, name) for kind in registry.KINDS for name in registry.names(kind)
    ]
    by_name = {(part["kind"], part["name"]): part for part in parts}
    assert by_name["sparsifier", "topk"]["options"] == {"density": 0.01, "per": "bucket"}
    assert by_name["value", "fp16"]["traits"] == ["lossy", "summable as float16"]
    assert by_name["index", "rice"]["id"] == 3 and "1971" in by_name["index", "rice"]["papers"][0]
    assert by_name["value", "raw"]["papers"] == []
    assert by_name["value", "test_sample"]["options"] == {"flavour": "plain"}
    assert by_name["memory", "residual"]["traits"] == ["keeps state"]


def test_a_closed_pipe_is_no_error():
    """The reader is gone before the first byte, which the program writes when its buffer is full or it ends."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-m", "grace_ext", "codecs"], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert done.returncode == 0 and done.stderr == ""


# inspect


def test_inspect_shows_header_and_sections(tmp_path, capsys, gradient):
    blob = grace_ext.compressor("topk:0.01/rice/qsgd:7").compress(gradient.astype(np.float64), shape=True)
    blob.tofile(tmp_path / "one.bin")
    assert cli.main(["inspect", str(tmp_path / "one.bin")]) == 0
    out = capsys.readouterr().out
    parsed = container.parse(blob)
    index, value = parsed.index_section.size, parsed.value_section.size
    for line in (
        f"container 0 at byte 0: {blob.size} bytes, checksum ok",
        "dtype    float64",
        "shape    40 x 50",
        "d        2,000",
        "k        20 (density 1.0000%)",
        f"index    rice (id 3), {index} bytes, {8 * index / 20:.2f} bits per index; "
        f"uniformly random positions need {index_bound(2000, 20):.2f}",
        f"value    qsgd (id 3), {value} bytes, {8 * value / 20:.2f} bits per value",
        f"overhead {blob.size - index - value} bytes",
        f"ratio    {8000 / blob.size:.2f} : 1",
    ):
        assert line in out


def test_inspect_shows_every_container_of_an_allgather(tmp_path, capsys, gradient):
    broken = gradient.copy()
    broken[3, 4] = np.inf
    blobs = [
        grace_ext.compressor("dense/fp16").compress(gradient),
        grace_ext.compressor("topk").compress(broken),
        grace_ext.compressor("topk").compress(0 * gradient),
        grace_ext.compressor("topk").compress(gradient[:0]),
    ]
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


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda blob: blob[:-1], "the sections need"),
        (lambda blob: blob[:3], "the buffer ends before"),
        (lambda blob: np.append(blob[:-1], blob[-1] ^ np.uint8(1)), "checksum"),
        (lambda blob: np.append(blob, np.uint8(7)), "container 1 at byte"),
        (lambda blob: blob[1:], "magic"),
        (lambda blob: blob[:0], "is empty"),
    ],
)
def test_inspect_tells_what_is_wrong(tmp_path, gradient, damage, message):
    damage(grace_ext.compressor("topk:0.01/rice/qsgd").compress(gradient)).tofile(tmp_path / "bad.bin")
    status, _, err = run("inspect", tmp_path / "bad.bin")
    assert status == 1 and message in err and "bad.bin" in err
    assert err.startswith("grace_ext: ") and err.count("\n") == 1


def test_inspect_goes_on_behind_a_section_that_does_not_decode(tmp_path, capsys):
    section = np.frombuffer(b"\x03\xff\xff", np.uint8)
    values = np.zeros(8, np.uint8)
    bad = [
        container.pack(100, 2, 3, section, 1, values),
        container.pack(100, 2, 99, section, 1, values),
        container.pack(2**31 - 1, 2**31 - 1, 3, section, 1, values),
    ]
    np.concatenate([*bad, container.pack_non_finite(7)]).tofile(tmp_path / "bad.bin")
    assert cli.main(["inspect", str(tmp_path / "bad.bin")]) == 1
    out, err = capsys.readouterr()
    assert out.count("checksum ok") == 4 and "unknown (id 99)" in out
    assert [line.split(": ")[2] for line in err.splitlines()] == [
        f"container {i} at byte {at}" for i, at in enumerate(np.cumsum([0, bad[0].size, bad[1].size]))
    ]
    assert "index codec 99 is not known" in err


def test_inspect_allocates_no_more_than_it_is_allowed_to(tmp_path, capsys, monkeypatch):
    claims = container.pack(2**31 - 1, 2**31 - 1, 3, np.zeros(3, np.uint8), 1, np.zeros(8, np.uint8))
    claims.tofile(tmp_path / "bad.bin")
    monkeypatch.setattr(inspection, "unpack", lambda *_: pytest.fail("its elements are decoded"))
    assert cli.main(["inspect", str(tmp_path / "bad.bin")]) == 1
    assert "2,147,483,647 elements; at most 268,435,456 are decoded" in capsys.readouterr().err
    monkeypatch.undo()
    grace_ext.compressor("dense").compress(np.zeros(100)).tofile(tmp_path / "good.bin")
    for most, status in (("99", 1), ("100", 0)):
        assert cli.main(["inspect", str(tmp_path / "good.bin"), "--elements", most]) == status


def test_inspect_without_a_file(tmp_path, capsys):
    assert cli.main(["inspect", str(tmp_path / "none")]) == 1
    assert cli.main(["inspect", str(tmp_path)]) == 1
    assert "No such file" in capsys.readouterr().err


# errors


def test_interruption_is_quiet(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "measure", interrupted)
    assert cli.main(["bench", "--quick"]) == 130
    assert capsys.readouterr().err == "grace_ext: interrupted\n"


def test_errors_of_the_package_have_no_traceback(monkeypatch, capsys):
    def failing(*_):
        raise GraceError("something specific")

    monkeypatch.setattr(command, "measure", failing)
    assert cli.main(["bench", "--quick"]) == 1
    assert capsys.readouterr().err == "grace_ext: something specific\n"
