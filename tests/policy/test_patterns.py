"""Which tensors a rule is for."""

import pytest

from grace_ext import ConfigError
from grace_ext.policy.patterns import Patterns


def found(mapping, name, size):
    return Patterns("rules", mapping, str.upper).find(name, size)


@pytest.mark.parametrize(
    "name, size, value",
    [("fc.bias", 5, "BY NAME"), ("fc.weight", 1024, "SMALL"), ("fc.weight", 1025, None), ("fc.weight", 10**6, "LARGE")],
)
def test_the_first_that_fits_decides(name, size, value):
    assert found({"*.bias": "by name", "<=1024": "small", ">=1000000": "large", "*.bias2": "never"}, name, size) == value


@pytest.mark.parametrize("limit, inside", [("<5", [4]), ("<=5", [4, 5]), (">5", [6]), (">=5", [5, 6]), (" >= 5 ", None)])
def test_sizes(limit, inside):
    if inside is not None:
        assert [size for size in (4, 5, 6) if found({limit: "x"}, "w", size)] == inside


def test_names_are_case_sensitive_and_match_as_a_whole():
    assert found({"fc.*": "x"}, "fc.weight", 1) and not found({"fc.*": "x"}, "FC.weight", 1)
    assert not found({"fc": "x"}, "fc.weight", 1)


@pytest.mark.parametrize("name", ["block[0].weight", "['a']['b']", "[", "[!x]"])
def test_the_exact_name_of_a_tensor_fits_whatever_is_in_it(name):
    """['a']['b'] is a name of the adapter for JAX."""
    assert found({"other": "x", name: "by name"}, name, 1) == "BY NAME"
    assert found({"*": "first", name: "by name"}, name, 1) == "FIRST", "the order decides here as well"
    assert not found({name: "by name"}, name + "2", 1)


def test_brackets_are_also_a_pattern():
    assert found({"block[01].*": "x"}, "block1.weight", 1) and not found({"block[01].*": "x"}, "block[01].weight", 1)


@pytest.mark.parametrize("key", ["", None, 5, "<=many", "<", ">=1e6"])
def test_keys_that_make_no_sense(key):
    with pytest.raises(ConfigError, match="rules: "):
        Patterns("rules", {key: "x"}, str)
