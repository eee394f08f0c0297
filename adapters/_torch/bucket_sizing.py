"""The size of buckets: what the user gave, or what the ranks choose when they have measured the first steps."""

import logging
import statistics
import time

import numpy as np
import torch

from grace_ext._util.cores import available_cores
from grace_ext.exchange.bucketing import group_tensors
from grace_ext.exchange.buckets import Bucket, Tensor
from grace_ext.exchange.engine import Exchange
from grace_ext.exchange.row_buckets import RowBucket
from grace_ext.policy import bucket_size, cost_model, link_probe
from grace_ext.transport.link_probe import agreed

from .._common.options import CompressionOptions

log = logging.getLogger("grace_ext")
_FIRST, _LAST = 3, 8  # steps that are measured; those before compile kernels and settle lengths


class BucketSize:
    """Bytes of float32 after which a bucket is closed.

    grouped: whether the user has said which parameters share a bucket. prefix: what the names of collectives begin with.
    """

    def __init__(self, options: CompressionOptions, grouped: bool, exchange: Exchange, prefix: str):
        self._is_fixed = grouped or options.bucket_bytes != "auto"
        #: The size in force.
        self.bytes = options.largest_bucket
        #: The same if the ranks have chosen it; else None.
        self.chosen: int | None = None
        #: What a checkpoint had chosen, which the ranks have yet to agree on.
        self.requested: int | None = None
        self._exchange, self._prefix = exchange, prefix
        self._first_steps: _FirstSteps | None = None  # until the size is chosen

    def agree(self, chosen: int | None) -> bool:
        """All ranks have agreed that this size was chosen; None: they will choose it. Returns whether buckets are to be rebuilt."""
        before = self.bytes
        if not self._is_fixed:
            self.chosen, self._first_steps = chosen, None
            self.bytes = chosen or bucket_size.SIZES[0]
            if chosen is None and self._has_a_choice():
                self._first_steps = _FirstSteps(self._exchange, self._prefix)
        return self.bytes != before

    def _has_a_choice(self) -> bool:
        buckets = _compressed(self._exchange)
        return bucket_size.LEAST <= 4 * sum(bucket.size for bucket in buckets) <= bucket_size.MOST and all(
            bucket.communicator.name == "allgather"
            and not bucket.communicator.switches
            and not bucket.memory.has_exact_steps
            for bucket in buckets
        )

    def on_gradient(self, name: str) -> None:
        """A gradient has come from backward."""
        if self._first_steps is not None:
            self._first_steps.on_gradient(name)

    def on_backward_end(self) -> None:
        """All gradients of this step have come."""
        if self._first_steps is not None:
            self._first_steps.on_backward_end()

    def on_step_end(self, order: list[str]) -> bool:
        """A step has ended, on all ranks, those included that take part without gradients. A collective once the size is due.

        order: names of the tensors in the order of the buckets. Returns whether buckets are to be rebuilt.
        """
        if self._first_steps is None:
            return False
        self._first_steps.on_step_end()
        if not self._first_steps.are_over or not self.agree(self._first_steps.choose(order, self.bytes)):
            return False
        if self._exchange.transport.rank == 0:
            self._say_so()
        return True

    def _say_so(self) -> None:
        log.info(
            "buckets have %.3g MiB of float32 from step %d on, so that more of them are sent while backward goes on; "
            "bucket_bytes=%d makes it so from the beginning",
            self.bytes / 2**20,
            self._exchange.step,
            self.bytes,
        )


