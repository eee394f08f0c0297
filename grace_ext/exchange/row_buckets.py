"""Gradients that come as rows of a table, as those of embeddings do: exchanging them costs what the touched rows cost.

Frameworks call them sparse: tf.IndexedSlices, and sparse tensors in PyTorch.
"""

import dataclasses
import time
from collections.abc import Callable

import numpy as np

from .._util.rng import Stream
from ..communicators.allgather import Allgather
from ..communicators.base import Pending, wait
from ..errors import ConfigError
from ..index.raw import RawIndex
from ..index.rows import Rows
from ..kernels.rows import add_rows, join_rows
from ..memory.base import Memory
from ..memory.none import NoMemory
from ..pipeline import container
from ..pipeline.compressor import Compressor
from ..pipeline.decoder import decode_rows
from ..registry import Stage, build
from ..transport.base import Transport
from .buckets import Bucket, Tensor


@dataclasses.dataclass
class RowGradient:
    """Rows of a gradient: indices[i] is the row that values[i] belongs to.

    A row that no index names is zero; a row that several indices name is the sum of their values.

    Attributes:
        indices: int64[n], in any order.
        values: float32[n, width].
    """

    indices: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))
    values: np.ndarray = dataclasses.field(default_factory=lambda: np.empty((0, 1), np.float32))

    @property
    def nbytes(self) -> int:
        """Bytes of the float32 values, and of an int64 for each row."""
        return 8 * self.indices.size + 4 * self.values.size

    def summed(self) -> "RowGradient":
        """Add up the values of equal indices, in their order.

        Returns:
            Each row once, in ascending order.
        """
        rows, slots = np.unique(self.indices, return_inverse=True)
        values = np.zeros((rows.size, self.values.shape[1]), np.float32)
        add_rows(values, slots, self.values)
        return RowGradient(rows, values)


class RowBucket(Bucket):
    """A table of shape (rows, *row) whose gradient comes as rows. `row_bucket` makes it.

    What is compressed is one vector: the touched rows, each once, with the memory's residual of these rows. So "topk:0.1"
    sends a tenth of the touched elements. The residual of other rows waits until a gradient touches them.
    """

    def start(  # type: ignore[override]  # pack gives rows
        self,
        transport: Transport,
        pack: Callable[[], RowGradient],
        stream: Stream,
        on_gradient: Callable | None = None,
        on_compensated_gradient: Callable | None = None,
    ) -> Pending:
        """Encode the gradient and start to send it.

        Args:
            transport: See Bucket.start.
            pack: pack() returns a RowGradient, whose values may have any shape of n * width elements.
            stream: See Bucket.start.
            on_gradient: Not called.
            on_compensated_gradient: Not called.

        Returns:
            The exchange under way.

        Raises:
            ConfigError: What pack returned is not a gradient of this table.
        """
        started = time.perf_counter()
        given = self._checked(pack())
        touched = given.summed()
        state = self.memory.begin_rows(self.name, self.size, touched.indices, self.width)
        summed = time.perf_counter() - started
        touched_rows = TouchedRows(self.compressor, touched.indices, self.size)
        pending = self.communicator.start(transport, self.name, touched_rows, touched.values.reshape(-1), state, stream)
        pending.seconds["rows"] = summed
        pending.gradient_bytes = given.nbytes
        return pending

    def finish(self, pending: Pending, transport: Transport, out: RowGradient, weight: float) -> bool:
        """Wait for the weighted sum over ranks.

        Args:
            pending: See Bucket.finish.
            transport: See Bucket.finish.
            out: Receives the rows that some rank sent something of, in ascending order.
            weight: See Bucket.finish.

        Returns:
            False if some rank's gradient was not finite; then all rows in `out` are NaN; without any rows, `out` holds row 0 as
            NaN.
        """
        joined = wait(pending)
        pending.received = joined.size
        started = time.perf_counter()
        containers = container.split(joined, transport.size, self.size)
        out.indices, out.values = decode_rows(containers, self.width, weight)
        pending.seconds["decode"] = time.perf_counter() - started
        return not any(one.non_finite for one in containers)

    @property
    def width(self) -> int:
        """Number of elements of a row."""
        return self.compressor.index.width  # type: ignore[attr-defined]  # row_bucket makes it with Rows

    def check_rows(self, indices: np.ndarray, values: int) -> None:
        """Check that a gradient is one of this table.

        Args:
            indices: Its rows, int64[n].
            values: The number of its values.

        Raises:
            ConfigError: It is not.
        """
        name, rows = self.tensors[0].name, self.size // self.width
        if values != indices.size * self.width:
            raise ConfigError(
                f"the gradient of {name!r} has {indices.size} rows and {values} values; a row of this table has {self.width}"
            )
        outside = indices[(indices < 0) | (indices >= rows)]
        if outside.size:
            raise ConfigError(f"the gradient of {name!r} has a row {outside[0]}; the table has {rows}")

    def _checked(self, given: RowGradient) -> RowGradient:
        indices = np.ascontiguousarray(given.indices, np.int64).reshape(-1)
        self.check_rows(indices, np.size(given.values))
        with np.errstate(over="ignore"):  # a float64 beyond float32 becomes Inf, which the container reports
            values = np.ascontiguousarray(given.values, np.float32).reshape(indices.size, self.width)
        return RowGradient(indices, values)


