"""Gradients out of the buckets of DistributedDataParallel into those of the exchange, and back."""

import concurrent.futures
import functools
import logging

import numpy as np
import torch
import torch.distributed as dist

from grace_ext import ConfigError, ExchangeError
from grace_ext.exchange import checkpoint
from grace_ext.exchange.bucketing import build_buckets
from grace_ext.exchange.buckets import Bucket, Tensor
from grace_ext.exchange.engine import Exchange

from .gradients import on_device, pack, receive
from .output_buffer import OutputBuffer, is_dense
from .rows import comes_as_rows
from .saved_state import gather_on

_LOG = logging.getLogger("grace_ext")


class DdpBuckets:
    """Takes DDP's buckets as they come, and gives a future for each.

    A bucket of the exchange starts when all its tensors are there, whatever DDP's buckets are. DDP rebuilds its own after
    the first step; those of the exchange follow at the end of a step in which the two differed, and what the memory holds
    follows its tensors.

    One thread, `worker`, does the work and issues all collectives: those of a bucket when it starts, in the order in which
    DDP completes them, which is the same on all ranks; what remains when all have started.
    """

    def __init__(
        self,
        parameters: dict[str, torch.nn.Parameter],
        exchange: Exchange,
        worker: concurrent.futures.Executor,
        rules,
        communicator,
        *,
        prefix: str,
        selection: str,
        on_resize,
        grad_scaler=None,
    ):
        """parameters: by name, {} to number them as they come. worker: the exchange's executor, of one thread."""
        checkpoint.check_policy(on_resize)
        self.exchange = exchange
        self._worker, self._rules, self._communicator = worker, rules, communicator
        self._prefix, self._selection, self._grad_scaler = prefix, selection, grad_scaler
        self._parameters = dict(parameters)
        self._names = {id(p): name for name, p in parameters.items()}
        self._numbered = not parameters
        #: The buckets' tensors by the bucket of DDP that they were in; None before the first step.
        self.bucket_names: list[list[str]] | None = None
        self._saved: dict | None = None  # what was loaded and is not in force yet
        self._consolidated: dict[int, dict] = {}
        self._on_resize = on_resize
        self._follows = True  # whether buckets change when DDP's do
        self._error: BaseException | None = None
        self._streams: set[torch.device] = set()
        self._bucket_of: dict[str, Bucket] = {}
        self._outputs: dict = {}
        self._begin()

    # In the thread of backward

    def _begin(self) -> None:
        """A new step."""
        self._gradients: dict[str, torch.Tensor] = {}
        self._ready: dict[torch.device, torch.cuda.Event] = {}
        self._seen: list[list[str]] = []
        self._futures: list[tuple[torch.futures.Future, torch.Tensor, list[str]]] = []
        self._missing = {bucket.name: len(bucket.tensors) for bucket in self.exchange.buckets}
        self._scale = self._grad_scaler.get_scale() if self._grad_scaler is not None else 1.0  # 1.0 also if not enabled

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
            self._consolidated = {}
        try:
            if self.exchange.transport.size == 1:
                return self._pass(bucket)
            return self._add_bucket(bucket, bucket.buffer())
        except BaseException as error:
            self._fail(error)
            raise

    def _pass(self, bucket) -> torch.futures.Future[torch.Tensor]:
        """One rank alone has nothing to exchange, but its steps count."""
        if bucket.is_last():
            if self._saved is not None:  # kept for when there are more ranks
                self._saved["step"] += 1
            self.exchange.step += 1
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
            self._missing = {bucket.name: len(bucket.tensors) for bucket in self.exchange.buckets}
        if self.bucket_names is not None:
            self._start_complete(names)
        if bucket.is_last():
            self._worker.submit(self._end, self._futures)
            self._futures = []
        return done

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
            p = self._parameters[name]
            if is_dense(p):
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
            self._parameters[name] = p
        return name

    def _start_complete(self, names: list[str]) -> None:
        """Start the buckets that these gradients complete."""
        for name in names:
            bucket = self._bucket_of[name]
            self._missing[bucket.name] -= 1
            if not self._missing[bucket.name]:
                ready = self._ready.get(torch.device(bucket.device))
                self.exchange.start(bucket, functools.partial(self._pack, bucket, ready))

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
        """See grace_ext.exchange.checkpoint; with "layout" beside the rest: the order of the tensors by bucket of DDP."""
        if self._saved is not None:
            return self._saved
        transport, layout = self.exchange.transport, self.bucket_names or []
        saved = checkpoint.pack(
            self.exchange.state_dict(), transport.rank, transport.size, [name for part in layout for name in part]
        )
        saved["memories"].update(self._consolidated)
        return {**saved, "layout": layout}

    def load(self, saved: dict) -> None:
        """In force from the next step on, in which the ranks settle what they start with."""
        checkpoint.check_version(saved)
        if self._futures:
            raise ExchangeError("a state cannot be loaded during backward()")
        self._saved, self._consolidated, self.bucket_names = saved, {}, None

    def consolidate(self, to: int) -> None:
        """A collective: until the next step, `save` on rank `to` has the memories of all ranks."""
        transport = self.exchange.transport
        if not 0 <= to < transport.size:
            raise ConfigError(f"consolidate_state_dict: to={to}; allowed: 0 to {transport.size - 1}")
        if self._saved is None:
            self._consolidated = {}
            own = self.save()["memories"][transport.rank]
            memories = self._worker.submit(gather_on, transport, f"{self._prefix}.consolidate", own, to).result()
            self._consolidated = dict(enumerate(memories))

    # In the worker's thread

    def _open(self) -> None:
        """Before the first step, and the first one after a state was loaded."""
        layout = self._first_bucket_names()
        self._follows = layout == self._seen  # else DDP rebuilds its buckets now, and then they are as they were
        self._build(layout)
        whole, what = False, ""
        if self._saved is not None:
            loaded = checkpoint.choose(self._saved, self.exchange, self._on_resize)
            self.exchange.load_state_dict(loaded.state)
            whole, what = loaded.whole, loaded.what
        mine = np.array([whole, self.exchange.step], "<i8").view(np.uint8)
        all_whole, steps = self._gather("state", mine).copy().view("<i8").reshape(-1, 2).T
        warning = checkpoint.settle(self.exchange, all_whole == 1, steps)
        self._saved = None
        if self.exchange.transport.rank == 0:
            for level, line in ((logging.INFO if whole else logging.WARNING, what), (logging.WARNING, warning)):
                if line:
                    _LOG.log(level, line)

    def _first_bucket_names(self) -> list[list[str]]:
        """DDP's own, or the one of rank 0's checkpoint. A collective."""
        saved = self._saved.get("layout", []) if self._saved else []
        fits = sorted(name for part in saved for name in part) == sorted(self._gradients)
        names = list(self._gradients)
        order = np.array(
            [2 * names.index(name) + (name == part[0]) for part in (saved if fits else self._seen) for name in part], "<u4"
        )
        layout: list[list[str]] = []
        for code in self._gather("order", order.view(np.uint8)).reshape(-1, order.nbytes)[0].copy().view("<u4"):
            if code % 2:
                layout.append([])
            layout[-1].append(names[code // 2])
        return layout

    def _build(self, layout: list[list[str]]) -> None:
        tensors = {
            name: Tensor(name, g.numel(), g.dim(), str(g.device), tuple(g.shape)) for name, g in self._gradients.items()
        }
        tables = {name for name, g in self._gradients.items() if g.is_sparse}
        buckets = build_buckets(
            self.exchange,
            [[tensors[name] for name in names] for names in layout],
            tables,
            self._rules,
            self._communicator,
            self._prefix,
        )
        self.exchange.set_buckets([on_device(bucket, self._selection) for bucket in buckets])
        self._outputs = {bucket.name: OutputBuffer(bucket) for bucket in self.exchange.buckets}
        self._bucket_of = {t.name: b for b in self.exchange.buckets for t in b.tensors}
        self.bucket_names = layout
        self.exchange.transport.forget_lengths()
        self.exchange.check_config_digests(self._gather("config", self.exchange.config_digest()))

    def _gather(self, name: str, payload) -> np.ndarray:
        return self.exchange.transport.allgather(f"{self._prefix}.{name}", payload).wait()

    def _pack(self, bucket: Bucket, ready, *out):
        if ready is not None:
            torch.cuda.current_stream(bucket.device).wait_event(ready)
        return pack(bucket, [self._gradients[tensor.name] for tensor in bucket.tensors], 1.0 / self._unit(bucket), *out)

    def _unit(self, bucket: Bucket) -> float:
        """As in the other PyTorch adapters: what is kept beyond this step is kept without loss scale."""
        return self._scale if bucket.memory.stateful else 1.0

    def _end(self, futures) -> None:
        """Finish the step. Errors, those of starting as well, go to all futures."""
        try:
            self.exchange.advance()
            for bucket in self.exchange.buckets:
                self._receive(bucket)
            self.exchange.end_step()
            if self._follows and self.bucket_names != self._seen:
                self._build(self._seen)
            self._follows = True
        except BaseException as error:
            self._fail(error)
        for future, buffer, names in futures:
            future.set_result(self._gradients[names[0]] if buffer.is_sparse else buffer)

    def _receive(self, bucket: Bucket) -> None:
        names = [tensor.name for tensor in bucket.tensors]
        results = receive(
            self.exchange, bucket, self._outputs[bucket.name], [self._parameters[name] for name in names], self._unit(bucket)
        )
        for name, result in zip(names, results, strict=True):
            if result.is_sparse:
                self._gradients[name] = result
            else:
                self._gradients[name].copy_(result)