class _FirstSteps:
    """Notes when gradients come, and what codecs need. After some steps, the ranks choose one size together."""

    def __init__(self, exchange: Exchange, prefix: str):
        self._exchange, self._prefix = exchange, prefix
        self._step = 0
        self._came: dict[str, float] = {}
        self._ready: dict[str, list[float]] = {}  # seconds after the first gradient, step by step
        self._steps: list[tuple[float, float, float, float]] = []  # backward, encode, decode, bytes

    @property
    def are_over(self) -> bool:
        """Whether the size is to be chosen now, between steps; the same on all ranks."""
        return self._step >= _LAST

    def on_gradient(self, name: str) -> None:
        self._came[name] = time.perf_counter()

    def on_backward_end(self) -> None:
        self._ended = time.perf_counter()

    def on_step_end(self) -> None:
        if self._step >= _FIRST and self._came:
            first = min(self._came.values())
            for name, came in self._came.items():
                self._ready.setdefault(name, []).append(came - first)
            last = self._exchange.statistics.last
            decode = last.seconds.get("decode", 0.0)
            encode = sum(spent for stage, spent in last.seconds.items() if stage not in ("exchange", "decode"))
            self._steps.append((self._ended - first, encode, decode, last.bytes["compressed", "out"] * self._thinning()))
        self._step += 1
        self._came.clear()

    def _thinning(self) -> float:
        """By how much a schedule will have lowered the density of this step. Steps at first may be denser than all others."""
        now = later = 0.0
        for bucket in _compressed(self._exchange):
            now += bucket.size * (bucket.compressor.density or 1.0)  # 0 where no schedule can change it
            later += bucket.size * (bucket.declared.density or 1.0)
        return min(1.0, later / now)

    def choose(self, order: list[str], largest: int) -> int:
        """Choose the size. A collective.

        order: See BucketSize.on_step_end. largest: the size in force. Returns the middle one of what the ranks would choose.
        """
        transport = self._exchange.transport.probe_transport()
        if transport is None:  # its collectives cannot be timed between steps
            return largest
        link = cost_model.fit(link_probe.probe(transport, f"{self._prefix}.sizing", "allgather"))
        own = float(self._own_choice(order, link, largest))
        wanted = sorted(size for size in agreed(transport, f"{self._prefix}.size", np.array([own])).ravel().tolist() if size)
        return int(wanted[len(wanted) // 2]) if wanted else largest

    def _own_choice(self, order: list[str], link: cost_model.Link, largest: int) -> int:
        """0 if this rank has measured nothing."""
        if not self._steps:
            return 0
        backward, encode, decode, sent = (statistics.median(column) for column in zip(*self._steps, strict=True))
        ready = {name: statistics.median(times) for name, times in self._ready.items()}
        layouts = {
            size: [
                (max(ready.get(tensor.name, backward) for tensor in tensors), sum(tensor.size for tensor in tensors))
                for tensors in self._buckets_of(order, size)
            ]
            for size in bucket_size.SIZES
        }
        elements = sum(count for _, count in layouts[largest])
        measured = bucket_size.Measured(
            backward, encode / elements, decode / elements, sent / elements, _has_spare_core(self._exchange.transport.hosts)
        )
        return bucket_size.choose_size(layouts, measured, link, self._exchange.transport.size)

    def _buckets_of(self, order: list[str], size: int) -> list[list[Tensor]]:
        """The tensors of each compressed bucket that there would be."""
        place = {name: number for number, name in enumerate(order)}
        buckets = _compressed(self._exchange)
        kinds = {tensor.name: (bucket.declared, bucket.memory) for bucket in buckets for tensor in bucket.tensors}
        tensors = sorted((one for bucket in buckets for one in bucket.tensors), key=lambda tensor: place[tensor.name])
        return group_tensors(tensors, lambda tensor: kinds[tensor.name], size)


def _compressed(exchange: Exchange) -> list[Bucket]:
    """The buckets whose size is to be chosen: not those of float32, and not those of rows, which have a tensor each."""
    return [bucket for bucket in exchange.buckets if not (bucket.compressor.exact or isinstance(bucket, RowBucket))]


def _has_spare_core(hosts: tuple[int, ...] | None) -> bool:
    """hosts: see Transport.hosts."""
    ranks = max(hosts.count(host) for host in hosts) if hosts else 1
    return available_cores() >= ranks * (torch.get_num_threads() + 1)
