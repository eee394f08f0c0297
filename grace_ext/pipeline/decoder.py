"""Decoding: containers back to gradients. The bytes suffice; the sender's spec is not needed."""

import itertools
from collections.abc import Sequence

import numpy as np

from .. import registry
from .._util.arguments import checked_factor
from .._util.scratch import scratch
from ..errors import ConfigError, ContainerError
from ..kernels import add_at, add_dense, mean_sparse, sum_sparse, sum_sparse_at, sum_sparse_squares
from ..kernels.rows import add_compact, split_rows
from . import container
from .byte_buffers import ByteBuffer
from .container import Container
from .square_sums import SquareSums


def reorder(values: np.ndarray, order: np.ndarray | None) -> np.ndarray:
    """Put decoded values into the order of the support, in place.

    Args:
        values: float32[k], in the order of a codec that sorts.
        order: uint32[k], the place in the support of each value, or None if they are in order already.

    Returns:
        `values`.
    """
    if order is not None:
        values[order] = values.copy()
    return values


def unpack(parsed: Container, support: np.ndarray, values: np.ndarray) -> bool:
    """Decode a finite container into positions and values.

    Args:
        parsed: The container.
        support: Output, uint32[k]; left alone if the container is dense.
        values: Output, float32[k].

    Returns:
        False if the container is dense, else True.

    Raises:
        ContainerError: A codec is unknown, or a section is damaged.
    """
    index, value = registry.by_id("index", parsed.index_id), registry.by_id("value", parsed.value_id)
    if parsed.index_id and index is None:
        raise ContainerError(f"index codec {parsed.index_id} is not known")
    if value is None:
        raise ContainerError(f"value codec {parsed.value_id} is not known")
    if parsed.k == 0:
        if parsed.index_section.size or parsed.value_section.size:
            raise ContainerError("an empty support has a section")
        return index is not None
    if index and index.follows_values:
        if parsed.order_section is not None:
            raise ContainerError(f"index codec {index.name!r} has the order of the values, and there is an order section")
        order = index.decode(parsed.index_section, parsed.domain, support)
        value.decode(parsed.value_section, values)
        values[:] = values[order]
        return True
    if index:
        index.decode(parsed.index_section, parsed.domain, support)
    value.decode(parsed.value_section, values)
    reorder(values, parsed.order())
    return index is not None


def _unpack_to_scratch(parsed: Container) -> tuple[bool, np.ndarray, np.ndarray]:
    support = scratch("support", np.uint32, parsed.k if parsed.index_id else 0)
    values = scratch("values", np.float32, parsed.k)
    return unpack(parsed, support, values), support, values


def _restore(parsed: Container) -> np.ndarray:
    """Return the gradient of a container with a transform: float32[d], in a scratch array."""
    sparse, support, values = _unpack_to_scratch(parsed)
    restored = scratch("restored", np.float32, parsed.domain)
    if sparse:
        restored[:] = 0
    restored[support if sparse else ...] = values
    return _invert(parsed, restored)


def _invert(parsed: Container, coefficients: np.ndarray) -> np.ndarray:
    id, parameters = parsed.transform  # type: ignore[misc]
    registry.by_id("transform", id).inverse(parameters, coefficients)
    return coefficients[: parsed.d]


def decompress(buffer: ByteBuffer, size: int) -> np.ndarray:
    """Decode a container to a dense gradient.

    Args:
        buffer: uint8[n], bytes, bytearray or memoryview.
        size: The number of elements that the caller expects.

    Returns:
        float32[size]; NaN everywhere if the container is non-finite.

    Raises:
        ContainerError: The buffer is not a container of `size` elements.
    """
    parsed = container.parse(buffer, size)
    if parsed.non_finite:
        return np.full(size, np.nan, np.float32)
    if parsed.transform:
        return _restore(parsed).copy()
    sparse, support, values = _unpack_to_scratch(parsed)
    if not sparse:
        return values.copy()
    out = np.zeros(size, np.float32)
    out[support] = values
    return out


def decode_add(buffer: ByteBuffer, accumulator: np.ndarray, weight: float = 1.0) -> None:
    """Add weight * gradient to an array, in place and without a dense array in between.

    Args:
        buffer: The container: uint8[n], bytes, bytearray or memoryview.
        accumulator: float32[d], contiguous and writable; it stays as it was if an error is raised.
        weight: Factor of the gradient, finite.

    Raises:
        ConfigError: The accumulator is not such an array, or the weight is not such a number.
        ContainerError: The buffer is not a container of d elements.
    """
    _check_accumulator(accumulator)
    _add(container.parse(buffer, accumulator.size), accumulator, checked_factor("weight", weight))


