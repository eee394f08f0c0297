"""A bucket refuses what it could not carry out, and takes gradients in each form that `pack` can give them in."""

import numpy as np
import pytest
from support.exchanges import TENSORS, arrays_of, make
from support.memory_exchanges import gradient

import grace_ext
from grace_ext import ConfigError
from grace_ext.exchange import buckets
from grace_ext.exchange.buckets import Bucket, Tensor
from grace_ext.memory.none import NoMemory
from grace_ext.pipeline.spec import parse_stage
from grace_ext.transport import InProcessGroup


def test_a_bucket_refuses_an_impossible_communicator():
    with pytest.raises(ConfigError, match="allgather"):
        Bucket("b", TENSORS, grace_ext.compressor("topk:0.1"), parse_stage("communicator", "allreduce"), NoMemory())


@pytest.mark.parametrize(
    "size, spec, communicator, text",
    [
        (2**31, "topk:0.01/rice", "allgather", "2147483648 elements is too large for one container"),
        (2**30, "dense/raw", "allgather", "'huge'.*: a section of 4294967296 bytes is too large"),
        (2**30, "topk:1.0", "allgather", "split the tensor"),
        (2**30 - 1, "dense/raw", "allgather", None),
        (2**31 - 1, "topk:0.01/rice", "allgather", None),
        (2**31, "dense/raw", "allreduce", None),
    ],
)
def test_a_tensor_that_no_container_holds_is_refused_when_the_bucket_is_built(size, spec, communicator, text):
    def build():
        return Bucket(
            "b", [Tensor("huge", size, 1)], grace_ext.compressor(spec), parse_stage("communicator", communicator), NoMemory()
        )

    if text is None:
        assert build().size == size
        return
    with pytest.raises(ConfigError, match=text):
        build()


def pack_in(form, given):
    """pack() that gives a copy of the gradient in one of the forms, and what it borrowed."""
    borrowed = [given.copy()] if form == "array" else np.split(given.copy(), [3000])
    if form == "copied":
        return lambda out: np.copyto(out, given), []
    return lambda out: borrowed if form == "parts" else borrowed[0], borrowed


@pytest.mark.parametrize("communicator", ["allgather", "sharded", "hierarchical"])
@pytest.mark.parametrize(
    "memory", ["residual", "none", "momentum:0.5", "muon", "dgc:masking=false", "dgc:masking=false:nesterov=true"]
)
def test_a_gradient_that_stays_where_it_is_gives_the_same_and_is_left_alone(memory, communicator):
    def run(form):
        exchange = make(InProcessGroup(1).transport(0), communicator=communicator, memory=memory)
        bucket, outs = exchange.buckets[0], []
        for i in range(3):
            given = gradient(0, i)
            pack, borrowed = pack_in(form, given)
            exchange.start(bucket, pack)
            out = np.empty(bucket.size, np.float32)
            exchange.finish(bucket, out)
            assert exchange.end_step()
            assert not borrowed or np.array_equal(np.concatenate(borrowed), given)
            outs.append(out)
        return outs, arrays_of(exchange)

    expected, state = run("copied")
    takes_parts = make(InProcessGroup(1).transport(0), communicator=communicator, memory=memory).buckets[0].takes_parts
    assert takes_parts == (memory != "none" and (memory != "residual" or communicator != "hierarchical"))
    for form in ("array", "parts") if takes_parts else ("array",):
        outs, kept = run(form)
        assert all(map(np.array_equal, expected, outs))
        assert state.keys() == kept.keys() and all(np.array_equal(state[key], kept[key]) for key in state)


@pytest.mark.parametrize(
    "memory, communicator, spec, able",
    [
        ("residual", "allgather", "topk:0.01/rice/qsgd:7", True),
        ("none", "allgather", "topk:0.01/rice/qsgd:7", True),
        ("momentum:0.5", "allgather", "topk:0.01/rice/qsgd:7", True),
        ("adam", "allgather", "topk:0.01/rice/qsgd:7", False),
        ("residual", "allgather", "dct/topk:0.01/rice/raw", False),
        ("none", "allgather", "dense/deflate", False),
        ("residual", "senders", "topk:0.01/rice/qsgd:7", False),
        ("residual", "sharded", "topk:0.01/rice/qsgd:7", True),
        ("none", "sharded", "topk:0.01/rice/qsgd:7", True),
        ("adam", "sharded", "topk:0.01/rice/qsgd:7", False),
        ("residual", "hierarchical", "topk:0.01/rice/qsgd:7", False),
    ],
)
def test_a_result_in_parts_is_that_in_one_array(memory, communicator, spec, able, monkeypatch):
    monkeypatch.setattr(buckets, "_WORTH_PARTS", 2500)

    def run(in_parts):
        exchange = make(InProcessGroup(1).transport(0), spec, communicator=communicator, memory=memory)
        bucket, outs = exchange.buckets[0], []
        assert bucket.writes_parts == able
        for i in range(3):
            given = gradient(0, i)
            exchange.start(bucket, lambda out, given=given: given)
            out = given if in_parts else np.empty(bucket.size, np.float32)
            exchange.finish(bucket, np.split(out, [3000]) if in_parts else out)
            assert exchange.end_step()
            outs.append(out)
        return outs, arrays_of(exchange)

    expected, state = run(False)
    if able:
        outs, kept = run(True)
        assert all(map(np.array_equal, expected, outs))
        assert state.keys() == kept.keys() and all(np.array_equal(state[key], kept[key]) for key in state)


@pytest.mark.parametrize("memory", ["ef21:0.5", "adam", "muon", "dgc"])
def test_parts_give_what_a_whole_gradient_does(memory):
    def run(form):
        exchange = make(InProcessGroup(1).transport(0), memory=memory)
        for i in range(3):
            pack, _ = pack_in(form, gradient(0, i))
            exchange.start(exchange.buckets[0], pack)
            exchange.finish(exchange.buckets[0], np.empty(5000, np.float32))
            exchange.end_step()
        return arrays_of(exchange)

    expected = run("copied")
    for form in ("array", "parts"):
        found = run(form)
        assert expected.keys() == found.keys() and all(np.array_equal(expected[key], found[key]) for key in found)
