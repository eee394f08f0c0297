"""The interface of memories."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .._util.rng import Stream
from .._util.shared_states import SharedStates
from ..communicators.base import Communicator, Pending
from ..communicators.factors import ShapedTensor
from ..errors import ConfigError
from ..pipeline.compressor import Compressor
from ..pipeline.square_sums import SquareSums
from ..registry import Stage, build
from ..sparsifiers.parts import SketchedParts
from .accelerator_part import AcceleratorPart
from .arrays import Arrays, NumpyArrays
from .optimizer_part import OptimizerPart
from .states import States


class Memory(Stage, OptimizerPart, AcceleratorPart):
    """What a rank remembers, by name of bucket or tensor, to make up for the errors of compression.

    There are two ways to use a memory. With those that are error feedback one can call `compensate`, compress the result,
    and call `update`. Exchanges, which can fail or turn out to be non-finite on another rank, use transactions: `begin`
    returns the residual and a buffer for the next one; `correct_gradient` may change the gradient before it is encoded;
    `on_sent` and `on_received` see what left this rank and what came; `commit` puts the next states of all names begun since
    the last commit in force, and `rollback` discards them.
    """

    kind = "memory"
    stateful = False
    takes_lent_buffers = False  #: Whether `begin` can be lent a buffer for the next state, and `settle` gives one back.
    #: The states that are kept, by field; set in __init__ by memories that keep some.
    states: dict[str, States] = {}
    #: The fields whose sum over ranks has to be preserved when ranks change. Of the others, the mean counts.
    summed_fields: frozenset[str] = frozenset({"residual"})
    #: States by tensor that are the same on all ranks, by field; set in __init__ by memories that keep some.
    shared: dict[str, SharedStates] = {}
    #: Whether a residual is of gradients, so that the energies of both tell how much waits.
    residual_is_of_gradients = True
    supports_rows = False  #: Whether it can keep states for the rows of a table.
    #: Whether `correct_gradient`, `on_sent` or `on_received` do anything; see `works_at_positions`.
    has_hooks = False
    #: Whether `correct_gradient` is one of the hooks that do something. Then gradients need not lie in one array.
    corrects_gradient = False
    #: Whether the hooks also work in steps in which communicator "auto" sends what they give whole, without containers.
    hooks_work_dense = False
    has_exact_steps = False  #: Whether buckets are sent exactly in the steps for which `sends_exactly` says so.
    #: Whether a step needs the gradients of all ranks, so that none may leave the training loop before the others.
    needs_all_ranks = False
    #: Whether containers hold differences from an estimate of this rank's gradient, its state "estimate", which adds them up.
    sends_differences = False
    #: Whether communicators that put signs to the vote can be used. What a vote leaves out is in no gradient's units.
    suits_votes = False
    #: Whether the result need not be the sum of what the ranks send: it is not where elements are divided by their senders.
    suits_sender_means = False

    def check(self, compressor: Compressor, communicator: Communicator) -> None:
        """Check that this memory can be used with a compressor and a communicator.

        Args:
            compressor: The bucket's compressor.
            communicator: The bucket's communicator.

        Raises:
            ConfigError: The combination makes no sense.
        """
        if communicator.votes and not self.suits_votes:
            raise ConfigError(
                f"memory {self.name!r} cannot make up for what communicator {communicator.name!r} leaves out, which puts signs "
                f"to the vote: use memory 'none' or 'signum'"
            )
        if communicator.divides_by_senders and not self.suits_sender_means:
            raise ConfigError(
                f"memory {self.name!r} needs the sum of what the ranks send, which communicator {communicator.name!r} does not "
                f"give: use communicator allgather, or one of the memories none, residual, momentum, dgc and demo"
            )
        if self.stateful and compressor.unbiased:
            raise ConfigError(
                f"{str(compressor.sparsifier)!r} is unbiased already, and memory {self.name!r} "
                f"would correct it once more: use memory 'none', or unbiased=false"
            )

    @property
    def sees_results(self) -> bool:
        """Whether `on_received` does something, so that results have to lie in one array."""
        return type(self).on_received is not Memory.on_received

    def for_compressor(self, compressor: Compressor) -> "Memory":
        """Return the memory for buckets with a compressor.

        Args:
            compressor: The bucket's compressor.

        Returns:
            A memory, this one in most cases. For tensors that are sent exactly it is one that keeps nothing, except a momentum
            that it has to apply.
        """
        return build("memory", "none") if compressor.exact else self

    def for_rows(self) -> "Memory":
        """Return the memory for tables whose gradients come as rows.

        Returns:
            A memory, this one in most cases, which then has to support rows.
        """
        return self

    def compensate(self, name: str, gradient: np.ndarray) -> np.ndarray:
        """Return what is to be compressed in place of a gradient.

        Args:
            name: Name of the tensor.
            gradient: float32[d].

        Returns:
            float32[d]; never the gradient's own buffer if it differs from it.

        Raises:
            ConfigError: This memory works only inside an exchange, or the gradient has not one dimension.
        """
        if self.stateful or self.has_hooks:
            raise ConfigError(f"memory {self.name!r} works only inside an exchange: use it there, or memory 'residual'")
        return gradient

    def update(self, name: str, compensated: np.ndarray, transmitted: np.ndarray) -> None:
        """Remember what was not transmitted.

        Args:
            name: Name of the tensor.
            compensated: What was compressed, float32[d].
            transmitted: What receivers decode, float32[d].

        Raises:
            ConfigError: An array has not one dimension, or they differ in size.
        """

    def begin(
        self, name: str, size: int, arrays: Arrays = NumpyArrays, lent: np.ndarray | None = None
    ) -> tuple[Any, Any] | None:
        """Begin a transaction for one name.

        Args:
            name: Name of the bucket.
            size: Number of its elements.
            arrays: The kind of arrays that the states are kept in.
            lent: A buffer for the next residual, float32[size], until `settle`; None for one of its own.

        Returns:
            The residual and a buffer for the next one, both float32[size] of that kind, or None if nothing is to be added. If a
            buffer was lent, the residual can be a PackedVector.
        """
        return None

    def settle(self, name: str, keep: bool) -> np.ndarray:
        """Put the next residual of a name whose `begin` was lent a buffer in force, or discard it; before `commit`.

        Args:
            name: Name of the bucket.
            keep: Whether it comes into force.

        Returns:
            float32[size], undefined, which is the caller's again: the buffer, or another one in its place.
        """
        raise NotImplementedError

    def begin_rows(
        self, name: str, size: int, rows: np.ndarray, width: int, arrays: Arrays = NumpyArrays
    ) -> tuple[Any, Any] | None:
        """Begin a transaction for some rows of a table. Its cost depends on their number only. Only if `supports_rows`.

        Args:
            name: Name of the bucket.
            size: Number of elements of the table.
            rows: int64[r], ascending, without repetition; `commit` changes these rows.
            width: Number of elements of a row.
            arrays: The kind of arrays that the states are kept in.

        Returns:
            The residual and a buffer for the next one, both float32[r * width] of that kind, or None if nothing is to be added.
        """
        return None

    def set_tensors(self, name: str, tensors: Sequence[ShapedTensor]) -> None:
        """Note which tensors a bucket has, between steps.

        Args:
            name: Name of the bucket.
            tensors: The tensors, in the order in which the bucket's vector holds them.
        """

    def shared_size(self, tensor: ShapedTensor) -> int:
        """Return the size of a tensor's arrays in `shared`.

        Args:
            tensor: The tensor.

        Returns:
            The number of elements.
        """
        return 0

    def sketch_size(self, tensors: int) -> int:
        """Return how many numbers of a bucket the ranks sum beside what they send.

        Args:
            tensors: Number of the bucket's tensors.

        Returns:
            The number, 0 for none.
        """
        return 0

    def on_sketch(self, name: str, mean: np.ndarray) -> None:
        """See the sketch of the result, before `on_received`.

        Args:
            name: Name of the bucket.
            mean: float32[sketch_size], weighted as the result.
        """

    def sends_exactly(self, name: str) -> bool:
        """Say whether a bucket is sent exactly in the step that begins, the same on all ranks. Only if `has_exact_steps`.

        What is exchanged then is what `correct_gradient` returns, in float32 and without the residual. The answer stays the
        same during an exchange.

        Args:
            name: Name of the bucket.

        Returns:
            The answer.
        """
        return False

    def correct_gradient(
        self, name: str, parts: Sequence[np.ndarray], out: np.ndarray, ranks: int, stream: Stream, density: float
    ) -> tuple[np.ndarray | list[np.ndarray], SketchedParts | None]:
        """Compute what is encoded in the place of this rank's gradient. Only if `corrects_gradient`.

        Args:
            name: Name of the bucket.
            parts: The gradient, one vector float32 for each of the bucket's tensors. They are only read, unless they are those
                of `out`.
            out: float32[d], to write to. The parts may lie in it, where they are the parts of `out` itself.
            ranks: Number of ranks.
            stream: The random stream of the bucket in this step.
            density: That of the spec, before a schedule changes it; 0 if it has none, 1 where communicator "auto" sends all.

        Returns:
            What is encoded, float32[d]: `out`, or an array or parts that must stay as they are. And the gradient's parts, whose
            sketches are sketch_size numbers, or None if that is 0; they may be what is encoded.
        """
        raise NotImplementedError

    def on_sent(self, name: str, pending: Pending) -> None:
        """See what this rank sends, in the thread that has encoded it.

        Args:
            name: Name of the bucket.
            pending: The exchange under way.
        """

    def square_sums(self, name: str) -> SquareSums | None:
        """Say what is to be computed of the result while it is written.

        Args:
            name: Name of the bucket, whose result is about to come.

        Returns:
            Sums of squares that a communicator fills in if it can, or None if nothing is wanted.
        """
        return None

    def on_received(self, name: str, out: np.ndarray, scale: float) -> None:
        """See the result of an exchange, and change it in the same way on all ranks.

        Args:
            name: Name of the bucket.
            out: float32[d], finite: the sum over ranks of what they sent, times scale / ranks. It may be changed in place.
            scale: Factor of the mean over ranks.
        """

    def commit(self) -> None:
        """Put the next states of all begun names in force."""
        for states in self.states.values():
            states.commit()

    def rollback(self) -> None:
        """Keep the states as they were, and discard the next ones."""
        for states in self.states.values():
            states.rollback()

    def state_dict(self, take: bool = False) -> dict[str, dict[str, np.ndarray]]:
        """Copy the states.

        Args:
            take: Whether to remove them, which needs no copies.

        Returns:
            name -> field -> float32[size], a numpy array.
        """
        found: dict[str, dict[str, np.ndarray]] = {}
        for field, states in self.states.items():
            for name, array in (states.take() if take else states.copies()).items():
                found.setdefault(name, {})[field] = array
        return found

    def load_state_dict(self, state: dict[str, dict[str, np.ndarray]], copy: bool = True) -> None:
        """Replace the states. Fields that this memory does not have are left out.

        Args:
            state: name -> field -> float32[size].
            copy: Whether the arrays stay the caller's.
        """
        for field, states in self.states.items():
            states.load({name: fields[field] for name, fields in state.items() if field in fields}, copy)

    def redistribute(self, states: list[dict[str, np.ndarray]], ranks: int) -> dict[str, np.ndarray]:
        """Compute the state of ranks that take over from others.

        The sum over ranks of `summed_fields` stays what it was; of other fields, each rank gets the mean.

        Args:
            states: The states of one name on the former ranks: field -> float32[d].
            ranks: Number of ranks from now on.

        Returns:
            The state of each of them: field -> float32[d].
        """
        fields = {field: [state[field] for state in states if field in state] for field in self.states}
        return {
            field: np.sum(arrays, axis=0) / np.float32(ranks if field in self.summed_fields else len(states))
            for field, arrays in fields.items()
            if arrays
        }
