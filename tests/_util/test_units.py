"""Quantities as people write them on a command line."""

import pytest

from grace_ext._util import units

COUNTS = {"1": 1, "25600000": 25_600_000, "25.6e6": 25_600_000, "25.6M": 25_600_000, "2k": 2000, "1G": 10**9}


@pytest.mark.parametrize("text, number", COUNTS.items())
def test_counts(text, number):
    assert units.count(text) == number


@pytest.mark.parametrize("text", ["", "k", "0", "-1", "1.5", "0.5k ", "nan", "inf", "1e400", "3m"])
def test_what_is_no_count(text):
    with pytest.raises(ValueError):
        units.count(text)


@pytest.mark.parametrize(
    "parse, text, number",
    [
        (units.seconds, "2", 2),
        (units.seconds, "1.5s", 1.5),
        (units.seconds, "120ms", 0.12),
        (units.seconds, "3us", 3e-6),
        (units.bits_per_second, "10", 10),
        (units.bits_per_second, "9.6kbit", 9600),
        (units.bits_per_second, "100mbit", 1e8),
        (units.bits_per_second, "2.5gbit", 2.5e9),
    ],
)
def test_quantities(parse, text, number):
    assert parse(text) == pytest.approx(number, rel=1e-15)


@pytest.mark.parametrize("text", ["", "s", "0s", "-1ms", "inf", "nan", "1h", "1e999s"])
def test_what_is_no_time(text):
    with pytest.raises(ValueError):
        units.seconds(text)


def test_the_name_of_a_parser_is_what_argparse_says_of_it():
    assert units.seconds.__name__ == "time (units: s, ms, us)"
