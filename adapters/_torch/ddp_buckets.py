"""Gradients out of the buckets of DistributedDataParallel into those of the exchange, and back."""

import concurrent.futures
import functools
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.distributed as dist

from grace_ext import ConfigError, ExchangeError
from grace_ext.exchange.buckets import Bucket
from grace_ext.exchange.engine import Exchange
from grace_ext.exchange.session import StateSession

from .._common.options import CompressionOptions
from .ddp_results import DdpResults, Result, is_in_backward
from .gradients import flat_arrays
from .output_buffer import is_non_overlapping_and_dense
from .parameter_buckets import ParameterBuckets, as_tensor
from .rows import comes_as_rows
from .saved_state import gather_memories


class DdpBuckets(ParameterBuckets):
    """Takes DDP's buckets as they come, and gives a future for each.

    A bucket of the exchange starts when all its tensors are there, whatever DDP's buckets are. DDP rebuilds its own after
    the first step; those of the exchange follow at the end of a step in which the two differed, and what the memory holds
    follows its tensors.

    One thread, `worker`, does the work and issues all collectives: those of a bucket when it starts, in the order in which
    DDP completes them, which is the same on all ranks; what remains when all have started.
    """

    _lends = True

    def __init__(
        self,
        parameters: dict[str, torch.nn.Parameter],
        exchange: Exchange,
        worker: concurrent.futures.Executor,
        options: CompressionOptions,
        prefix: str,
    ):
        """parameters: by name, {} to number them as they come. worker: the exchange's executor, of one thread."""
        super().__init__(exchange, options, prefix)
        self._states = StateSession(options.on_resize, gather_memories)
        self._worker, self._grad_scaler = worker, options.grad_scaler
        self._ddp_results = DdpResults()
        self._finite = True  # whether the last step was
        self.parameters = dict(parameters)
        self._names = {id(p): name for name, p in parameters.items()}
        self._numbered = not parameters
        #: The buckets' tensors by the bucket of DDP that they were in; None before the first step.
        self.bucket_names: list[list[str]] | None = None
        self._follows = True  # whether buckets change when DDP's do
        self._error: BaseException | None = None
        self._streams: set[torch.device] = set()
        self._bucket_of: dict[str, Bucket] = {}
        self._begin()

    # In the thread of backward

    def _begin(self) -> None:
        """A new step."""
        self._gradients: dict[str, torch.Tensor] = {}
        self._ready: dict[torch.device, torch.cuda.Event] = {}
        #: Results of buckets that are decoded to where their gradients are, which is where DDP takes them from.
        self._in_place: dict[str, list[np.ndarray] | None] = {}
        self._seen: list[list[str]] = []
        self._futures: list[tuple[torch.futures.Future, torch.Tensor, list[str]]] = []
        self._count_missing()
        self._loss_scale = self._grad_scaler.get_scale() if self._grad_scaler else 1.0  # 1.0 also if it is not enabled

    def on_bucket_ready(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """What the hook does."""
        if self._error is not None:
            raise ExchangeError(
                "an earlier exchange of gradients failed, so the ranks may be out of step: restart from a checkpoint"
            ) from self._error
        if bucket.index() == 0:
            if self._seen and self._futures:
                self._fail(ExchangeError("a backward pass ended before all of its gradients were there"))
                raise self._error
            self._begin()
            self._states.begin_step()
        try:
            if self.exchange.transport.size == 1:
                return self._skip_exchange(bucket)
            if bucket.index() == 0 and is_in_backward():
                self._ddp_results.check()
            return self._add_bucket(bucket, bucket.buffer())
        except BaseException as error:
            self._fail(error)
            raise

    def _skip_exchange(self, bucket) -> torch.futures.Future[torch.Tensor]:
        """One rank alone has nothing to exchange, but its steps count."""
        if bucket.is_last():
            if self._states.waiting is not None:  # for more ranks
                self._states.waiting["step"] += 1
            self.exchange.skip_step()
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def _add_bucket(self, bucket, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        names = self._add_gradients(bucket, buffer)
        self._seen.append(names)
        on_cpu = buffer.device.type == "cpu"
        if not on_cpu:
            self._note_ready(buffer.device)
        future = torch.futures.Future(devices=None if on_cpu else [buffer.device])
        self._futures.append((future, buffer, names))
        done = future.then(self._value)
        if self.bucket_names is None and bucket.is_last():
            self._worker.submit(self._open).result()
            names = list(self._gradients)
            self._count_missing()
        if self.bucket_names is not None:
            self._start_complete(names)
        if bucket.is_last():
            self._worker.submit(self._end, self._futures)
            self._futures = []
            self._ddp_results.follow_ddp(self._results_of_step, {name: self.parameters[name] for name in self._gradients})
        return done

    def _results_of_step(self) -> Iterator[Result]:
        for name, gradient in self._gradients.items():
            yield Result(name, self.parameters[name], gradient, self._bucket_of[name].memory, self._finite)

    def _add_gradients(self, bucket, buffer: torch.Tensor) -> list[str]:
        """Remember where the gradients of one of DDP's buckets are; returns their names."""
        names = [self._name(p) for p in bucket.parameters()]
        for name, p in zip(names, bucket.parameters(), strict=True):
            if not p.is_floating_point():  # DDP's buffer holds complex ones as two real numbers each
                raise ConfigError(f"parameter {name!r} is {p.dtype}; gradients must be real floating point")
        if comes_as_rows(names[0], buffer):
            self._gradients[names[0]] = buffer  # the only one in its bucket
            return names
        for name, gradient in zip(names, bucket.gradients(), strict=True):
            p = self.parameters[name]
            if is_non_overlapping_and_dense(p):
                # In DDP's bucket the elements lie as in the parameter, which its view of them does not say.
                gradient = buffer.as_strided(gradient.shape, p.stride(), gradient.storage_offset())
            self._gradients[name] = gradient
        return names

    def _name(self, p: torch.nn.Parameter) -> str:
        name = self._names.get(id(p))
        if name is None:
            if not self._numbered or self.bucket_names is not None:
                raise ConfigError(
                    f"a parameter of shape {tuple(p.shape)} is not in named_parameters: pass "
                    f"model.named_parameters() of the model that DDP wraps, and one state for each model"
                )
            name = self._names[id(p)] = f"parameter{len(self._names)}"
            self.parameters[name] = p
        return name

    def _start_complete(self, names: list[str]) -> None:
        """Start the buckets that these gradients complete."""
        for name in names:
            bucket = self._bucket_of[name]
            self._missing[bucket.name] -= 1
            if not self._missing[bucket.name]:
                gradients = self._gradients_of(bucket)
                self._in_place[bucket.name] = out = flat_arrays(gradients) if bucket.writes_parts else None
                if out:
                    bucket.lender = None
                else:
                    self._outputs[bucket.name].clear(())
                pack = functools.partial(self._pack, bucket, gradients, 1.0 / self._unit(bucket))
                ready = self._ready.get(torch.device(bucket.device))
                self.exchange.start(bucket, functools.partial(_after, ready, pack) if ready else pack, out)

    def _note_ready(self, device: torch.device) -> None:
        """On an accelerator: what backward has queued so far has to be computed first. The worker, which has a stream of its
        own, waits for that and not for what comes later."""
        if device not in self._streams:
            self._streams.add(device)
            self._worker.submit(torch.cuda.set_stream, torch.cuda.Stream(device)).result()
        self._ready[device] = torch.cuda.current_stream(device).record_event()

    def _value(self, future: torch.futures.Future) -> torch.Tensor:
        if self._error is not None:
            raise self._error
        return future.value()

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self.exchange.abort()

    # State

    def save(self) -> dict:
        """See StateSession; with "layout" beside the rest: the order of the tensors by bucket of DDP."""
        saved = self._states.save(self.exchange, self._order)
        return saved if self._states.waiting is not None else {**saved, "layout": self.bucket_names or []}

    @property
    def _order(self) -> list[str]:
        return [name for names in self.bucket_names or () for name in names]

    def load(self, saved: dict | None) -> None:
        """None: from zero. In force from the next step on, in which the ranks settle what they start with."""
        if self._futures:
            raise ExchangeError("a state cannot be loaded during backward()")
        self._states.load(saved, None)
        self.bucket_names = None

    def consolidate(self, to: int) -> None:
        """A collective: until the next step, `save` on rank `to` has the memories of all ranks."""
        self._worker.submit(self._states.consolidate, self.exchange, self._order, self.prefix, to).result()

    # In the worker's thread

    def _open(self) -> None:
        """Before the first step, and the first one after a state was loaded."""
        layout = self._first_bucket_names()
        self._follows = layout == self._seen  # else DDP rebuilds its buckets now, and then they are as they were
        self._build(layout)
        if self._states.waiting is not None:
            self._states.load(self._states.waiting, self.exchange)
        self._states.settle(self.exchange, self.prefix)

    def _first_bucket_names(self) -> list[list[str]]:
        """DDP's own, or the one of rank 0's checkpoint. A collective."""
        saved = (self._states.waiting or {}).get("layout", [])
        fits = sorted(name for part in saved for name in part) == sorted(self._gradients)
        names = list(self._gradients)
        order = np.array(
            [2 * names.index(name) + (name == part[0]) for part in (saved if fits else self._seen) for name in part], "<u4"
        )
        layout: list[list[str]] = []
        for code in self.gather("order", order.view(np.uint8))[0].copy().view("<u4"):
            if code % 2:
                layout.append([])
            layout[-1].append(names[code // 2])
        return layout

    def _build(self, layout: list[list[str]]) -> None:
        tables = {name for name, gradient in self._gradients.items() if gradient.is_sparse}
        for output in self._outputs.values():  # before the states follow into the new buckets, which takes memory
            output.release()
        self._set_buckets([[as_tensor(name, self._gradients[name]) for name in names] for names in layout], tables)
        self.bucket_names = layout
        self.exchange.transport.forget_lengths()
        self.exchange.check_config_digests(self.gather("config", self.exchange.config_digest()))

    def _gradient(self, name: str) -> torch.Tensor:
        return self._gradients[name]

    def _end(self, futures) -> None:
        """Finish the step. Errors, those of starting as well, go to all futures."""
        try:
            self.exchange.advance()
            for bucket in self.exchange.buckets:
                self.exchange.finish(bucket, self._in_place.get(bucket.name) or self._outputs[bucket.name].out)
            self._finite = self.exchange.end_step()
            for bucket in self.exchange.buckets:
                self._receive(bucket)
            if self._follows and self.bucket_names != self._seen:
                self._build(self._seen)
            self._follows = True
        except BaseException as error:
            self._fail(error)
        for future, buffer, names in futures:
            future.set_result(self._gradients[names[0]] if buffer.is_sparse else buffer)

    def _receive(self, bucket: Bucket) -> None:
        if results := self._in_place.get(bucket.name):
            if (factor := self._unit(bucket)) != 1.0:
                for result in results:
                    result *= np.float32(factor)
            return
        for name, result in self._results(bucket):
            if result.is_sparse:
                self._gradients[name] = result
            else:
                self._gradients[name].copy_(result)


def _after(ready: torch.cuda.Event, pack: Callable, *out):
    """In the worker's thread, which has a stream of its own."""
    torch.cuda.current_stream().wait_event(ready)
    return pack(*out)
