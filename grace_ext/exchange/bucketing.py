"""Which buckets a set of tensors goes by: the same in every adapter."""

import math

from ..communicators.base import Communicator
from ..policy import Rules
from .buckets import Bucket, Tensor, make_buckets
from .engine import Exchange
from .row_buckets import row_bucket


def build_buckets(
    exchange: Exchange,
    parts: list[list[Tensor]],
    tables,
    rules: Rules,
    communicator: Communicator,
    prefix: str,
    bucket_bytes: float = math.inf,
    groups=None,
) -> list[Bucket]:
    """Buckets, in this order, for the tensors of each part; none has tensors of two parts, and all tensors of one have the
    same spec, memory and device. Tensors whose gradients come as rows follow, each in a bucket of its own.

    tables: the names of those. prefix: before the buckets' names. bucket_bytes, groups: see make_buckets. Raises ConfigError
    for specs, memories and ways that do not fit together.
    """
    tensors = [tensor for part in parts for tensor in part]
    specs = {tensor.name: rules.choose(tensor.name, tensor.size, tensor.ndim, tensor.name in tables) for tensor in tensors}

    def in_common(tensor):
        return specs[tensor.name], exchange.memory_of(tensor)

    lists = [
        members
        for part in parts
        for members in make_buckets(
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
