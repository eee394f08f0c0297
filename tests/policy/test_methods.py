"""What the advisor may recommend: only what a measurement has shown."""

import dataclasses
from pathlib import Path

import pytest

import grace_ext
from grace_ext.policy import methods
from grace_ext.policy.methods import METHODS, OPTIMIZERS, Evidence, Method
from grace_ext.rounds.presets import PRESETS

ROOT = Path(__file__).parents[2]
SHOWN = Evidence("sgd", -0.1, 3, "a task", "memories.md", "a row")


@pytest.mark.parametrize("points, seeds, kept", [(-0.5, 3, True), (-0.51, 3, False), (1.0, 2, False), (0.3, 5, True)])
def test_accuracy_is_kept_if_enough_seeds_say_so(points, seeds, kept):
    assert dataclasses.replace(SHOWN, points=points, seeds=seeds).is_kept == kept


def test_what_was_not_measured_is_not_kept():
    assert not Method("x", "topk:0.1").keeps_accuracy("sgd") and Method("x", "topk:0.1").kept_with() == "not shown"
    once = Method("x", "topk:0.1", evidence=(SHOWN,))
    assert once.keeps_accuracy("sgd") and not once.keeps_accuracy("adam") and once.kept_with() == "sgd"


def test_one_measurement_to_the_contrary_is_enough():
    worse = dataclasses.replace(SHOWN, points=-3.0)
    assert not Method("x", "topk:0.1", evidence=(SHOWN, worse)).keeps_accuracy("sgd")


def test_a_measurement_of_too_few_seeds_takes_nothing_away():
    once = dataclasses.replace(SHOWN, points=0.6, seeds=1)
    assert Method("x", "topk:0.1", evidence=(SHOWN, once)).keeps_accuracy("sgd")
    assert not Method("x", "topk:0.1", evidence=(once,)).keeps_accuracy("sgd")


def test_local_steps_are_the_adapters_default():
    preset, (method,) = PRESETS["sparseloco"], [method for method in METHODS if method.interval > 1]
    assert (method.spec, method.memory, method.interval) == (preset.compression, preset.memory, preset.steps)
    assert preset.needs_each_rank and method.communicators == ("allgather",)


def test_rounding_keeps_accuracy_with_any_optimizer():
    assert Method("x", "dense/fp16", rounds=True).kept_with() == ", ".join(OPTIMIZERS)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.label)
def test_the_specs_are_valid_and_the_pages_are_there(method):
    if method.spec is not None:
        grace_ext.compressor(method.spec)
    grace_ext.memory(method.memory)
    for evidence in method.evidence:
        assert evidence.optimizer in OPTIMIZERS
        assert evidence.row in (ROOT / "docs" / evidence.page).read_text()


def test_labels_are_unique():
    assert len({method.label for method in METHODS}) == len(METHODS) and methods.MIN_SEEDS > 1
