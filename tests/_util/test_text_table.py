"""Tables for the terminal."""

import pytest

from grace_ext._util.text_table import text_table


def test_text_begins_at_the_left_and_numbers_end_at_the_right():
    rows = [("method", "ms", "note"), ("a", "12.5", "x"), ("longer name", "3", "")]
    assert text_table(rows, (0, 2)) == "method         ms  note\na            12.5  x\nlonger name     3"
    assert text_table([], (0,)) == ""


def test_rows_of_different_lengths_are_no_table():
    with pytest.raises(ValueError, match="zip"):
        text_table([("a", "b"), ("c",)], (0,))
