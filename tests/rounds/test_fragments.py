"""How a model is split."""

import pytest

from grace_ext import ConfigError
from grace_ext.exchange.buckets import Tensor
from grace_ext.rounds.fragments import split

TENSORS = [Tensor(name, size, 1) for name, size in (("a", 40), ("b", 10), ("c", 10), ("d", 20), ("e", 40), ("f", 5))]


def names(parts):
    return ["".join(tensor.name for tensor in part) for part in parts]


@pytest.mark.parametrize(
    "count, wanted", [(1, ["abcdef"]), (2, ["abc", "def"]), (3, ["a", "bcd", "ef"]), (6, list("abcdef"))]
)
def test_parts_follow_the_model_and_are_about_equal(count, wanted):
    assert names(split(TENSORS, count)) == wanted


def test_a_large_tensor_at_the_end_leaves_nobody_without():
    tensors = [Tensor("a", 1, 1), Tensor("b", 1, 1), Tensor("c", 1000, 1)]
    assert names(split(tensors, 3)) == ["a", "b", "c"] and names(split(tensors[::-1], 3)) == ["c", "b", "a"]


def test_patterns_choose_strides():
    assert names(split(TENSORS, [["a", "[cd]"], ["b", "e"], ["*"]])) == ["acd", "be", "f"]


@pytest.mark.parametrize(
    "fragments, said",
    [
        (0, "fragments=0"),
        (7, "1 to the number of tensors, 6"),
        ([["a"]], "fits 'b'"),
        ([["*"], ["a"]], "nothing"),
        (["*"], "a list"),
    ],
)
def test_what_leaves_something_out_is_refused(fragments, said):
    with pytest.raises(ConfigError, match=said):
        split(TENSORS, fragments)
