"""What users may write for observe=."""

import importlib.util
import sys

import pytest

from grace_ext import ConfigError
from grace_ext.observe import CsvWriter, JsonlWriter, TensorBoardWriter, Timeline, observers


def test_what_users_may_write(tmp_path):
    mine = JsonlWriter(tmp_path / "x.jsonl")
    assert observers(None) == [] and observers(mine) == [mine]
    kinds = [type(one) for one in observers([str(tmp_path / "a.jsonl"), tmp_path / "b.csv", mine, Timeline("c.json")])]
    assert kinds == [JsonlWriter, CsvWriter, JsonlWriter, Timeline]
    if "tensorboardX" in sys.modules or importlib.util.find_spec("tensorboardX"):
        assert isinstance(observers(tmp_path / "run")[0], TensorBoardWriter)
    for wrong, text in ((7, "a path, an observer"), ("log.json", "Timeline"), ([None, 7], "a path, an observer")):
        with pytest.raises(ConfigError, match=text):
            observers(wrong)
    for every in (0, 1.5, "10"):
        with pytest.raises(ConfigError, match="whole numbers from 1"):
            CsvWriter("x.csv", every=every)
    assert not list(tmp_path.iterdir()), "a file is made when there is something to write"
