"""The DDP example under torchrun on made-up images, and the comparison that `make demo-ddp` prints."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("tqdm")

pytestmark = pytest.mark.tier("test")
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def compare():
    """The module compare_ddp."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))
        import compare_ddp

        yield compare_ddp
        for name in ("compare_ddp", "compare_fashion_mnist", "_comparison", "_launch"):
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A data set of 512 random images for training and 64 for the test."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for part, count in (("train", 512), ("t10k", 64)):
        for name, shape in (("images-idx3", (count, 28, 28)), ("labels-idx1", (count,))):
            content = rng.integers(0, 10, shape, np.uint8).tobytes()
            header = struct.pack(f">i{len(shape)}i", 0x0800 + len(shape), *shape)
            (folder / f"{part}-{name}-ubyte").write_bytes(header + content)
    return folder


@pytest.mark.mpi
@pytest.mark.parametrize("compression, least, most", [("powersgd", 1, 2), ("topk:0.01/rice/qsgd:7", 50, 250)])
def test_the_example_logs_what_it_sent(compare, data, tmp_path, compression, least, most):
    log = tmp_path / "log.jsonl"
    command = [
        *compare.torchrun(2),
        compare.EXAMPLE,
        "--data",
        str(data),
        "--compression",
        compression,
        "--epochs",
        "1",
        "--log-file",
        str(log),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "horovod" not in done.stderr.lower()
    half, whole = map(json.loads, log.read_text().splitlines())
    assert (half["epoch"], whole["epoch"], half["steps"], whole["steps"]) == (0.5, 1.0, 2, 4)
    assert least <= whole["ratio"] <= most and 0 <= whole["accuracy"] <= 1
    assert set(whole["seconds_per_step"]) == {"compute", "codec", "exchange"}


@pytest.mark.parametrize("more", [[], ["--powersgd"]], ids=["usual", "powersgd"])
def test_the_comparison_trains_each_way_and_writes_the_tables(compare, tmp_path, monkeypatch, capsys, more):
    import _comparison

    calls = []

    def train(label, options, log_file, ranks, timeout, example, env, launcher):
        calls.append(options[options.index("--compression") + 1])
        assert example == compare.EXAMPLE and Path(example).is_file() and launcher is compare.torchrun and ranks == 2
        sent = {"none": 4000, "fp16": 2000}.get(calls[-1], 100)
        return compare.Run(
            label,
            [
                {
                    "epoch": 1.0,
                    "accuracy": 0.9,
                    "steps": 2,
                    "bytes_sent": sent,
                    "ratio": 4000 / sent,
                    "compressed_layers_ratio": None,
                    "seconds_per_step": {"compute": 0.02, "codec": 0.001, "exchange": 0.004},
                }
            ],
        )

    monkeypatch.setattr(_comparison, "train", train)
    readme = tmp_path / "README.md"
    readme.write_text("before\n" + "\nold\n".join(compare.MARKERS) + "\nafter")
    monkeypatch.setattr(sys, "argv", ["x", "--data", "d", "--out", str(tmp_path / "out"), "--readme", str(readme), *more])
    compare.main()
    assert calls == ["none", "fp16", *(["powersgd"] if more else []), "topk:0.01/rice/qsgd:7"]
    table = (tmp_path / "out/comparison.md").read_text()
    assert "| DDP float32 | 90.00 % | 25.0 | 20.0 | 1.0 | 4.0 | 2 kB | 1× |" in table
    command = "python examples/compare_ddp.py --data DIR --out DIR --powersgd" if more else "make demo-ddp"
    assert f"by `{command}`" in table and "Horovod" not in table
    assert table in readme.read_text() and readme.read_text().startswith("before\n") and "\nold\n" not in readme.read_text()
    assert ("DDP powerSGD_hook, rank 4" in capsys.readouterr().out) == bool(more)


def test_the_document_has_the_markers(compare):
    import _comparison
    import compare_fashion_mnist

    for markers in (compare.MARKERS, compare_fashion_mnist.MARKERS):
        _comparison.around_markers(ROOT / "docs/demos.md", markers)
