"""The options that all adapters share: their names, what is refused, and what they make."""

import dataclasses
import warnings
from contextlib import nullcontext

import pytest

import grace_ext
from grace_ext import ConfigError
from grace_ext.adapters._common.options import CompressionOptions
from grace_ext.exchange.buckets import Tensor
from grace_ext.memory.adam import Adam
from grace_ext.memory.momentum import Momentum
from grace_ext.observe import advice
from grace_ext.policy import DEFAULT_ROWS_SPEC
from grace_ext.policy.defaults import ADAM, PLAIN
from grace_ext.transport import InProcessGroup


class Few(CompressionOptions):
    absent = ("groups", "grad_scaler")


def test_keywords_and_named_arguments_become_fields():
    options = Few.from_keywords({"memory": "none", "seed": 3}, compression="topk:0.1")
    assert (options.compression, options.memory, options.seed, options.communicator) == ("topk:0.1", "none", 3, "allgather")


@pytest.mark.parametrize("keyword", ["memoy", "groups", "compression", "absent", "chosen"])
def test_an_unknown_option_lists_the_allowed_ones(keyword):
    with pytest.raises(TypeError) as raised:
        Few.from_keywords({keyword: None, "seed": 1}, compression="topk:0.1")
    allowed = [field.name for field in dataclasses.fields(Few) if field.name not in (*Few.absent, "compression", "chosen")]
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


def test_an_adam_gets_a_default_of_its_own_and_the_log_says_so(caplog):
    caplog.set_level("INFO", "grace_ext")
    options = CompressionOptions(rules={"*.bias": "dense/raw"})
    options.choose_defaults("adam", (0, 4))
    assert (options.compression, options.memory, options.schedule) == (ADAM.compression, ADAM.memory, ADAM.schedule)
    assert options.make_rules().choose("norm", 10, 1) == grace_ext.compressor(ADAM.small)
    assert options.make_rules().choose("table", 10**5, 2, as_rows=True) == grace_ext.compressor(DEFAULT_ROWS_SPEC)
    assert str(options.make_rules().choose("x.bias", 10, 1)).startswith("dense/raw")
    copied = dataclasses.replace(options)
    assert copied.make_rules().choose("norm", 10, 1) == grace_ext.compressor(ADAM.small), "adapters copy options"
    (line,) = caplog.messages
    assert all(str(part) in line for part in (ADAM.compression, ADAM.memory, ADAM.schedule, ADAM.small, "Adam"))
    for members in ((1, 4), (0, 1)):
        CompressionOptions().choose_defaults("adam", members)
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(
    "memory, given",
    [
        (None, {}),
        ("adam", {"compression": "topk:0.1"}),
        ("adam", {"memory": "none"}),
        ("adam", {"compression": "topk:0.1", "memory": "adam"}),
        ("muon", {"memory": "adam"}),
        (None, {"schedule": {"density": "warmup"}}),
    ],
)
def test_whoever_names_a_part_gets_that_and_the_plain_default(memory, given, caplog):
    caplog.set_level("INFO", "grace_ext")
    options = CompressionOptions(**given)
    options.choose_defaults(memory, (0, 4))
    expected = {
        "compression": PLAIN.compression,
        "memory": PLAIN.memory,
        "schedule": None,
        "communicator": "allgather",
    } | given
    assert {name: getattr(options, name) for name in expected} == expected
    assert str(options.make_rules().choose("norm", 10, 1)).startswith("dense/raw")
    assert caplog.messages == []


@pytest.mark.parametrize(
    "given",
    [{"schedule": {"density": "guarded"}}, {"memory": "adam"}, {"memory": "adam:decay=0.9"}, {"memory": Adam(decay=0.9)}],
)
def test_a_schedule_or_options_of_the_memory_take_their_part_of_the_default(given, caplog):
    caplog.set_level("INFO", "grace_ext")
    options = CompressionOptions(**given)
    options.choose_defaults("adam", (0, 4))
    expected = {"compression": ADAM.compression, "memory": ADAM.memory, "schedule": ADAM.schedule} | given
    assert {name: getattr(options, name) for name in expected} == expected
    assert options.make_rules().choose("norm", 10, 1) == grace_ext.compressor(ADAM.small)
    (line,) = caplog.messages
    assert f"memory={str(options.memory)!r}, schedule={options.schedule!r}" in line
    exchange = options.make_exchange(InProcessGroup(1).transport(0), 1.0)
    assert exchange.schedules.required == ("schedule" in given), "what the user gave has to count somewhere"