def add_all(containers: list[Container], accumulator: np.ndarray) -> None:
    """Add the gradients of containers to an array, one after the other and in place.

    If any container has a transform, the gradients are summed first and the sum is added.

    Args:
        containers: Parsed containers, each of d elements.
        accumulator: float32[d], contiguous and writable; undefined if an error is raised.

    Raises:
        ConfigError: The accumulator is not such an array.
        ContainerError: A container is damaged or has another number of elements.
    """
    _check_all(containers, accumulator)
    if any(parsed.transform for parsed in containers):
        summed = scratch("summed", np.float32, accumulator.size)
        decode_sum(containers, summed)
        add_dense(accumulator, summed, np.float32(1))
        return
    for parsed in containers:
        _add(parsed, accumulator, np.float32(1))


def _add(parsed: Container, accumulator: np.ndarray, weight: np.float32) -> None:
    if parsed.non_finite:
        accumulator[:] = np.nan
        return
    if parsed.transform:
        add_dense(accumulator, _restore(parsed), weight)
        return
    sparse, support, values = _unpack_to_scratch(parsed)
    if not sparse:
        add_dense(accumulator, values, weight)
    else:
        add_at(accumulator, support, values, weight)


def decode_sum(containers: list[Container], out: np.ndarray, weight: float = 1.0, squares: SquareSums | None = None) -> None:
    """Write weight * (sum of the containers' gradients), each element summed in the order of the list.

    Containers that all have the same transform are summed before it is inverted, once.

    Args:
        containers: Parsed containers, each of d elements.
        out: Output, float32[d], contiguous and writable; undefined if an error is raised.
        weight: Factor of the sum.
        squares: Sums of squares of `out`, which are written where that is cheap; None for none.

    Raises:
        ConfigError: `out` is not such an array.
        ContainerError: A container is damaged or has another number of elements.
    """
    _check_all(containers, out)
    scale = np.float32(weight)
    if any(parsed.non_finite for parsed in containers):
        out[:] = np.nan
        return
    transforms = {parsed.transform for parsed in containers}
    if not all(parsed.index_id for parsed in containers) or len(transforms) > 1:
        out[:] = 0
        for parsed in containers:
            _add(parsed, out, scale)
    elif transforms in (set(), {None}):
        _sum_sparse(containers, out, scale, squares)
    else:
        coefficients = scratch("restored", np.float32, containers[0].domain)
        _sum_sparse(containers, coefficients, np.float32(1))
        np.multiply(_invert(containers[0], coefficients), scale, out=out)


def decode_sender_mean(
    containers: list[Container], out: np.ndarray, weight: float = 1.0, shares: Sequence[float] | None = None
) -> None:
    """Write weight * (mean of the containers' gradients), where the mean of each element is that of the containers that have it.

    An element that no container has is 0. Containers with a transform have coefficients, whose means are inverted once.

    Args:
        containers: Parsed containers, each of d elements, all with the same transform or none.
        out: Output, float32[d], contiguous and writable; undefined if an error is raised.
        weight: Factor of the mean.
        shares: How much each container counts, above 0; None for all alike.

    Raises:
        ConfigError: `out` is not such an array.
        ContainerError: A container is damaged, or has another number of elements or another transform than the first one.
    """
    _check_all(containers, out)
    if any(parsed.non_finite for parsed in containers):
        out[:] = np.nan
        return
    if len(transforms := {parsed.transform for parsed in containers}) > 1:
        raise ContainerError("elements of containers with different transforms have no mean")
    transformed = transforms not in (set(), {None})
    mean = scratch("restored", np.float32, containers[0].domain) if transformed else out
    counted = np.ones(len(containers), np.float32) if shares is None else np.array(shares, np.float32)
    if all(parsed.index_id for parsed in containers):
        mean_sparse(mean, *unpack_all(containers), counted)
    else:
        total = scratch("senders", np.float32, mean.size)
        mean[:] = total[:] = 0
        for parsed, share in zip(containers, counted, strict=True):
            sparse, support, values = _unpack_to_scratch(parsed)
            add_at(mean, support, values, share) if sparse else add_dense(mean, values, share)
            total[support if sparse else ...] += share
        np.divide(mean, total, out=mean, where=total > 0)
    if transformed or weight != 1:
        np.multiply(_invert(containers[0], mean) if transformed else mean, np.float32(weight), out=out)


