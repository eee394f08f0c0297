"""Kimad and Kimad+ keep the time that they are given."""

import dataclasses

import numpy as np
import pytest
from support.simulations import mean

from grace_ext.policy.allocation import DENSITIES
from grace_ext.simulate import Kimad, Optimal, simulate
from grace_ext.simulate.command import compare

pytestmark = pytest.mark.tier("test")


@pytest.fixture(scope="module")
def found(slow):
    return compare(*slow, ("ef21", "kimad", "kimad+"), 0.05)


def test_kimad_keeps_the_time_and_a_fixed_density_does_not(found):
    kimad, fixed = found["Kimad"], found["EF21"]
    assert mean(kimad, "seconds") == pytest.approx(0.05, rel=0.12)
    assert mean(fixed, "up") == pytest.approx(mean(kimad, "up"), rel=0.15)
    assert mean(kimad, "seconds") < 0.8 * mean(fixed, "seconds")
    assert np.std([one.seconds for one in kimad]) < 0.5 * np.std([one.seconds for one in fixed])
    assert np.corrcoef([one.bandwidth for one in kimad], [one.sent for one in kimad])[0, 1] > 0.9
    for records in found.values():
        assert records[-1].loss < 0.3 * records[0].loss


def test_kimad_plus_has_a_smaller_error_from_as_many_bytes(found):
    assert mean(found["Kimad+"], "up") <= 1.03 * mean(found["Kimad"], "up")
    assert mean(found["Kimad+"], "error") < 0.85 * mean(found["Kimad"], "error")


def test_no_choice_of_layers_beats_the_largest_elements_of_all(slow):
    """Nothing beats it at equal counts. At equal bytes it is close to Kimad+, whose layers have codes of their own."""
    found = compare(*slow, ("kimad", "kimad+", "optimal"), 0.05)
    assert list(found) == ["Kimad", "Kimad+", "optimal"]
    assert mean(found["optimal"], "up") == pytest.approx(mean(found["Kimad"], "up"), rel=0.1)
    assert mean(found["optimal"], "error") < 0.85 * mean(found["Kimad"], "error")
    differences = [np.array([5, 0.1, -4], np.float32), np.array([3, -0.2, 0.3, 0.01], np.float32)]
    sizes = [10 * one.size * np.array(DENSITIES) for one in differences]
    densities = Optimal(1.0).allocate(sizes, differences, 35.0, "up")
    assert [round(density * one.size) for density, one in zip(densities, differences, strict=True)] == [2, 1]


def test_gradient_descent_sends_everything(slow):
    task, setting = slow
    records = compare(task, dataclasses.replace(setting, steps=3), ("gd",), 0.05)["GD"]
    assert all(record.density == 1.0 for record in records)


def test_who_knows_the_bandwidth_is_closer_to_the_time(slow):
    task, setting = slow
    known = simulate(task, Kimad(0.05), dataclasses.replace(setting, measured=False))
    assert mean(known, "seconds") == pytest.approx(0.05, rel=0.08)
