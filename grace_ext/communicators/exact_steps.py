"""Steps in which a memory needs exact sums, between those that are compressed."""

from typing import Protocol

from ..pipeline.compressor import Compressor, make_compressor
from ._alternating import Alternating
from .allreduce import Allreduce
from .base import Communicator
from .places import Place, placed


class ExactStepsMemory(Protocol):
    """What is asked about the bucket's memory, a grace_ext.memory.base.Memory."""

    def sends_exactly(self, name: str) -> bool:
        """Say whether a bucket is sent exactly in the step that begins. The answer stays the same during the step.

        Args:
            name: Name of the bucket.

        Returns:
            The same on all ranks.
        """
        raise NotImplementedError

    def forget_arrivals(self) -> None:
        """See grace_ext.memory.base.Memory."""


class ExactSteps(Alternating):
    """Exchanges one bucket by a communicator, or in float32 by the library's own allreduce where the memory wants it exact.

    In exact steps the memory's residual takes no part, and stays as it is.

    Args:
        compressed: The communicator of all other steps.
        memory: The bucket's memory.
        bucket: Name of the bucket.
    """

    def __init__(self, compressed: Communicator, memory: ExactStepsMemory, bucket: str):
        self._compressed, self._memory, self._bucket = compressed, memory, bucket
        self._allreduce, self._exact = Allreduce(), make_compressor("dense/raw")
        #: That of the compressed steps.
        self.name = compressed.name

    def _place(self, place: Place) -> None:
        self._allreduce, self._compressed = self._allreduce.at(place), placed(self._compressed, place)

    @property
    def is_exact(self) -> bool:
        """Whether the step is an exact one."""
        return self._memory.sends_exactly(self._bucket)

    @property
    def strategy(self) -> str:  # type: ignore[override]
        """How the bucket goes in this step: "float32", or the name of the communicator."""
        return "float32" if self.is_exact else self.name

    @property
    def _inner(self) -> Communicator:
        return self._allreduce if self.is_exact else self._compressed

    def _all(self) -> list[Communicator]:
        return [self._compressed, self._allreduce]

    def _compressor(self, compressor: Compressor) -> Compressor:
        return self._exact if self.is_exact else compressor

    @property
    def reports_support(self) -> bool:  # type: ignore[override]
        """As in compressed steps."""
        return self._compressed.reports_support

    @property
    def needs_memory(self) -> bool:  # type: ignore[override]
        """Whether the residual takes part in this step."""
        return not self.is_exact

    def check(self, compressor: Compressor) -> None:
        self._compressed.check(compressor)

    def memory_replaced(self) -> None:
        self._memory.forget_arrivals()
        self._compressed.memory_replaced()
