"""A mean of what each rank has sent, in the place of the sum: robust means, and SenderMean, in rounds of local steps.

The means are those of federated servers, grace_ext.means. Here all ranks take the same mean of the same containers.
"""

import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from .._util.numerics import non_finite_allowed
from ..communicators.base import Communicator
from ..communicators.separate import Separate
from ..errors import ConfigError, ExchangeError
from ..exchange.engine import Exchange
from ..means import Mean, SenderMean, Update
from ..means.base import l2_norm
from ..pipeline.decoder import add_all, decode_sender_mean, decode_sum, unpack_all
from ..transport.base import Transport
from .parameters import is_finite
from .weights import shares_of

Vectors = dict[str, np.ndarray]  # by name of the bucket
_NOTHING = np.empty(0, np.float32)
_LOG = logging.getLogger("grace_ext")


def separated(communicator: Communicator, mean: Mean) -> Communicator:
    """Find the communicator that a fragment with a mean needs.

    Args:
        communicator: The communicator that the user asked for.
        mean: The mean that the user asked for.

    Returns:
        The communicator for `build_buckets`.

    Raises:
        ConfigError: The one asked for sums what ranks send before all ranks have seen it.
    """
    if communicator.name != "allgather":
        raise ConfigError(
            f"communicator {str(communicator)!r} sums before ranks have seen each other's pseudo-gradients, which mean "
            f"{mean!r} needs one by one; allowed with it: 'allgather'; with this communicator: mean=WeightedMean()"
        )
    return Separate()


