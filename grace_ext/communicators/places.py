"""Where gradients lie while communicators encode them and sum containers."""

import copy
from collections.abc import Sequence
from typing import Any, Protocol, Self

import numpy as np

from .._util.numerics import non_finite_allowed
from .._util.rng import Stream
from .._util.scratch import scratch
from ..kernels import NON_FINITE, max_magnitude
from ..pipeline.compressor import Compressor
from ..pipeline.container import Container
from ..pipeline.decoder import add_all, decode_sum
from ..pipeline.parts_decoder import decode_sum_to_parts
from ..pipeline.square_sums import SquareSums
from ..transport.base import Transport
from .reducible import from_reducible, to_reducible
from .slices import in_slice


class Place(Protocol):
    """A kind of place. Adapters for accelerators have classes of their own; on all of them the bytes and bits are those of the host.

    Arrays are float32 and of the place; they are sliced as numpy's, and a slice can be set to a number.
    """

    def empty(self, what: str, size: int) -> Any:
        """Make a scratch array of the thread.

        Args:
            what: What it is for; the next one for the same may take its place.
            size: Number of elements.

        Returns:
            An array of this place, float32[size].
        """

    def zeros(self, size: int) -> Any:
        """Make an array of zeros.

        Args:
            size: Number of elements.

        Returns:
            An array of this place, float32[size].
        """

    def add(self, a: Any, b: Any, out: Any) -> Any:
        """Add two arrays.

        Args:
            a: float32[n].
            b: float32[n].
            out: Output, float32[n]; it may be one of them.

        Returns:
            `out`.
        """

    def encode(
        self, compressor: Compressor, gradient: Any, stream: Stream, *, state: tuple | None, sizes: tuple[int, ...] | None
    ) -> Any:
        """Encode gradient + residual.

        Args:
            compressor: The compressor.
            gradient: float32[n].
            stream: The random stream.
            state: The residual and a buffer for the next one, both float32[n], or None. If it lies elsewhere than on the host, the
                gradient is that buffer, or a place may know states in fewer bits.
            sizes: Numbers of elements of the tensors; None for a single one.

        Returns:
            What grace_ext.pipeline.encoded.Encoded tells of the container: `blob`, `seconds`, `index_codec`, `non_finite` and
            `support`.
        """

    def encode_in_place(self, compressor: Compressor, summed: Any, stream: Stream, *, sizes: tuple[int, ...] | None) -> Any:
        """Encode a sum, and leave in it what the container does not carry.

        Args:
            compressor: The compressor.
            summed: float32[n], overwritten.
            stream: The random stream.
            sizes: See `encode`.

        Returns:
            See `encode`.
        """

    def add_all(self, containers: list[Container], accumulator: Any) -> None:
        """Add containers to an array, one after the other. One that is not finite makes all elements NaN.

        Args:
            containers: Parsed containers of n elements each.
            accumulator: float32[n], changed.

        Raises:
            ContainerError: One of them is damaged.
        """

    def decode_slices(self, slices: Sequence[tuple[slice, list[Container]]], out: Any, weight: float) -> None:
        """Write weight * (the sum of a slice's containers) to each slice of an array.

        Args:
            slices: The slices, which cover the array, each with its containers, all of them finite.
            out: Output, float32[d]; on the host also vectors that together are it.
            weight: Factor of the sums.

        Raises:
            ContainerError: One of them is damaged.
        """

    def decode_sum(self, containers: list[Container], out: Any, weight: float, squares: SquareSums | None) -> None:
        """Write weight * (the sum of containers), each element summed in the order of the list.

        Args:
            containers: Parsed containers of d elements each. If one is not finite, all elements become NaN.
            out: Output, float32[d].
            weight: Factor of the sum.
            squares: See grace_ext.pipeline.decoder.decode_sum.

        Raises:
            ContainerError: One of them is damaged.
        """

    def to_reducible(self, gradient: Any, state: tuple | None, dtype: str, transport: Transport) -> Any:
        """Make a message of gradient + residual that libraries can sum, and keep what is rounded away.

        Args:
            gradient: float32[n], which may be the message.
            state: See `encode`.
            dtype: "float32" or "float16".
            transport: The transport of the exchange.

        Returns:
            What its `allreduce` takes, float32[n] or float16[n]; see grace_ext.communicators.reducible.to_reducible.
        """
        raise NotImplementedError

    def write_sum(self, summed: Any, out: Any, weight: float) -> bool:
        """Write weight * (the sum of such messages).

        Args:
            summed: What the transport's `allreduce` gave, float32[n] or float16[n].
            out: Output, float32[n].
            weight: Factor of the sum.

        Returns:
            Whether all of it is finite.
        """
        raise NotImplementedError

    def to_bytes(self, gradient: Any, transport: Transport) -> Any:
        """Make a message of a gradient as it is.

        Args:
            gradient: float32[n], which may be the message.
            transport: The transport of the exchange.

        Returns:
            What its `alltoall` takes, uint8[4 * n].
        """
        raise NotImplementedError

    def add_received(self, received: Any, accumulator: Any) -> None:
        """Add gradients that were sent as they are, one after the other.

        Args:
            received: What the transport's `alltoall` gave, uint8[4 * m * n].
            accumulator: float32[n], changed.
        """

    def votes_of(self, gradient: Any) -> Any:
        """Make -1 of each element below 0, 1 of all others, and NaN of those that are not finite.

        Args:
            gradient: float32[n].

        Returns:
            float32[n].
        """


