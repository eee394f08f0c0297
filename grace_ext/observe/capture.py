"""Saves the gradients that the compressors of a training run are given, for `python -m grace_ext bench --input FILE`.

Files never disturb a run: an error is a warning on rank 0, and ends the capture there.
"""

import os
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from .._util.files import atomic_write
from ..errors import ConfigError
from .base import warn
from .listener import BucketView

STEPS = (1, 10, 100, 1000, 10_000)


class Capture:
    """Saves rank 0's own gradients of some steps in a folder.

    A step N (counted from 0) gives N.npz: the gradients as the compressor gets them before the memory; and, where a
    memory adds something, N-compensated.npz: gradient + residual. Both hold a float32[size] by parameter name, in the
    order in which buckets carry them. A step whose gradient is not finite on some rank is left out.

    Args:
        folder: The folder, made when the first step is saved.
        steps: Numbers of the steps to save.

    Raises:
        ConfigError: A step is not a whole number from 0 on.
    """

    def __init__(self, folder: str | os.PathLike, steps: Iterable[int] = STEPS):
        self.folder = Path(folder)
        self.steps = frozenset(steps)
        if not all(isinstance(step, int) and step >= 0 for step in self.steps):
            raise ConfigError(f"capture: steps={sorted(self.steps, key=str)}; allowed: whole numbers from 0")
        self._seen: dict[str, dict[str, np.ndarray]] = {"": {}, "-compensated": {}}

    def gradient_callback(self, step: int, bucket: BucketView) -> Callable | None:
        """Return the function that sees a bucket's gradient.

        Args:
            step: Number of the step.
            bucket: The bucket.

        Returns:
            A function to call with (gradient, residual or None) before they are encoded, both float32[size] of numpy or
            torch; None if the step is not wanted.
        """
        if step not in self.steps:
            return None
        return lambda gradient, residual: self._guarded(lambda: self._see(bucket, gradient, residual))

    def end_step(self, step: int, finite: bool) -> None:
        """Write what was seen in a step.

        Args:
            step: Number of the step.
            finite: Whether the gradients of all ranks were finite.
        """
        if step in self.steps and finite:
            self._guarded(lambda: self._write(step))
        self.forget()

    def forget(self) -> None:
        """Forget what was seen and is not written."""
        for arrays in self._seen.values():
            arrays.clear()

    def _see(self, bucket: BucketView, gradient: Any, residual: Any) -> None:
        plain = np.array(_host(gradient))  # a copy: the codec works in place
        self._keep("", bucket, plain)
        if residual is not None:
            self._keep("-compensated", bucket, plain + _host(residual))

    def _keep(self, suffix: str, bucket: BucketView, flat: np.ndarray) -> None:
        ends = np.cumsum([tensor.size for tensor in bucket.tensors])[:-1]
        self._seen[suffix].update(zip((tensor.name for tensor in bucket.tensors), np.split(flat, ends), strict=True))

    def _write(self, step: int) -> None:
        plain, compensated = self._seen.values()
        self.folder.mkdir(parents=True, exist_ok=True)
        _save(self.folder / f"{step}.npz", plain)
        if compensated:
            _save(self.folder / f"{step}-compensated.npz", {**plain, **compensated})

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            # Any error, be it a full disk or a lack of memory: the other ranks are waiting for this one.
            self.steps = frozenset()
            self.forget()
            warn(f"capture of gradients in {self.folder} ends: {type(error).__name__}: {error}")


def _host(array: Any) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else array.detach().cpu().numpy()


def _save(path: Path, arrays: dict[str, np.ndarray]) -> None:
    with atomic_write(path) as part, zipfile.ZipFile(part, "w") as archive:  # np.savez cannot save a parameter called "file"
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, array, allow_pickle=False)
