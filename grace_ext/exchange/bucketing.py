"""How tensors are grouped into buckets: the same in every adapter."""

import math
from collections.abc import Callable, Container, Iterable

from ..communicators.base import Communicator
from ..errors import ConfigError
from ..memory.base import Memory
from ..pipeline.compressor import Compressor
from ..policy import Rules
from .buckets import Bucket, Tensor
from .engine import Exchange
from .row_buckets import row_bucket


def build_buckets(
    exchange: Exchange,
    parts: list[list[Tensor]],
    tables: Container[str],
    rules: Rules,
    communicator: Communicator,
    prefix: str,
    bucket_bytes: float = math.inf,
    groups: Iterable[Iterable[str]] | None = None,
) -> list[Bucket]:
    """Build the buckets of a model.

    All tensors of a bucket have the same spec, memory and device. Tensors whose gradients come as rows follow the others,
    each in a bucket of its own.

    Args:
        exchange: The exchange that the buckets are for.
        parts: Lists of tensors; no bucket has tensors of two of them.
        tables: Names of the tensors whose gradients come as rows.
        rules: Which spec each tensor has.
        communicator: The communicator that the user asked for.
        prefix: What the buckets' names begin with.
        bucket_bytes: See group_tensors.
        groups: See group_tensors.

    Returns:
        The buckets, in the order of the parts.

    Raises:
        ConfigError: Specs, memories and the communicator do not fit together.
    """
    tensors = [tensor for part in parts for tensor in part]
    if communicator.divides_by_senders and any(tensor.name in tables for tensor in tensors):
        raise ConfigError(
            f"communicator {communicator.name!r} has no means of gradients that come as rows, which go by allgather: "
            f"use communicator allgather, or a dense gradient"
        )
    specs = {tensor.name: rules.choose(tensor.name, tensor.size, tensor.ndim, tensor.name in tables) for tensor in tensors}

    def in_common(tensor: Tensor) -> tuple[Compressor, Memory]:
        return specs[tensor.name], exchange.memory_of(tensor)

    lists = [
        members
        for part in parts
        for members in group_tensors(
            [tensor for tensor in part if tensor.name not in tables], in_common, bucket_bytes, groups
        )
    ]
    return [
        *(
            exchange.bucket(f"{prefix}.bucket{i}", members, specs[members[0].name], communicator)
            for i, members in enumerate(lists)
        ),
        *(
            row_bucket(f"{prefix}.rows{i}", tensor, *in_common(tensor))
            for i, tensor in enumerate(tensor for tensor in tensors if tensor.name in tables)
        ),
    ]


def group_tensors(
    tensors: list[Tensor], choose: Callable, bucket_bytes: float, groups: Iterable[Iterable[str]] | None = None
) -> list[list[Tensor]]:
    """Split tensors into lists that have a device and a choice in common.

    Args:
        tensors: The tensors; their order is kept within a list.
        choose: choose(tensor) returns what tensors of a bucket have in common: a compressor, or a tuple of one and more.
        bucket_bytes: Largest size of a list in bytes of float32; one tensor alone may be larger.
        groups: Lists of tensor names; tensors of a group share a list whatever its size, as far as they have a device and a
            choice in common.

    Returns:
        The lists of tensors.
    """
    group_of = {name: number for number, names in enumerate(groups or []) for name in names}
    open_buckets: dict[tuple, list[Tensor]] = {}
    elements: dict[tuple, int] = {}  # number of elements in each open bucket
    finished = []
    for tensor in tensors:
        group = group_of.get(tensor.name)
        key = (choose(tensor), tensor.device, group)
        bucket = open_buckets.get(key)
        if bucket and group is None and 4 * (elements[key] + tensor.size) > bucket_bytes:
            finished.append(open_buckets.pop(key))
            bucket = None
        if bucket is None:
            bucket = open_buckets[key] = []
            elements[key] = 0
        bucket.append(tensor)
        elements[key] += tensor.size
    return finished + list(open_buckets.values())
