"""Vectors that lie in several tensors: tables of addresses, by which one kernel reads all of them where they are."""

from collections.abc import Sequence

import numpy as np
import torch

from ..mailbox import to_device


class Layout:
    """Where the blocks and the sampled lines of float32[d] lie in tensors of these sizes.

    sizes: numbers of elements. block: elements of a block; no block belongs to two tensors. lines: first elements of sampled lines of
    16; a line that reaches beyond its tensor begins earlier, or is shorter if the tensor is.
    """

    def __init__(self, sizes: Sequence[int], block: int, lines: np.ndarray):
        lengths = np.array(sizes, np.int64)
        starts = np.cumsum(lengths) - lengths
        counts = -(-lengths // block)
        self.blocks, self.size = int(counts.sum()), int(lengths.sum())
        of_block = np.repeat(np.arange(lengths.size), counts)
        offset = (np.arange(self.blocks) - np.repeat(np.cumsum(counts) - counts, counts)) * block
        # Of tensors with the same start, all but the last one are empty.
        of_line = np.searchsorted(starts, lines, "right") - 1
        first = np.maximum(np.minimum(lines - starts[of_line], lengths[of_line] - 16), 0)
        self._tensor = np.concatenate([of_block, of_line])
        self._offset = np.concatenate([offset, first])
        least = np.repeat([block, 16], [self.blocks, lines.size])
        self._fixed = np.stack(
            [starts[self._tensor] + self._offset, np.minimum(lengths[self._tensor] - self._offset, least)]
        )
        self._last: tuple[np.ndarray, torch.Tensor] | None = None

    @property
    def columns(self) -> int:
        """The number of blocks and lines together."""
        return self._tensor.size

    def table(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """int64[3, blocks + lines] on the tensors' device: address, position in the vector, and number of elements of each.

        The last table is kept: gradients often lie where they lay in the step before. Whoever asks for another one has waited for the
        kernels that read it.
        """
        bases = np.array([tensor.data_ptr() for tensor in tensors], np.int64)
        if self._last is None or not np.array_equal(self._last[0], bases):
            addresses = bases[self._tensor] + 4 * self._offset
            self._last = bases, to_device(np.concatenate([addresses[None], self._fixed]), tensors[0].device)
        return self._last[1]


class Parts:
    """float32[d] in several contiguous tensors of a device, in place of one."""

    def __init__(self, tensors: Sequence[torch.Tensor], layout: Layout):
        self.tensors, self.layout = tensors, layout
        self.device = tensors[0].device

    def numel(self) -> int:
        return self.layout.size

    def table(self) -> torch.Tensor:
        """See Layout.table."""
        return self.layout.table(self.tensors)

    def joined(self) -> torch.Tensor:
        """A copy in one tensor."""
        return torch.cat([tensor.view(-1) for tensor in self.tensors])
