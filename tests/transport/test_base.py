"""Handles of collectives, and wrappers that forward everything."""

import numpy as np
import pytest

from grace_ext.transport import InProcessGroup
from grace_ext.transport.base import CollectiveHandle, Transport, TransportWrapper

KINDS = {"allgather": (), "allreduce": (), "alltoall": ([8],), "broadcast": (0,)}


def alone() -> Transport:
    return InProcessGroup(1).transport(0)


def test_a_finished_collective_is_there():
    handle = CollectiveHandle.finished(np.arange(3))
    assert handle.poll() is True and handle.wait().tolist() == [0, 1, 2] and handle.padding == 0


def test_a_library_that_does_not_tell():
    assert CollectiveHandle(lambda: np.zeros(0)).poll() is None


@pytest.mark.parametrize("how", ["wait", "poll"])
def test_the_end_is_told_once(how):
    told = []
    handle = CollectiveHandle.finished(np.zeros(1)).on_end(lambda seconds, late: told.append((seconds, late)))
    getattr(handle, how)()
    handle.wait()
    handle.poll()
    assert len(told) == 1 and told[0][0] > 0 and told[0][1] is True  # it may have ended before somebody looked


def test_an_end_that_was_waited_for_is_not_late():
    told, there = [], []
    handle = CollectiveHandle(lambda: there.append(1), lambda: bool(there)).on_end(lambda _, late: told.append(late))
    assert handle.poll() is False and not told
    handle.wait()
    assert told == [False]


def test_a_wrapper_forwards_every_collective_through_one_method():
    started = []

    class Noting(TransportWrapper):
        def start_collective(self, kind, name, array, *args):
            started.append((kind, name))
            return super().start_collective(kind, name, array, *args)

    wrapper = Noting(alone())
    for kind, args in KINDS.items():
        payload = np.arange(2, dtype=np.float32) if kind == "allreduce" else np.arange(8, dtype=np.uint8)
        assert np.array_equal(getattr(wrapper, kind)(f"the {kind}", payload, *args).wait(), payload)
    assert started == [(kind, f"the {kind}") for kind in KINDS]


def test_a_wrapper_has_what_the_transport_has():
    inner = alone()
    inner.of_an_adapter = 7
    wrapper = TransportWrapper(inner)
    assert (wrapper.rank, wrapper.size, wrapper.can_fuse, wrapper.of_an_adapter) == (0, 1, True, 7)
    wrapper.hosts = (3,)
    assert inner.hosts == wrapper.hosts == (3,)
    with pytest.raises(AttributeError):
        _ = wrapper._of_nobody


@pytest.mark.parametrize("kind", ["allgather", "allreduce"])
def test_a_transport_has_to_have_its_collectives(kind):
    with pytest.raises(NotImplementedError):
        getattr(Transport(), kind)("x", np.zeros(1, np.uint8))