def decode_rows(containers: list[Container], width: int, weight: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Sum containers of the same table, and return only the rows in which some container has positions.

    Each element is summed in the order of the list. No array as large as the gradients is made.

    Args:
        containers: Parsed containers of the same number of elements, each with an index section and without a transform.
        width: Number of elements of a row.
        weight: Factor of the sum.

    Returns:
        The numbers of the rows, int64[u], ascending, and weight * sum in these rows, float32[u, width]. If a container is
        non-finite, all these rows are NaN, and there is at least one: row 0.

    Raises:
        ContainerError: A container is damaged, dense or transformed.
    """
    finite = [parsed for parsed in containers if not parsed.non_finite]
    if not all(parsed.index_id and parsed.transform is None for parsed in finite):
        raise ContainerError("a container of rows says which ones: it is neither dense nor transformed")
    positions, values, starts, ends = unpack_all(finite)
    touched = scratch("touched rows", np.uint32, positions.size)
    parts = []
    for start, end in zip(starts, ends, strict=True):
        compact = positions[start:end]
        count = split_rows(compact, width, touched[start:end], compact)
        parts.append((touched[start : start + count], compact, values[start:end]))
    rows = np.sort(np.concatenate([np.empty(0, np.uint32), *(own for own, _, _ in parts)]))
    rows = rows[np.append(True, rows[1:] != rows[:-1])[: rows.size]]  # np.unique takes four times as long
    if len(finite) < len(containers):
        rows = rows if rows.size else np.zeros(1, np.uint32)
        return rows.astype(np.int64), np.full((rows.size, width), np.nan, np.float32)
    out = np.zeros((rows.size, width), np.float32)
    for own, compact, more in parts:
        add_compact(out.reshape(-1), rows, own, width, compact, more, np.float32(weight))
    return rows.astype(np.int64), out


def _sum_sparse(containers: list[Container], out: np.ndarray, weight: np.float32, squares: SquareSums | None = None) -> None:
    if squares is None:
        sum_sparse(out, *unpack_all(containers), weight)
    else:
        sum_sparse_squares(out, *unpack_all(containers), weight, squares.shapes, squares.sums)
        squares.written = True


def sum_at(containers: list[Container], d: int, weight: float) -> tuple[np.ndarray, np.ndarray]:
    """Sum sparse containers into the elements that some of them have.

    Args:
        containers: Containers, sparse, finite and without a transform.
        d: Number of elements of each.
        weight: Factor of the sum.

    Returns:
        Positions uint32[n], ascending, and float32[n]: the bits that `decode_sum` writes there.

    Raises:
        ContainerError: A container is of another kind or size, or damaged.
    """
    if any(parsed.d != d for parsed in containers):
        raise ContainerError(f"containers of {sorted({parsed.d for parsed in containers})} elements, {d} were expected")
    if any(parsed.non_finite or parsed.transform or not parsed.index_id for parsed in containers):
        raise ContainerError("a container is dense, not finite or has a transform, where none of these was expected")
    positions, values, starts, ends = unpack_all(containers)
    at, sums = np.empty(positions.size, np.uint32), np.empty(positions.size, np.float32)
    n = sum_sparse_at(d, positions, values, starts, ends, np.float32(weight), at, sums)
    return at[:n], sums[:n]


def unpack_all(containers: list[Container]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Decode sparse containers, one after the other.

    Args:
        containers: Parsed containers, finite, each with an index section.

    Returns:
        Positions uint32[n] and values float32[n], in scratch arrays, and where those of each container begin and end, int64[m].

    Raises:
        ContainerError: One of them is damaged.
    """
    bounds = [0, *itertools.accumulate(parsed.k for parsed in containers)]
    positions, values = scratch("support", np.uint32, bounds[-1]), scratch("values", np.float32, bounds[-1])
    for start, end, parsed in zip(bounds[:-1], bounds[1:], containers, strict=True):
        unpack(parsed, positions[start:end], values[start:end])
    return positions, values, np.array(bounds[:-1], np.int64), np.array(bounds[1:], np.int64)


def _check_all(containers: list[Container], out: np.ndarray) -> None:
    _check_accumulator(out)
    for parsed in containers:
        if parsed.d != out.size:
            raise ContainerError(f"the container holds {parsed.d} elements, {out.size} were expected")


def _check_accumulator(array: object) -> None:
    if not (
        isinstance(array, np.ndarray)
        and array.dtype == np.float32
        and array.ndim == 1
        and array.flags.c_contiguous
        and array.flags.writeable
    ):
        raise ConfigError("the accumulator must be a writable, contiguous float32[d] numpy array")