def row_bucket(name: str, tensor: Tensor, compressor: Compressor, memory: Memory) -> RowBucket:
    """Make the bucket of a table whose gradient comes as rows.

    The compressor's sparsifier and value codec work on the values of the touched rows; the index codec is always `rows`, and
    the communicator is an allgather. With a transform or a low-rank method, which need the whole table, all touched rows are
    sent exactly ("dense/raw"). Exact values of all touched rows need no memory.

    Args:
        name: Name of the bucket.
        tensor: The table.
        compressor: The compressor that the table's rule gives.
        memory: The exchange's memory of the table.

    Returns:
        The bucket.

    Raises:
        ConfigError: The table has no elements, or more than a container holds, or the memory keeps no states by rows.
    """
    rows = tensor.shape[0]
    if not tensor.size:
        raise ConfigError(f"{tensor.name!r} has the shape {tensor.shape}: no rows to send")
    container.check_elements(tensor.size)
    stages: dict[str, Stage] = {"index": Rows(tensor.size // rows)}
    if compressor.lowrank is not None or compressor.transform is not None:
        stages.update(sparsifier=build("sparsifier", "dense"), value=build("value", "raw"))
    else:
        stages.update(sparsifier=compressor.sparsifier, value=compressor.value)
    compressor = Compressor(stages, compressor.seed)
    memory = memory.for_rows()
    if not memory.supports_rows:
        raise ConfigError(
            f"memory {memory.name!r} keeps no state by rows, and the gradient of {tensor.name!r} comes as "
            f"rows: use for example memory={{{tensor.name!r}: 'residual', '*': {str(memory)!r}}}"
        )
    exact = compressor.sparsifier.name == "dense" and compressor.value.lossless
    return RowBucket(name, [tensor], compressor, Allgather(), NoMemory() if exact else memory)


class TouchedRows(Compressor):
    """Encodes the elements of some rows, float32[r * width], into containers of the whole table.

    Args:
        compressor: The compressor whose stages encode them.
        rows: int64[r], ascending.
        size: Number of elements of the table.
    """

    index: Rows

    def __init__(self, compressor: Compressor, rows: np.ndarray, size: int):
        super().__init__(compressor.stages, compressor.seed)
        self._rows, self._size = rows.astype(np.uint32), size

    def elements_of(self, d: int) -> int:
        return self._size

    def encode_index(self, indices: np.ndarray | None, d: int, stream: Stream) -> tuple[int, np.ndarray, np.ndarray | None]:
        k = d if indices is None else indices.size
        if not k:
            return RawIndex.id, np.empty(0, np.uint8), indices
        rows, compact = self._rows, None
        if indices is not None:
            touched, compact = self.index.split(indices)
            rows = rows[touched]
        section = self.index.section(rows, compact, self._size)
        if section.size <= 4 * k:
            return Rows.id, section, indices
        positions = np.empty(k, np.uint32)
        join_rows(rows, np.arange(k, dtype=np.uint32) if compact is None else compact, self.index.width, positions)
        return RawIndex.id, RawIndex().encode(positions, self._size)[0], indices
