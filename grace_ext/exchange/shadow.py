"""Steps of a rank that has no more data: it takes part in those of the others with nothing.

As a rank within torch's Join context manager does, it shadows the collectives of those that go on.
"""

from collections.abc import Callable

from ..errors import ConfigError
from .engine import Exchange


def shadow_step(exchange: Exchange, output_of: Callable, bypass_of: Callable | None = None) -> bool:
    """Take part in a step of the other ranks, so that they can finish it and this rank's exchange stays in step.

    Args:
        exchange: The Exchange, between two steps.
        output_of: output_of(bucket) returns what `finish` may write to.
        bypass_of: bypass_of(bucket) returns a BypassPending of zeros, for a bucket that bypasses the exchange in this step.

    Returns:
        False, without a step, when no rank has gradients.

    Raises:
        ConfigError: A memory needs the gradients of all ranks.
    """
    if not exchange.buckets:
        return False
    for bucket in exchange.buckets:
        if bucket.memory.needs_all_ranks:
            raise ConfigError(
                f"memory {bucket.memory.name!r}: join() is not supported, since a rank without data would have to know the "
                f"first moment of each step: give all ranks as many batches"
            )
    exchange.begin_step(gradients=False)
    if not _others_have_gradients(exchange):
        exchange.forget_step()
        return False
    for bucket in exchange.buckets:
        if exchange.bypass_dtype(bucket):
            exchange.submit_bypass(bucket, bypass_of(bucket))
        elif not exchange.is_started(bucket):
            exchange.start_empty(bucket)
    exchange.advance()
    for bucket in exchange.buckets:
        exchange.finish(bucket, output_of(bucket))
    exchange.end_step()
    return True


def _others_have_gradients(exchange: Exchange) -> bool:
    """Whether other ranks have gradients: from the first containers, which are empty on ranks without, or from the count."""
    counted = exchange.gradient_count.take()
    if counted is not None:
        return counted > 0
    first = next(bucket for bucket in exchange.buckets if bucket.communicator.sends_containers)
    together = {first.name}.union(*(one.started_together(first) for one in exchange.listeners))
    for bucket in exchange.buckets:
        if bucket.name in together or exchange.transport.in_order and not exchange.bypass_dtype(bucket):
            exchange.start_empty(bucket)
    return exchange.order.receive_first(exchange.buckets).size > 0
