"""Files are there as a whole or not at all."""

import pytest

from grace_ext._util.files import atomic_write


def test_a_file_is_replaced_once_it_is_complete(tmp_path):
    path = tmp_path / "state.npz"
    path.write_text("before")
    with atomic_write(str(path)) as part:
        part.write_text("after")
        assert path.read_text() == "before" and part.parent == tmp_path
    assert path.read_text() == "after" and list(tmp_path.iterdir()) == [path]


def test_after_an_error_the_file_is_what_it_was(tmp_path):
    path = tmp_path / "state.npz"
    path.write_text("before")
    with pytest.raises(OSError, match="full"), atomic_write(path) as part:
        part.write_text("half")
        raise OSError("full")
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]