@pytest.mark.parametrize(
    "optimizers, given, remedy",
    [
        ("adam", {"compression": "topk:0.01"}, "memory='adam' and schedule={'density': 'hyperbolic:steps=210'}"),
        (
            "muon:0.9",
            {"compression": "topk:0.003/auto"},
            "memory='muon:0.9' and schedule={'density': 'hyperbolic:steps=700'}",
        ),
        ({"a": "muon", "b": "adam"}, {"compression": "topk:0.01"}, "leave out compression. "),
        ("adam", {"compression": "topk:0.01", "memory": "residual"}, None),
        ("adam", {"compression": "topk:0.1"}, None),
        ("adam", {"compression": "dense/qsgd:8"}, None),
        ("adam", {}, None),
        (None, {"compression": "topk:0.01"}, None),
        ("adam", {"memory": "momentum:0.9"}, "up to 4.4 times as large"),
        ("adam", {"memory": {"*.weight": "momentum:0.8", "*": "residual"}}, "up to 3.0 times as large"),
        ("adam", {"memory": Momentum(0.0)}, None),
        (None, {"memory": "momentum:0.9"}, None),
    ],
)
def test_a_memory_that_disturbs_an_adam_is_warned_of(optimizers, given, remedy, monkeypatch):
    monkeypatch.setattr(advice, "_given", set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for members in ((0, 1), (1, 4), (0, 4), (0, 4)):
            CompressionOptions(**given).choose_defaults(optimizers, members)
    texts = [str(one.message) for one in caught]
    assert [remedy in text and "GRACE_EXT_WARN=0" in text for text in texts] == ([] if remedy is None else [True])
    monkeypatch.setattr(advice, "_given", set())
    monkeypatch.setenv("GRACE_EXT_WARN", "0")
    CompressionOptions(**given).choose_defaults(optimizers, (0, 4))
    assert not advice._given


def test_defaults_are_chosen_alike_on_all_ranks():
    """What one rank alone refused, the others would refuse later, when they have counted one more exchange."""
    for memory in ("onebit_adam", "residual:bits=7", "momentum:2"):
        outcomes = []
        for members in ((0, 4), (1, 4)):
            try:
                CompressionOptions(memory=memory).choose_defaults("adam", members)
            except ConfigError as error:
                outcomes.append(str(error))
            else:
                outcomes.append("")
        assert outcomes[0] == outcomes[1], memory


@pytest.mark.parametrize("memory", ["muon:0.9", {"a": "muon:0.9", "b": "adam", "c": "adam"}])
def test_the_log_says_what_a_muon_gets(memory, caplog):
    caplog.set_level("INFO", "grace_ext")
    options = CompressionOptions()
    options.choose_defaults(memory, (0, 4))
    assert options.memory == memory
    (line,) = caplog.messages
    assert ("memory='muon:0.9'" if isinstance(memory, str) else "memory=['adam', 'muon:0.9']") in line and "Muon" in line


def test_a_model_of_small_tensors_only_needs_no_density():
    for given, required in (({}, False), ({"compression": "dense/raw", "schedule": {"density": "warmup"}}, True)):
        options = CompressionOptions(**given)
        options.choose_defaults("adam", (1, 4))
        exchange = options.make_exchange(InProcessGroup(1).transport(0), 1.0)
        rules = options.make_rules()
        tensor = Tensor("bias", 10, 1)
        exchange.set_buckets([exchange.bucket("b", [tensor], rules.choose("bias", 10, 1), options.make_communicator())])
        with pytest.raises(ConfigError, match="'density'") if required else nullcontext():
            exchange.config_digest()


def test_without_a_choice_it_is_the_plain_default():
    options = CompressionOptions()
    assert options.make_rules().choose("w", 10**5, 2) == grace_ext.compressor(PLAIN.compression)
    exchange = options.make_exchange(InProcessGroup(1).transport(0), 1.0)
    assert [memory.name for memory in exchange.state.memories.all()] == ["residual"]


def test_a_memory_that_changes_the_step_needs_an_optimizer():
    with pytest.raises(ConfigError, match="memory 'adam.*changes the optimizer's step: do this"):
        CompressionOptions(memory={"*": "adam"}).refuse_steps_in_memory("do this")
    CompressionOptions(memory="momentum").refuse_steps_in_memory("do this")
