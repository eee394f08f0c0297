"""Files that are there as a whole or not at all."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike) -> Iterator[Path]:
    """Write a file that replaces the one of that name once it is complete. After an exception nothing is left of it.

    Args:
        path: The file; its folder exists.

    Yields:
        The path to write to, in the same folder.
    """
    path = Path(path)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
