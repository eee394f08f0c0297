"""What connects a wrapped torch optimizer with the other ranks, and does so anew when these have changed."""

from collections.abc import Callable

from ._torch_buckets import TorchBuckets


class Connection:
    """Holds the buckets for the ranks there are now.

    membership() -> (rank, ranks), or None where this process takes no part. build(rank, ranks) -> TorchBuckets for more than
    one rank. The hooks of the parameters belong to the connection, so they are registered once.
    """

    def __init__(self, parameters: dict, membership: Callable, build: Callable):
        self._membership, self._build = membership, build
        self.connect()
        for name, p in parameters.items():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(lambda p, name=name: self._produced(name))

    def connect(self) -> None:
        """Build the buckets for the ranks there are now; none for one rank alone, which has nothing to exchange."""
        self._members = self._membership()
        alone = self._members is None or self._members[1] == 1
        self._buckets: TorchBuckets | None = None if alone else self._build()

    @property
    def buckets(self) -> TorchBuckets | None:
        if self._membership() != self._members:
            self.connect()
        return self._buckets

    def _produced(self, name: str) -> None:
        buckets = self.buckets
        if buckets is not None:
            buckets.produced(name)
