"""Memories by the names of tensors."""

import numpy as np
import pytest
from support.exchanges import arrays_of
from support.memory_exchanges import gradient, make, step, topk

import grace_ext
from grace_ext import ConfigError
from grace_ext.policy import Memories
from grace_ext.transport import InProcessGroup


def test_memories_by_name():
    memories = Memories({"*.bias": "none", ">100000": "residual:decay=0.9", "head.*": "ef21"})
    assert memories.choose("a.bias", 10) == grace_ext.memory("none")
    assert memories.choose("a.weight", 200000) == grace_ext.memory("residual:0.9")
    assert memories.choose("head.weight", 10).name == "ef21"
    assert memories.choose("b.weight", 10) == grace_ext.memory("residual")
    assert memories.choose("b.weight", 10) is memories.choose("c.weight", 10), "equal specs share one"
    for wrong, message in [
        ({"<x": "none"}, "memory: '<x' is not a size"),
        ({3: "none"}, "memory: 3 is not a name"),
        ({"*": "nothing"}, "unknown memory 'nothing'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            Memories(wrong)


def test_tensors_of_other_memories_are_in_other_buckets():
    transport = InProcessGroup(1).transport(0)
    exchange = make(transport, {"a": "none", "*": "ef21"})
    assert [[tensor.name for tensor in bucket.tensors] for bucket in exchange.buckets] == [["a"], ["b"]]
    given = gradient(0, 0)
    out, _ = step(exchange, given)
    np.testing.assert_array_equal(out, np.concatenate([topk(given[:3000], 300), topk(given[3000:], 200)]))
    assert set(arrays_of(exchange)) == {"estimate:b", "aggregate:b"}
