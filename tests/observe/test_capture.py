"""Captured gradients are what the compressor sees; capturing changes nothing and no failure of it reaches the training."""

import warnings

import numpy as np
import pytest
from support.exchanges import TENSORS, make, step
from support.in_process_ranks import gradient, on_all_ranks

import grace_ext
from grace_ext import ConfigError, bench
from grace_ext.exchange.buckets import Bucket, Tensor
from grace_ext.exchange.engine import Exchange
from grace_ext.memory.none import NoMemory
from grace_ext.observe.capture import Capture
from grace_ext.pipeline.spec import parse_stage


def run(folder, steps=(0, 2), poison=None):
    """Four steps of one bucket on all ranks: the results of the ranks, and rank 0's residual before each step."""

    def work(transport):
        exchange = make(transport, capture=Capture(folder, steps))
        received, states = [], []
        for i in range(4):
            given = gradient(10 * transport.rank + i)
            if i == poison and transport.rank == 1:
                given[3] = np.nan
            state = exchange.state_dict().get("residual")
            states.append(np.concatenate([state["a"], state["b"]]) if state else np.zeros(5000, np.float32))
            received.append(step(exchange, given)[0])
        return received, states

    return on_all_ranks(work)


def test_captured_is_what_the_compressor_gets(tmp_path):
    _, states = run(tmp_path / "new" / "folder")[0]
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == [
        "0-compensated.npz",
        "0.npz",
        "2-compensated.npz",
        "2.npz",
    ]
    for i in (0, 2):
        with np.load(tmp_path / "new" / "folder" / f"{i}.npz") as saved:
            assert {name: saved[name].size for name in saved.files} == {t.name: t.size for t in TENSORS}
        path = tmp_path / "new" / "folder" / f"{i}"
        np.testing.assert_array_equal(bench.load(f"{path}.npz"), gradient(i))
        np.testing.assert_array_equal(bench.load(f"{path}-compensated.npz"), gradient(i) + states[i])
    assert states[2].any()


def test_capture_changes_no_result(tmp_path):
    with_capture, without = run(tmp_path), run(tmp_path, steps=())
    for (ours, _), (theirs, _) in zip(with_capture, without, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_step_that_is_not_finite_is_left_out(tmp_path):
    run(tmp_path, poison=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0-compensated.npz", "0.npz"]


def test_a_folder_that_cannot_be_written_ends_the_capture_only(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(UserWarning, match=r"capture of gradients in .*file.* ends: .*Error") as caught:
        results = run(tmp_path / "file" / "folder")
    assert len(caught) == 1  # at step 0; step 2 is not tried
    for (ours, _), (theirs, _) in zip(results, run(tmp_path, steps=()), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.filterwarnings("error")
def test_where_warnings_are_errors_the_end_of_a_capture_is_logged(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    assert len(run(tmp_path / "file" / "folder")) == len(run(tmp_path, steps=()))
    assert [text.partition(" in ")[0] for text in caplog.messages] == ["capture of gradients"]


def test_a_full_disk_leaves_no_half_file(tmp_path, monkeypatch):
    def full(entry, array, **options):
        entry.write(b"some bytes")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np.lib.format, "write_array", full)
    with pytest.warns(UserWarning, match="No space left"):
        run(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_lack_of_memory_in_the_worker_thread_ends_the_capture_only(tmp_path, monkeypatch):
    def lacking(self, bucket, gradient, residual):
        raise MemoryError

    monkeypatch.setattr(Capture, "_see", lacking)
    with pytest.warns(UserWarning, match="MemoryError"):
        results = run(tmp_path)
    assert len(results[0][0]) == 4 and not list(tmp_path.iterdir())


def test_without_a_memory_there_is_one_file_and_a_tensor_may_be_called_file(tmp_path):
    def work(transport):
        exchange = Exchange(transport, grace_ext.memory("none"), 0.5, capture=Capture(tmp_path, [0]))
        exchange.set_buckets(
            [
                Bucket(
                    "b",
                    [Tensor("file", 5000, 2)],
                    grace_ext.compressor("topk:0.1"),
                    parse_stage("communicator", "allgather"),
                    NoMemory(),
                )
            ]
        )
        step(exchange, gradient(7 + transport.rank))

    on_all_ranks(work)
    assert [path.name for path in tmp_path.iterdir()] == ["0.npz"]
    np.testing.assert_array_equal(np.load(tmp_path / "0.npz")["file"], gradient(7))


def test_a_step_that_failed_is_forgotten(tmp_path):
    capture = Capture(tmp_path, [0])
    bucket = Bucket("b", TENSORS, grace_ext.compressor("dense"), parse_stage("communicator", "allgather"), NoMemory())
    capture.gradient_callback(0, bucket)(gradient(1), None)
    capture.forget()
    capture.gradient_callback(0, bucket)(gradient(2), None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        capture.end_step(0, True)
    np.testing.assert_array_equal(bench.load(str(tmp_path / "0.npz")), gradient(2))


@pytest.mark.parametrize("steps", [(-1,), (1.5,), ("7",)])
def test_steps_are_checked(steps, tmp_path):
    with pytest.raises(ConfigError, match="whole numbers from 0"):
        Capture(tmp_path, steps)
