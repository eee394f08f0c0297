"""What an index codec promises."""

from typing import TYPE_CHECKING

import numpy as np

from ..registry import Stage

if TYPE_CHECKING:
    from .gaps import Gaps


class IndexCodec(Stage):
    """Turns a support (strictly ascending positions) into bytes and back.

    `encode` returns the payload and the support that the receiver will rebuild; for a lossless codec that is the
    given one. `decode` must accept any bytes: it raises ContainerError or writes k ascending positions below d
    to the array that it is given, and never needs the options of the sender's codec.
    """

    kind = "index"
    lossless = True
    #: Whether the values of the given indices are sent in their order, to land at the positions of another support.
    #: Elsewhere the support gets the values that the gradient has there.
    remaps_values = False
    #: Encodes any support. Otherwise the compressor calls it where the sparsifier's positions are made for it.
    universal = True
    #: Whether others encode and decode several times as fast: then `auto` wants half a percent for it.
    slow = False
    #: Made of other codecs' sections: not for `auto`, nor for such parts.
    composite = False

    def encode(self, indices: np.ndarray, d: int) -> tuple[np.ndarray, np.ndarray]:
        """indices: uint32[k], strictly ascending, below d, k >= 1 -> (payload uint8[m], support uint32[k'])."""
        raise NotImplementedError

    @staticmethod
    def decode(payload: np.ndarray, d: int, out: np.ndarray) -> None:
        """payload: uint8[m] -> out: uint32[k], 1 <= k <= d: the support, strictly ascending, below d."""
        raise NotImplementedError

    def size(self, indices: np.ndarray, d: int) -> int:
        """Bytes of the payload for these indices. Codecs that know it without encoding say so here."""
        return self.encode(indices, d)[0].size

    def size_from(self, gaps: "Gaps") -> int:
        """The same, for codecs that know it from the statistics of a support."""
        return self.size(gaps.indices, gaps.d)

    def size_at_least(self, gaps: "Gaps") -> int:
        """A bound that is found faster than the size, so that `auto` need not ask for it where others are shorter."""
        return 0

    def choose(self, indices: np.ndarray, d: int) -> "IndexCodec":
        """The codec that writes the section: this one, unless it is a policy that picks among others."""
        return self
