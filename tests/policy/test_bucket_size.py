"""How large buckets should be."""

import dataclasses

import pytest

from grace_ext.policy.bucket_size import SIZES, Measured, choose_size, seconds_of
from grace_ext.policy.cost_model import Link

LARGEST, *_, SMALLEST = SIZES
MILLISECONDS = 1e-3
#: Three layers of 2 million elements, one after the other every 10 ms; a millisecond to encode and one to decode a million.
MEASURED = Measured(30 * MILLISECONDS, 1e-9, 1e-9, 0.03, True)
WHOLE = [(30 * MILLISECONDS, 6_000_000)]
LAYERS = [(10 * MILLISECONDS, 2_000_000), (20 * MILLISECONDS, 2_000_000), (30 * MILLISECONDS, 2_000_000)]
SLOW, FAST = Link(0, 0, 8e-8), Link(0, 0, 0)  # 100 Mbit/s, and bytes that cost nothing
NO_SPARE = dataclasses.replace(MEASURED, has_spare_core=False)


@pytest.mark.parametrize(
    ("buckets", "measured", "link", "expected"),
    [
        (WHOLE, MEASURED, FAST, 30 + 1 + 6 + 6),
        (WHOLE, MEASURED, SLOW, 30 + 1 + 6 + 14.4 + 6),
        (LAYERS, MEASURED, FAST, 30 + 1 + 2 + 2),
        (LAYERS, MEASURED, SLOW, 30 + 1 + 2 + 4.8 + 2),
        (LAYERS, NO_SPARE, SLOW, 30 + 3 + 6 + 4.8 + 6),  # what goes before makes backward longer
        (WHOLE, NO_SPARE, SLOW, 30 + 1 + 6 + 14.4 + 6),
        (LAYERS, MEASURED, Link(0, 20 * MILLISECONDS, 0), 10 + 1 + 2 + 3 * 20 + 2),  # one collective after the other
    ],
)
def test_the_seconds_are_those_of_the_last_bucket(buckets, measured, link, expected):
    assert seconds_of(buckets, measured, link, 2) == pytest.approx(expected * MILLISECONDS)


def test_more_ranks_send_more():
    two, four = (seconds_of(WHOLE, MEASURED, SLOW, ranks) for ranks in (2, 4))
    assert four - two == pytest.approx(2 * 14.4 * MILLISECONDS)


@pytest.mark.parametrize(
    ("measured", "link", "chosen"),
    [
        (MEASURED, SLOW, SMALLEST),
        (MEASURED, FAST, SMALLEST),
        (NO_SPARE, SLOW, SMALLEST),
        (NO_SPARE, FAST, LARGEST),  # nothing can be hidden
        (MEASURED, Link(0, 20 * MILLISECONDS, 0), LARGEST),  # each collective costs more than what it hides
    ],
)
def test_the_shortest_step_is_chosen(measured, link, chosen):
    assert choose_size({LARGEST: WHOLE, SMALLEST: LAYERS}, measured, link, 2) == chosen


def test_a_twentieth_is_worth_it_and_less_is_not():
    def chosen(backward):
        layouts = {LARGEST: [(backward, 6_000_000)], SMALLEST: [(backward / 2, 3_000_000), (backward, 3_000_000)]}
        return choose_size(layouts, dataclasses.replace(MEASURED, backward=backward), FAST, 2)

    assert (chosen(0.1), chosen(0.12)) == (SMALLEST, LARGEST)  # 6 of 113 ms, and of 133


def test_without_a_difference_the_largest_stays():
    assert choose_size(dict.fromkeys(SIZES, LAYERS), MEASURED, SLOW, 2) == LARGEST
