"""The interface of index codecs."""

from typing import TYPE_CHECKING

import numpy as np

from ..registry import Stage

if TYPE_CHECKING:
    from ._gaps import GapCounts


class IndexCodec(Stage):
    """Encodes a support (strictly ascending positions) as bytes, and decodes it.

    `encode` returns the payload and the support that the receiver will rebuild; a lossless codec rebuilds the given one.
    `decode` accepts any bytes: it writes k ascending positions below d or raises ContainerError, and it never needs the
    options of the sender's codec.
    """

    kind = "index"
    lossless = True
    #: Whether the values at the given indices are sent, in order, and assigned to the positions of another support.
    #: Otherwise the values that are sent are those that the gradient has at the support.
    remaps_values = False
    #: Whether it encodes any support. Otherwise it is used only with sparsifiers whose positions all ranks draw alike.
    universal = True
    #: Whether other codecs are several times as fast: then `auto` chooses it only if it saves over half a percent.
    slow = False
    #: Whether its section has the positions in the order in which the values are sent: `section` writes it, and `decode` tells the
    #: order. Otherwise positions are sent in ascending order, and the container says where each value belongs.
    follows_values = False
    #: Whether its section consists of other codecs' sections: then no other such codec uses it, and `auto` only if it competes.
    composite = False
    competes = False

    def encode(self, indices: np.ndarray, d: int) -> tuple[np.ndarray, np.ndarray]:
        """Encode positions.

        Args:
            indices: uint32[k], strictly ascending, below d, k >= 1.
            d: Number of elements of the domain that the positions are in.

        Returns:
            The payload, uint8[m], and the support that the receiver rebuilds, uint32[k'], strictly ascending.
        """
        raise NotImplementedError

    @staticmethod
    def decode(payload: np.ndarray, d: int, out: np.ndarray) -> np.ndarray | None:
        """Decode the support.

        Args:
            payload: uint8[m], any bytes.
            d: Number of elements of the domain that the positions are in.
            out: Output, uint32[k], 1 <= k <= d: the support, strictly ascending, below d.

        Returns:
            None. With follows_values: which of the values in the container is that of each position of the support, uint32[k],
            a permutation, possibly in a scratch array.

        Raises:
            ContainerError: The payload is not that of k positions below d.
        """
        raise NotImplementedError

    def size(self, indices: np.ndarray, d: int) -> int:
        """Return how many bytes the payload has. Codecs that know it without encoding override this.

        Args:
            indices: uint32[k], strictly ascending, below d, k >= 1.
            d: Number of elements of the domain that the positions are in.

        Returns:
            The number of bytes.
        """
        return self.encode(indices, d)[0].size

    def size_from_gaps(self, gaps: "GapCounts") -> int:
        """Return how many bytes the payload has. Codecs that know it from the counts of gap classes override this.

        Args:
            gaps: The support and the counts of its gap classes.

        Returns:
            The number of bytes, the same as that of `size`.
        """
        return self.size(gaps.indices, gaps.d)

    def size_lower_bound(self, gaps: "GapCounts") -> int:
        """Return a lower bound of the size that is found faster, so that `auto` can rule the codec out.

        Args:
            gaps: The support and the counts of its gap classes.

        Returns:
            A number of bytes.
        """
        return 0

    def prepared(self, gaps: "GapCounts") -> "IndexCodec":
        """Return a codec that encodes this support and does not repeat what `size_from_gaps` has done for it.

        Args:
            gaps: The support that `size_from_gaps` was called with.

        Returns:
            This codec, unless it keeps something of its own for the support.
        """
        return self

    def choose(self, indices: np.ndarray, d: int) -> "IndexCodec":
        """Return the codec that writes the section: this one, unless it chooses among others.

        Args:
            indices: uint32[k], strictly ascending, below d, k >= 1.
            d: Number of elements of the domain that the positions are in.

        Returns:
            The codec.
        """
        return self