class RankMean:
    """Takes a mean of what each rank has sent of a fragment.

    Pseudo-gradients are sent as they are, not times the rank's share. A rank is left out of a round if a container of it, or
    what its containers say, is not finite.

    Of buckets whose memory sends differences from an estimate, as "ef21" does, every rank keeps the estimates of all ranks,
    and the mean is that of the estimates: float32[size] for each rank. Of others, a mean by coordinates decodes the fragment of
    all ranks at once, which is as much, for a moment.

    Args:
        mean: The mean.
        exchange: The fragment's exchange, whose buckets go by communicator Separate.
        transport: The transport that the exchange was made with.
        prefix: What the names of collectives begin with.

    Raises:
        ConfigError: A bucket goes by another communicator, or is sent sparsely although the mean judges each element by itself.
    """

    def __init__(self, mean: Mean, exchange: Exchange, transport: Transport, prefix: str):
        self.mean, self._exchange, self._transport, self._prefix = mean, exchange, transport, prefix
        self._estimates: dict[int, Vectors] = {}  # of each rank
        self._senders: list[int] = []  # of the round
        self._left_out: list[int] = []  # of them
        self._of_senders = isinstance(mean, SenderMean) and not any(
            bucket.memory.sends_differences or bucket.compressor.transform for bucket in exchange.buckets
        )
        for bucket in exchange.buckets:
            if not bucket.communicator.needs_each_rank:
                raise ConfigError(
                    f"bucket {bucket.name!r} goes by {bucket.communicator.name!r}, which sums; allowed: Separate"
                )
            if mean.by_coordinate and not (bucket.compressor.dense or bucket.memory.sends_differences):
                raise ConfigError(
                    f"mean {mean!r} judges each element by itself, and would make 0 of what most ranks do not send: "
                    f"{str(bucket.compressor)!r} with memory {str(bucket.memory)!r} is sent sparsely; allowed: a dense "
                    "compression ('dense/qsgd:4'), memory 'ef21', or ClippedMean() or SenderMean()"
                )

    def settle(self) -> None:
        """Learn the estimates of all ranks, once these have settled which states they start from: a collective."""
        self._estimates = {}
        kept = self._exchange.state_dict().get("estimate", {})
        for bucket in self._exchange.buckets:
            if not bucket.memory.sends_differences:
                continue
            own = np.concatenate([kept.get(tensor.name, _NOTHING) for tensor in bucket.tensors])
            has = self._gather(f"{bucket.name}.has", np.array([own.size > 0], np.uint8))
            if has.any():
                rows = self._gather(f"{bucket.name}.estimate", own.view(np.uint8)).copy().view(np.float32)
                for rank, row in zip(np.flatnonzero(has).tolist(), rows.reshape(-1, bucket.size), strict=True):
                    self._estimates.setdefault(rank, {})[bucket.name] = row

    def _gather(self, name: str, payload: np.ndarray) -> np.ndarray:
        return self._transport.allgather(f"{self._prefix}.{name}", payload).wait()

    def check_received(self, senders: Sequence[int]) -> None:
        """See what has come, after the last bucket of a step is finished and before the step ends.

        A rank that is left out keeps its memories as they were, as the others keep their estimates of it.

        Args:
            senders: The ranks that count, in their order.

        Raises:
            ExchangeError: Another number of ranks has sent something.
        """
        for bucket in self._exchange.buckets:
            if len(bucket.communicator.received) != len(senders):
                raise ExchangeError(
                    f"{bucket.name!r}: {len(bucket.communicator.received)} containers have come of the ranks {list(senders)}"
                )
        self._senders = list(senders)
        self._left_out = [
            rank
            for place, rank in enumerate(senders)
            if any(bucket.communicator.received[place].non_finite for bucket in self._exchange.buckets)
        ]
        if self._transport.rank in self._left_out:
            self._exchange.state.rollback()

    def take(self, shares: Mapping[int, float], out: Vectors) -> bool:
        """Take the mean of what `check_received` has seen.

        Args:
            shares: The share of each rank.
            out: Output, float32[size] for each bucket.

        Returns:
            Whether some rank counted and the mean is finite. If not, `out` is undefined.
        """
        if self._of_senders and self._take_of_senders(shares, out):
            return True
        known: dict[int, Callable[[], np.ndarray]] = {}
        dense: dict[int, Callable[[], np.ndarray | bool]] = {}
        for place, rank in enumerate(self._senders):
            if rank not in self._left_out:
                self._correct_estimates(rank, place)
                known[rank] = functools.partial(self._vector, rank, place)
                dense[rank] = functools.partial(self._dense, place)
        mean, others = self._mean_of(known, shares, dense)
        if (left_out := sorted([*self._left_out, *others])) and not self._transport.rank:
            _LOG.warning("what ranks %s have sent is not finite; the mean is that of the others", left_out)
        if mean is not None:
            ends = np.cumsum([bucket.size for bucket in self._exchange.buckets])
            for bucket, part in zip(self._exchange.buckets, np.split(mean, ends[:-1]), strict=True):
                out[bucket.name][:] = part
        self._forget_received()
        return mean is not None and is_finite(mean)

    def _take_of_senders(self, shares: Mapping[int, float], out: Vectors) -> bool:
        """The mean over senders, without an array for each rank. False if what a rank has sent is not finite, or nobody counts."""
        if self._left_out or not self._senders:
            return False
        counted = [shares[rank] for rank in self._senders]
        for bucket in self._exchange.buckets:
            decode_sender_mean(bucket.communicator.received, out[bucket.name], shares=counted)
            if not is_finite(out[bucket.name]):
                return False
        self._forget_received()
        return True

    def _forget_received(self) -> None:
        for bucket in self._exchange.buckets:
            bucket.communicator.received = []

    def _correct_estimates(self, rank: int, place: int) -> None:
        estimates = self._estimates.setdefault(rank, {})
        for bucket in self._exchange.buckets:
            if bucket.memory.sends_differences:
                estimate = estimates.setdefault(bucket.name, np.zeros(bucket.size, np.float32))
                add_all([bucket.communicator.received[place]], estimate)

    def _vector(self, rank: int, place: int) -> np.ndarray:
        """What counts of a rank, float32[d]: its estimates, or what it has sent."""
        vector = np.empty(sum(bucket.size for bucket in self._exchange.buckets), np.float32)
        start = 0
        for bucket in self._exchange.buckets:
            part = vector[start : start + bucket.size]
            if bucket.memory.sends_differences:
                part[:] = self._estimates[rank][bucket.name]
            else:
                decode_sum([bucket.communicator.received[place]], part)
            start += bucket.size
        return vector

    def _dense(self, place: int) -> np.ndarray | bool:
        """Which elements a rank has sent, maybe as 0: bool[d], or one for all."""
        sent: list[np.ndarray | bool] = []
        for bucket in self._exchange.buckets:
            received = bucket.communicator.received[place]
            if bucket.memory.sends_differences or not received.is_sparse:
                sent.append(True)
            else:
                mask = np.zeros(bucket.size, bool)
                mask[unpack_all([received])[0]] = True
                sent.append(mask)
        if all(one is True for one in sent):
            return True
        return np.concatenate(
            [np.broadcast_to(one, bucket.size) for one, bucket in zip(sent, self._exchange.buckets, strict=True)]
        )

    def of_rows(self, rows: np.ndarray, start: np.ndarray, shares: Mapping[int, float]) -> np.ndarray | None:
        """Take the mean of vectors that are sent uncompressed: of what they have moved by, as of parameters.

        Args:
            rows: float32[ranks, n].
            start: What the ranks started from, float32[n], finite.
            shares: The share of each rank.

        Returns:
            float32[n]; None if no rank with a share has a finite vector.
        """
        if isinstance(self.mean, SenderMean):  # the weighted mean, which needs no start
            start = np.zeros_like(start)

        def moved(rank: int) -> np.ndarray:
            with non_finite_allowed():
                return rows[rank] - start

        vectors = {rank: functools.partial(moved, rank) for rank, share in shares.items() if share}
        mean = self._mean_of(vectors, shares, dict.fromkeys(vectors, lambda: True))[0]
        return None if mean is None else start + mean

    def _mean_of(
        self,
        vectors: Mapping[int, Callable[[], np.ndarray]],
        shares: Mapping[int, float],
        dense: Mapping[int, Callable[[], np.ndarray | bool]],
    ) -> tuple[np.ndarray | None, list[int]]:
        """The mean of the finite vectors, or None if there is none; and the ranks whose vectors are not finite."""
        norms = {rank: l2_norm(vector()) for rank, vector in vectors.items()}
        finite = {rank: shares[rank] for rank, norm in norms.items() if math.isfinite(norm)}
        if not finite:
            return None, list(norms)
        updates = [Update(vectors[rank], norms[rank], share, dense[rank]) for rank, share in shares_of(finite).items()]
        return self.mean(updates, vectors[next(iter(finite))]().size), [rank for rank in norms if rank not in finite]
