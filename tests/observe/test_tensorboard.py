"""Records for TensorBoard, by whichever library is there."""

import importlib.util

import pytest
from support.observed_runs import run

from grace_ext import ConfigError
from grace_ext.observe import TensorBoardWriter, observers


@pytest.mark.parametrize("library", ["tensorboardX", "tensorflow"])
def test_tensorboard(tmp_path, monkeypatch, library):
    pytest.importorskip(library)
    summaries = pytest.importorskip("tensorflow").compat.v1.train.summary_iterator
    found = importlib.util.find_spec
    others = {"tensorboardX", "tensorboard", "tensorflow"} - {library}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in others else found(name, *rest))
    writer = TensorBoardWriter(tmp_path / "folder", every=5)
    run(writer, spec="topk:0.1/rice/raw")
    writer.close()
    (file,) = (tmp_path / "folder").iterdir()
    values = {}
    for event in summaries(str(file)):
        for value in event.summary.value:
            number = value.simple_value if value.HasField("simple_value") else value.tensor.float_val[0]
            values[event.step, value.tag] = number, event.wall_time
    assert {step for step, _ in values} == {0, 5}
    for name in ("ratio", "bytes_out", "seconds/select", "residual_norm_ratio/a"):
        number, time = values[5, f"compression/{name}"]
        assert number > 0 and time > 1.7e9, name
    assert (5, "compression/time") not in values


def test_without_a_library_for_tensorboard_there_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install tensorboardX"):
        observers(tmp_path / "folder")
