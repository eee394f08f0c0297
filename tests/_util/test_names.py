"""Names and patterns."""

import pytest

from grace_ext._util.names import fits


@pytest.mark.parametrize(
    "name, patterns, fitting",
    [
        ("a.bias", ["*.bias"], True),
        ("a.bias", ["*.weight", "a.*"], True),
        ("a.Bias", ["*.bias"], False),
        ("block[0].weight", ["block[0].weight"], True),
        ("block[0].weight", ["block[[]0].*"], True),
        ("block0.weight", ["block[0].weight"], True),
        ("block1.weight", ["block[0].weight"], False),
        ("['a']['b']", ["['a']['b']"], True),
        ("a", [], False),
    ],
)
def test_a_pattern_or_an_exact_name_fits(name, patterns, fitting):
    assert fits(name, patterns) == fitting
