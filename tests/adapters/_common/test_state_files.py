"""Saved states in files of NumPy's; that they are gathered in pieces is in _torch/test_session.py."""

import io

import numpy as np

from grace_ext.adapters._common import state_files

STATE = {
    "version": 1,
    "order": ["a", "b.c"],
    "nothing": None,
    "memories": {3: {"residual": {"a": np.arange(5, dtype=np.float32), "b.c": np.zeros((2, 0), np.float32)}}},
}


def test_a_state_is_read_as_it_was_written(tmp_path):
    for file in (io.BytesIO(), tmp_path / "state.npz"):
        if isinstance(file, io.BytesIO):
            state_files.write(file, STATE)
            file.seek(0)
        else:
            with open(file, "wb") as stream:
                state_files.write(stream, STATE)
        read = state_files.with_numbered_ranks(state_files.read(file))
        found, given = read.pop("memories")[3]["residual"], STATE["memories"][3]["residual"]
        assert read == {name: value for name, value in STATE.items() if name != "memories"}
        assert found.keys() == given.keys()
        assert all(found[name].dtype == np.float32 and np.array_equal(found[name], given[name]) for name in given)


def test_each_rank_is_told_its_own_bytes_only():
    class Two:
        size = 2

        def allgather(self, name, payload):
            from grace_ext.transport import CollectiveHandle

            return CollectiveHandle.finished(np.concatenate([payload, np.array([3], "<i8").view(np.uint8)]))

        def gather_to(self, name, payload, to):
            return [payload, np.array([7, 8, 9], np.uint8)]

    first, second = state_files.gather_bytes(Two(), "state", np.array([1, 2], np.uint8), 0)
    assert first.tolist() == [1, 2] and second.tolist() == [7, 8, 9]
