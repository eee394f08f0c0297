"""Buckets: tensors that are compressed and exchanged as one vector."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from .._util.numerics import non_finite_allowed
from .._util.rng import Stream
from ..communicators.base import Communicator, Pending, wait, wait_for
from ..errors import ConfigError, ContainerError
from ..memory.base import Memory
from ..memory.packed_vector import PackedVector
from ..pipeline import container
from ..pipeline.compressor import Compressor
from ..transport.base import Transport

_WORTH_PARTS = 4096  # elements of a tensor, on average


@dataclasses.dataclass
class Tensor:
    """What bucketing knows of a parameter.

    Attributes:
        name: Name of the tensor, unique in the exchange.
        size: Number of elements.
        ndim: Number of dimensions, by which rules choose a spec.
        device: Where the gradient lives; tensors of different devices are in different buckets.
        shape: The dimensions; by default (size,), so that low-rank methods see a vector.
        common_name: Name of the tensor on all ranks, where `name` may differ between processes; by default `name`.

    Raises:
        ConfigError: The shape does not have `size` elements.
    """

    name: str
    size: int
    ndim: int
    device: str = "cpu"
    shape: tuple[int, ...] = ()
    common_name: str = ""

    def __post_init__(self) -> None:
        self.common_name = self.common_name or self.name
        self.shape = tuple(self.shape) or (self.size,)
        if math.prod(self.shape) != self.size:
            raise ConfigError(f"tensor {self.name!r} of shape {self.shape} does not have {self.size} elements")


class Lender(Protocol):
    """Who lends a buffer to a bucket.

    Attributes:
        out: float32[size]. Whoever starts a bucket that `uses_loan` needs nothing of it until the step has ended. Then it is
            another array, which holds the result.
    """

    out: Any


@dataclasses.dataclass
class Bucket:
    """Tensors that are compressed and exchanged as one float32 vector.

    Attributes:
        name: Name of the bucket, the same on all ranks.
        tensors: The tensors, in the order in which the vector holds them.
        compressor: The compressor of the current step.
        communicator: How the vector is exchanged and reduced.
        memory: The memory that the tensors share.
        may_bypass: Whether the adapter could reduce the tensors as they are; see Exchange.bypass_dtype.
        lender: Who lends the bucket a buffer in each step, which spares one in each bucket; None for nobody. See `uses_loan`.

    Raises:
        ConfigError: Compressor, memory and communicator do not fit together, or no container holds so many elements.
    """

    name: str
    tensors: list[Tensor]
    compressor: Compressor
    communicator: Communicator
    memory: Memory
    may_bypass: bool = dataclasses.field(default=False, kw_only=True)
    lender: "Lender | None" = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        self.sizes = tuple(tensor.size for tensor in self.tensors)
        self.size = sum(self.sizes)
        self.device = self.tensors[0].device
        #: The compressor before schedules change its options; `compressor` is the one of the step.
        self.declared = self.compressor
        if self.communicator.name != "allreduce" and self.compressor.lowrank is None:  # it sends containers
            container.check_elements(self.size)
            most = self.size if self.compressor.dense else round(self.compressor.density * self.size)
            container.check_section(4 * most, f"bucket {self.name!r} ({self.tensors[0].name!r}): a section")
        self.communicator.check(self.compressor)
        self.memory.check(self.compressor, self.communicator)

    @functools.cached_property
    def _gradient(self) -> np.ndarray:
        """Where pack writes to if the memory has no array for it."""
        return np.empty(self.size, np.float32)

    def start(
        self,
        transport: Transport,
        pack: Callable[[np.ndarray], Any],
        stream: Stream,
        on_gradient: Callable | None = None,
        on_compensated_gradient: Callable | None = None,
    ) -> Pending:
        """Encode the gradient and start to send it.

        Args:
            transport: The transport of this bucket in this step.
            pack: pack(out) writes the gradient to out, float32[size]; or it returns the gradient, which spares a copy:
                float32[size] in an array that stays as it is until `finish`, or, if the bucket `takes_parts`, a list with a
                vector float32 for each tensor.
            stream: The random stream of the bucket in this step.
            on_gradient: on_gradient(gradient, residual or None), called before the memory changes the gradient; None for
                nobody.
            on_compensated_gradient: The same, called after the memory has changed the gradient and before it is encoded.

        Returns:
            The exchange under way.
        """
        lender = self.lender if self.uses_loan else None
        lent = None if lender is None else lender.out
        state = self.memory.begin(self.name, self.size, lent=lent) if self.communicator.needs_memory else None
        gradient = self._gradient if state is None else state[1]
        packed, sketched = pack(gradient), None
        packed = gradient if packed is None else packed
        if on_gradient:
            on_gradient(_joined(packed), state and _unpacked(state[0]))
        if self.memory.corrects_gradient:
            parts = packed if isinstance(packed, list) else self._split(packed)
            packed, sketched = self.memory.correct_gradient(
                self.name, parts, gradient, transport.size, stream, self._density
            )
        given = self._own(packed, gradient, keeps=state is not None)
        if sketched is not None and given is not sketched:
            sketched.complete()
        if on_compensated_gradient:
            on_compensated_gradient(_joined(given), state and _unpacked(state[0]))
        if state is not None and isinstance(state[0], PackedVector):
            given, state = _added(given, *state)
        pending = self.communicator.start(transport, self.name, self.compressor, given, state, stream, self.sizes)
        pending.lender = lender
        self.memory.on_sent(self.name, pending)
        self._start_sketch(pending, transport, None if sketched is None else sketched.complete())
        return pending

    @property
    def uses_loan(self) -> bool:
        """Whether what the lender has lent is used in this step, so that it is `settle` that gives the result.

        The memory's next state is written to the lent buffer. When it is known that the step counts, that is the state, and the
        result takes the place of the state before. So a bucket has two arrays, and not one for each of the three.
        """
        able = self.communicator.needs_memory and self.communicator.decodes_later and self.memory.takes_lent_buffers
        return able and self.lender is not None

    @property
    def takes_parts(self) -> bool:
        """Whether the gradient need not lie in one array in this step.

        The memory makes something else of it, or it is added to the residual while elements are selected.
        """
        return self.memory.corrects_gradient or self.memory.stateful and self._encodes_parts

    @property
    def wants_parts(self) -> bool:
        """Whether it `takes_parts`, and the tensors are so large that parts cost less than a copy of them in one array."""
        return self._is_worth_parts and self.takes_parts

    @property
    def _is_worth_parts(self) -> bool:
        return self.size >= _WORTH_PARTS * len(self.tensors)

    @property
    def writes_parts(self) -> bool:
        """Whether the result need not lie in one array in this step: `finish` takes a list with a vector for each tensor, too.

        Only where that costs less than a copy, and while the bucket uses no loan.
        """
        sparse = not self.compressor.dense and self.compressor.transform is None
        return sparse and self._is_worth_parts and self.communicator.writes_parts and not self.memory.sees_results

    @property
    def _encodes_parts(self) -> bool:
        return self.communicator.needs_memory and self.communicator.takes_parts(self.compressor)

    @property
    def _density(self) -> float:
        """See Memory.correct_gradient."""
        return 1.0 if self.communicator.sends_whole else self.declared.density

    def _split(self, gradient: np.ndarray) -> list[np.ndarray]:
        """The parts of a vector, by tensor."""
        return np.split(gradient, np.cumsum(self.sizes)[:-1])

    def _own(self, borrowed: Any, buffer: np.ndarray, keeps: bool) -> Any:
        """What the communicator may have: what is borrowed, an array or a list of parts, if it takes that and leaves it as it is;
        or the buffer with a copy. keeps: whether there is a residual."""
        if isinstance(borrowed, list) and keeps and self._encodes_parts:
            return borrowed
        if isinstance(borrowed, list) and len(borrowed) == 1:
            borrowed = borrowed[0]
        if isinstance(borrowed, list):
            if not (borrowed and np.may_share_memory(borrowed[0], buffer)):  # else they are its own parts
                np.concatenate(borrowed, out=buffer)
            return buffer
        if borrowed is buffer or self.communicator.preserves_input:
            return borrowed
        np.copyto(buffer, borrowed)
        return buffer

    @functools.cached_property
    def _sketch_size(self) -> int:
        return self.memory.sketch_size(len(self.tensors))

    def _start_sketch(self, pending: Pending, transport: Transport, sketch: np.ndarray | None) -> None:
        """Gather the memory's sketches of all ranks, beside what is under way. None: this rank has nothing.

        They are summed in the order of ranks, so that a training that is repeated gives the same bits; the order of an
        allreduce can depend on what a library has fused it with.
        """
        if self._sketch_size:
            payload = np.empty(0, np.uint8) if sketch is None else sketch.view(np.uint8)
            pending.sketch = transport.allgather(sketch_name(self.name), payload)
            pending.wire_bytes += payload.nbytes

    def _receive_sketch(self, pending: Pending, weight: float) -> None:
        """Show the memory the weighted sum of all ranks' sketches, if there are some."""
        if pending.sketch is not None:
            sketch = self._sum_of_sketches(wait_for(pending, pending.sketch))
            pending.sketch = None  # which must not be polled any more
            self.memory.on_sketch(self.name, sketch * np.float32(weight))

    def _sum_of_sketches(self, received: np.ndarray) -> np.ndarray:
        if received.size % (4 * self._sketch_size):
            raise ContainerError(
                f"{self.name!r}: {received.size} bytes are no sketches of {4 * self._sketch_size} bytes each"
            )
        with non_finite_allowed():
            return received.copy().view(np.float32).reshape(-1, self._sketch_size).sum(axis=0, dtype=np.float32)

    def start_empty(self, transport: Transport, stream: Stream) -> Pending:
        """Take part with nothing. The memory keeps what it has.

        Args:
            transport: The transport of this bucket in this step.
            stream: The random stream of the bucket in this step.

        Returns:
            The exchange under way.
        """
        pending = self.communicator.start_empty(transport, self.name, self.compressor, self.size, stream, self.sizes)
        pending.gradient_bytes = 0
        self._start_sketch(pending, transport, None)
        return pending

    def advance(self, pending: Pending, transport: Transport) -> None:
        """Start the next collective, if there is one that needs the result of the one before. `finish` does it otherwise.

        Args:
            pending: The exchange under way.
            transport: The exchange's transport.
        """
        self.communicator.advance(pending, transport)

    def finish(self, pending: Pending, transport: Transport, out: Any, weight: float) -> bool:
        """Wait for the weighted sum over ranks, or for what `settle` will make it of.

        Args:
            pending: The exchange under way.
            transport: The exchange's transport.
            out: float32[size], which the sum is written to, or vectors if the bucket `writes_parts`; not used if `pending` has a
                lender.
            weight: Factor of the sum.

        Returns:
            False if some rank's gradient was not finite.
        """
        if pending.bypasses:
            wait(pending)
            return True
        pending.squares = self.memory.square_sums(self.name)
        if pending.lender is None:
            finite = self.communicator.finish(pending, transport, out, weight)
        else:
            finite = self.communicator.receive(pending, transport, self.size)
        self._receive_sketch(pending, weight)
        if finite and pending.lender is None:
            self.memory.on_received(self.name, out, weight * transport.size)
        return finite

    def settle(self, pending: Pending, transport: Transport, weight: float, finite: bool) -> None:
        """Write the weighted sum over ranks, when it is known whether the step counts. Only if `pending` has a lender.

        Args:
            pending: The exchange, which `finish` has received.
            transport: The exchange's transport.
            weight: Factor of the sum.
            finite: Whether the gradients of all ranks and buckets were finite. If not, the memory keeps its state.
        """
        out = pending.lender.out = self.memory.settle(self.name, keep=finite)
        self.communicator.decode(pending, out, weight)
        if finite:
            self.memory.on_received(self.name, out, weight * transport.size)


def _unpacked(residual: np.ndarray | PackedVector) -> np.ndarray:
    return residual.unpacked(residual.empty(len(residual))) if isinstance(residual, PackedVector) else residual


def _added(gradient: np.ndarray | list[np.ndarray], residual: PackedVector, out: np.ndarray) -> tuple[np.ndarray, tuple]:
    """Write gradient + residual to the buffer for the next residual; returns it, and what the encoder is given in place of both."""
    if isinstance(gradient, list):
        np.concatenate(gradient, out=out)
    elif not np.may_share_memory(gradient, out):
        np.copyto(out, gradient)
    residual.add_to(out)
    return out, (None, out)


def _joined(gradient: np.ndarray | list[np.ndarray]) -> np.ndarray:
    return np.concatenate(gradient) if isinstance(gradient, list) else gradient


def sketch_name(bucket: str) -> str:
    """Name the collective of a bucket's sketches.

    Args:
        bucket: Name of the bucket.

    Returns:
        The name.
    """
    return f"{bucket}.sketch"
