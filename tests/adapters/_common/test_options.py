"""The options that all adapters share: their names, what is refused, and what they make."""

import dataclasses

import pytest

from grace_ext import ConfigError
from grace_ext.adapters._common.options import CompressionOptions
from grace_ext.transport import InProcessGroup


class Few(CompressionOptions):
    absent = ("groups", "grad_scaler")


def test_keywords_and_named_arguments_become_fields():
    options = Few.from_keywords({"memory": "none", "seed": 3}, compression="topk:0.1")
    assert (options.compression, options.memory, options.seed, options.communicator) == ("topk:0.1", "none", 3, "allgather")


@pytest.mark.parametrize("keyword", ["memoy", "groups", "compression", "absent"])
def test_an_unknown_option_lists_the_allowed_ones(keyword):
    with pytest.raises(TypeError) as raised:
        Few.from_keywords({keyword: None, "seed": 1}, compression="topk:0.1")
    allowed = [field.name for field in dataclasses.fields(Few) if field.name not in (*Few.absent, "compression")]
    assert str(raised.value) == f"unknown option {keyword!r}; allowed: {', '.join(allowed)}"


@pytest.mark.parametrize(
    "option, text",
    [
        ({"selection": "gpu"}, "selection='gpu'; allowed: auto, host, device"),
        ({"on_resize": "keep"}, "on_resize='keep'"),
        ({"grad_scaler": 2.0}, "grad_scaler=2.0"),
        ({"observe": 3}, "observe=3"),
    ],
)
def test_values_that_are_not_allowed(option, text):
    with pytest.raises(ConfigError, match=text):
        CompressionOptions(**option)


def test_what_options_make():
    options = CompressionOptions("topk:0.1", "none", rules={"*.bias": "dense/raw"}, communicator="sharded", seed=5)
    exchange = options.make_exchange(InProcessGroup(1).transport(0), 0.5)
    assert (exchange.weight, exchange.seed) == (0.5, 5)
    assert options.make_communicator().name == "sharded"
    rules = options.make_rules()
    assert str(rules.choose("a.bias", 10**4, 2)).startswith("dense/raw")
    assert str(rules.choose("a.weight", 10**4, 2)).startswith("topk:0.1")


def test_one_rank_has_nothing_to_observe(tmp_path):
    with pytest.warns(UserWarning, match="there is one rank") as record:
        CompressionOptions(capture=tmp_path).warn_of_one_rank(stacklevel=1)
    assert record[0].filename == __file__
