"""The examples' models and data, and the script that captures gradients from them, without starting ranks."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("horovod.torch")
pytest.importorskip("tqdm")

pytestmark = pytest.mark.tier("test")
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def scripts():
    """The modules pytorch_text, pytorch_fashion_mnist and benchmarks/capture.py."""
    with pytest.MonkeyPatch.context() as patch:
        for folder in ("benchmarks", "examples"):
            patch.syspath_prepend(str(ROOT / folder))
        import capture
        import pytorch_fashion_mnist
        import pytorch_text

        yield pytorch_text, pytorch_fashion_mnist, capture
        for name in (
            "capture",
            "_cluster_tasks",
            "_comparison",
            "_launch",
            "_lib",
            "_transformer_tasks",
            "compare_tensorflow",
            "fashion_mnist",
            "fetch_fashion_mnist",
            "pytorch_text",
            "pytorch_fashion_mnist",
        ):
            sys.modules.pop(name, None)


def count(model) -> int:
    return sum(p.numel() for p in model.parameters())


def test_the_text_is_pythons_own(scripts, tmp_path, monkeypatch):
    text, _, _ = scripts
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "left_out.py").write_text('"""Unwanted."""')
    (tmp_path / "module.py").write_text('"""One two."""\nclass A:\n    """Three, two."""\n    def f(self): "Four"')
    (tmp_path / "broken.py").write_text("def")
    monkeypatch.setattr(text.sysconfig, "get_path", lambda name: str(tmp_path))
    documents = list(text.documents())
    assert documents[-3:] == ["One two.", "Three, two.", "Four"] and "Unwanted." not in documents
    words = text.read_words()
    assert words.dtype == torch.int64 and len(words) > 100_000 and 0 <= words.min() and words.max() < text.ROWS
    one, two, dot, three, comma, again, end, four = words[-8:].tolist()
    assert (two, dot) == (again, end) and len({one, two, three, four, dot, comma}) == 6


def test_embedding_gradients_are_inherently_sparse(scripts):
    text, _, _ = scripts
    model = text.Model()
    assert 26_100_000 < count(model) < 26_300_000
    words = torch.tensor([[3, 50, 3, 49_999, 7]])
    model(words).backward()
    touched = model.embedding.weight.grad.abs().sum(1).nonzero().flatten()
    assert touched.tolist() == [3, 50, 49_999]  # 7 is only predicted
    assert model.output.weight.grad.abs().sum(1).count_nonzero() == text.ROWS


def test_the_models_of_the_fashion_example(scripts):
    _, fashion, _ = scripts
    images = torch.zeros(2, 1, 28, 28)
    for name, (least, most) in {"small": (1.1e6, 1.3e6), "cnn": (2.6e6, 2.8e6)}.items():
        model = fashion.MODELS[name]()
        assert least < count(model) < most and model(images).shape == (2, 10)


@pytest.fixture
def launched(scripts, monkeypatch):
    """Stands for horovodrun: saves what a run that captures would."""
    _, _, capture = scripts
    calls = []

    def launch(label, script, options, ranks, timeout):
        calls.append(label)
        assert Path(script).is_file() and ranks == 2
        if label == "transformer":
            folder, [step] = json.loads(options[0])["capture"]
        else:
            folder, step = (options[options.index(flag) + 1] for flag in ("--capture", "--capture-steps"))
        np.savez(f"{folder}/{step}.npz", a=np.full(3, 1 + len(calls), np.float32), b=np.full(2, 9, np.float32))
        np.savez(f"{folder}/{step}-compensated.npz", a=np.full(3, 5, np.float32), b=np.full(2, 9, np.float32))

    monkeypatch.setattr(capture, "launch", launch)
    monkeypatch.setattr(capture.fetch_fashion_mnist, "fetch", lambda folder: folder)
    return capture, calls


def test_capture_leaves_two_files_of_each_model_and_can_be_repeated(launched, tmp_path, monkeypatch, capsys):
    capture, calls = launched
    monkeypatch.setattr(sys, "argv", ["capture.py", "--out", str(tmp_path / "new" / "folder")])
    for repetition in (0, 1):
        capture.main()
        names = [f"{model}{suffix}.npy" for model in ("cnn", "lm", "transformer") for suffix in ("-compensated", "")]
        assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == names
        assert np.load(tmp_path / "new" / "folder" / "lm.npy").tolist() == [3 + 3 * repetition] * 3 + [9, 9]
    assert calls == ["cnn", "lm", "transformer"] * 2
    assert all(Path(line).is_file() for line in capsys.readouterr().out.split())


def test_capture_of_a_run_that_fails_keeps_what_was_there(launched, tmp_path, monkeypatch):
    capture, _ = launched

    def failing(*arguments):
        raise capture.RunFailed("no ranks today")

    monkeypatch.setattr(capture, "launch", failing)
    monkeypatch.setattr(sys, "argv", ["capture.py", "--out", str(tmp_path)])
    (tmp_path / "cnn.npy").write_text("older")
    with pytest.raises(SystemExit, match="no ranks today"):
        capture.main()
    assert [path.name for path in tmp_path.iterdir()] == ["cnn.npy"]


def test_a_run_without_captured_gradients_is_told(launched, tmp_path, monkeypatch):
    """As after a full disk, which ends the capture and not the training."""
    capture, _ = launched
    monkeypatch.setattr(capture, "launch", lambda *arguments: None)
    monkeypatch.setattr(sys, "argv", ["capture.py", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="there is no such file"):
        capture.main()
