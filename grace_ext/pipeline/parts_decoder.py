"""Decoding sums to where the tensors lie, which need not be one array."""

import numpy as np

from .._util.scratch import scratch
from ..errors import ContainerError
from ..kernels import sum_sparse
from .container import Container
from .decoder import decode_sum, unpack_all


def decode_sum_to_parts(containers: list[Container], parts: list[np.ndarray], weight: float = 1.0) -> None:
    """Write weight * (sum of the containers' gradients) to several vectors that together are the gradient.

    The bits are those of `decode_sum`. Only for sparse containers without a transform does it spare the copy of an array.

    Args:
        containers: Parsed containers, each of d elements.
        parts: Outputs, each float32[n], contiguous and writable, d elements together; undefined if an error is raised.
        weight: Factor of the sum.

    Raises:
        ContainerError: A container is damaged or has another number of elements.
    """
    d = sum(part.size for part in parts)
    for parsed in containers:
        if parsed.d != d:
            raise ContainerError(f"the container holds {parsed.d} elements, {d} were expected")
    if any(parsed.non_finite for parsed in containers):
        for part in parts:
            part[:] = np.nan
        return
    if not all(parsed.index_id and parsed.transform is None for parsed in containers):
        whole = scratch("parts", np.float32, d)
        decode_sum(containers, whole, weight)
        for part, own in zip(parts, np.split(whole, np.cumsum([part.size for part in parts])[:-1]), strict=True):
            part[:] = own
        return
    positions, values, starts, ends = unpack_all(containers)
    first = 0
    for part in parts:
        if not part.size:
            continue
        last = np.uint32(first + part.size - 1)
        stops = starts.copy()
        for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
            stops[number] += np.searchsorted(positions[start:end], last, "right")
            positions[start : stops[number]] -= np.uint32(first)
        sum_sparse(part, positions, values, starts, stops, np.float32(weight))  # which moves the starts to the stops
        first += part.size