class HostPlace(Place):
    """Numpy arrays."""

    @staticmethod
    def empty(what: str, size: int) -> np.ndarray:
        return scratch(what, np.float32, size)

    @staticmethod
    def zeros(size: int) -> np.ndarray:
        return np.zeros(size, np.float32)

    @staticmethod
    def add(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> np.ndarray:
        with non_finite_allowed():
            return np.add(a, b, out=out)

    encode: Any = staticmethod(Compressor.encode)
    encode_in_place: Any = staticmethod(Compressor.encode_in_place)

    @staticmethod
    def add_all(containers: list[Container], accumulator: np.ndarray) -> None:
        with non_finite_allowed():
            add_all(containers, accumulator)

    @staticmethod
    def decode_slices(slices: Sequence[tuple[slice, list[Container]]], out: Any, weight: float) -> None:
        for part, containers in slices:
            if isinstance(out, list):
                decode_sum_to_parts(containers, in_slice(out, part), weight)
            else:
                decode_sum(containers, out[part], weight)

    @staticmethod
    def decode_sum(containers: list[Container], out: np.ndarray, weight: float, squares: SquareSums | None) -> None:
        decode_sum(containers, out, weight, squares)

    @staticmethod
    def to_reducible(gradient: np.ndarray, state: tuple | None, dtype: str, transport: Transport) -> np.ndarray:
        if state is None:
            return gradient if dtype == "float32" else to_reducible(gradient, dtype, transport.size)
        residual, following = state
        with non_finite_allowed():
            np.add(gradient, residual, out=following)
            sent = to_reducible(following, dtype, transport.size)
            np.subtract(following, from_reducible(sent), out=following)
        return sent

    @staticmethod
    def write_sum(summed: np.ndarray, out: np.ndarray, weight: float) -> bool:
        np.multiply(from_reducible(summed), np.float32(weight), out=out)
        return bool(max_magnitude(out) < NON_FINITE)

    @staticmethod
    def to_bytes(gradient: np.ndarray, transport: Transport) -> np.ndarray:
        return gradient.view(np.uint8)

    @staticmethod
    def add_received(received: np.ndarray, accumulator: np.ndarray) -> None:
        with non_finite_allowed():
            for row in received.view(np.float32).reshape(-1, accumulator.size):
                accumulator += row

    @staticmethod
    def votes_of(gradient: np.ndarray) -> np.ndarray:
        votes = np.where(gradient < 0, np.float32(-1), np.float32(1))
        finite = np.isfinite(gradient)
        if not finite.all():
            votes[~finite] = np.nan
        return votes


HOST = HostPlace()


class Movable:
    """The part of a communicator that makes one for another place."""

    def at(self, place: Place) -> Self:
        """Make the same communicator for gradients that lie somewhere else.

        Args:
            place: Where they lie.

        Returns:
            The communicator.
        """
        other = copy.copy(self)
        other._place(place)
        return other

    def _place(self, place: Place) -> None:
        """Let gradients lie there from now on."""
        raise NotImplementedError


class Placed(Movable):
    """The part of a communicator that tells where gradients lie."""

    place: Place = HOST  #: Where gradients lie.

    def _zeros(self, size: int) -> Any:
        """Make zeros there, float32[size], with which a rank without a gradient starts."""
        return self.place.zeros(size)

    def _place(self, place: Place) -> None:
        self.place = place


def placed(communicator: Any, place: Place) -> Any:
    """Make the same communicator for gradients that lie somewhere else, if it can be used there.

    Args:
        communicator: The communicator.
        place: Where they lie.

    Returns:
        The one for that place; the same if it knows no places.
    """
    return communicator.at(place) if isinstance(communicator, Placed) else communicator
