"""Index codec `keys`."""

import numpy as np

from .._util.scratch import scratch
from ..errors import ContainerError
from ..kernels.sort import argsort_bits
from ..registry import register
from .base import IndexCodec


@register
class Keys(IndexCodec):
    """The positions as they are, 32 bits each, in the order in which the value codec sends the values.

    Value codecs that sort (polyfit, dexp) need no order section beside it, which has ceil(log2 k) bits for each value. With
    all others it is `raw` under another id. The shortest code of ascending positions and an order section take fewer bits
    together as long as k is below some millions, so that `auto` never chooses it.

    The payload is k uint32, in any order (docs/container-format.md, "Index sections").

    Source:
        DeepReduce's value compression without index compression: Xu et al., DeepReduce: A Sparse-tensor Communication
        Framework for Federated Deep Learning, NeurIPS 2021, appendix, Tables 4 and 5.
    """

    name, id = "keys", 13
    follows_values = True

    def encode(self, indices: np.ndarray, d: int) -> tuple[np.ndarray, np.ndarray]:
        return self.section(indices), indices

    def size(self, indices: np.ndarray, d: int) -> int:
        return 4 * indices.size

    @staticmethod
    def section(positions: np.ndarray) -> np.ndarray:
        """Encode positions in any order.

        Args:
            positions: uint32[k], the position of each value.

        Returns:
            The payload, uint8[4 k].
        """
        return positions.astype("<u4", copy=False).view(np.uint8)

    @classmethod
    def following(cls, id: int, section: np.ndarray, order: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
        """Put positions in the order of the values, if they are keys.

        Args:
            id: The index codec's id in the container.
            section: Its section.
            order: The order of the values, uint32[k], or None.

        Returns:
            The section, and the order that is to be sent: None with keys.
        """
        if id != cls.id or order is None:
            return section, order
        return cls.section(section.view("<u4")[order]), None

    @staticmethod
    def decode(payload: np.ndarray, d: int, out: np.ndarray) -> np.ndarray:
        k = out.size
        if payload.size != 4 * k:
            raise ContainerError(f"keys: {payload.size} bytes for {k} positions")
        out[:] = np.frombuffer(payload, "<u4")
        order, bits = scratch("order of keys", np.uint32, k), out.view(np.float32)
        # The kernel reads all bits before it writes the sorted ones.
        argsort_bits(bits, scratch("sort", np.uint64, k), scratch("sort spare", np.uint64, k), order, bits)
        if out[-1] >= d or not (out[1:] > out[:-1]).all():
            raise ContainerError("keys: the positions are not distinct and below d")
        return order
