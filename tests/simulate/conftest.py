"""Fixtures of the simulator's tests."""

import pytest
from support.simulations import links

from grace_ext.simulate import Quadratic, Setting


@pytest.fixture(scope="module")
def slow():
    """Eight thousand elements over links of 30 to 330 kB/s."""
    return Quadratic(8000, 4), Setting(links(4), links(4)[::-1], compute=0.02, steps=120, rate=0.1)
