"""Reading a dictionary without losing a key."""

import pytest

from grace_ext import ConfigError
from grace_ext.pipeline.params_reader import Reader, ratio


def test_what_nobody_reads_is_an_error():
    read = Reader({"a": 1, "b": 2})
    assert read("a", 0) == 1 and read("c", 3) == 3 and ratio(read) == 0.3
    with pytest.raises(ConfigError, match="params: b: unknown, or without a meaning for this choice; read were: a, c"):
        read.finish()
    read("b", None)
    read.finish()


def test_choices():
    read = Reader({"a": "x", "b": ["x"]})
    assert read.choice("a", None, {"x": 5}) == 5 and read.choice("c", "y", {"y": 6}) == 6
    for key in ("a", "b"):
        with pytest.raises(ConfigError, match=f"params: {key}=.*; allowed: z"):
            read.choice(key, None, {"z": 1})
