"""One training step's exchange: buckets are encoded in a worker thread while backward goes on, then gathered.

Frameworks differ in how gradients get in and out; everything between is here, so that every adapter does the same.
"""

import concurrent.futures
import dataclasses
import functools
import threading
from collections.abc import Callable

import numpy as np
import xxhash

from .._util.rng import Stream
from ..communicators.allreduce import Allreduce
from ..communicators.auto import Auto, Passed, Switch
from ..communicators.base import Communicator, Pending
from ..communicators.factors import FactorAllreduce, WarmStarts
from ..errors import ConfigError
from ..memory.base import Memory
from ..observe.capture import Capture
from ..observe.dispatch import Watch
from ..pipeline.compressor import Compressor
from ..policy.auto_tuner import Chooser
from ..policy.kimad import Controller
from ..policy.memories import Memories
from ..policy.schedules import Schedules
from ..transport import topology
from ..transport.base import Transport
from ..transport.fusion import Fusion
from ..transport.metered import Metered
from .buckets import Bucket, Tensor
from .eager_decoder import Early
from .overlap import Late
from .serial_executor import Turns
from .stats import Counts

_STEP, _WARM_STARTS = "step", "lowrank"  # in state dicts, beside the memories' fields


class Exchange:
    """Starts and finishes the buckets of each step, keeps the memory consistent, and counts.

    memory: a Memory, its spec, or specs by name pattern (grace_ext.policy.Memories). weight: what the sum over ranks is
    multiplied with (1 / ranks for an average). capture: saves gradients of rank 0. executor: of the one thread that encodes
    while others compute; one of its own if None. schedule: options by step (grace_ext.policy.Schedules). joinable: whether
    ranks may leave the loop before others, and `accompany` these. observe: who looks on (grace_ext.observe.observers).
    """

    def __init__(self, transport: Transport, memory, weight: float, seed: int = 0,
                 capture: Capture | None = None, executor: concurrent.futures.Executor | None = None,
                 schedule: dict | None = None, joinable: bool = False, observe=None):
        self.memories = Memories(memory)
        self.schedules = Schedules(schedule)
        self._kimad = Controller(self.schedules.adaptive, transport) if self.schedules.adaptive else None
        self.transport = Metered(transport, self._kimad.monitor.add) if self._kimad else transport
        self.weight = weight
        self.seed = seed
        self._watch = Watch(transport, observe, capture)
        self.step = 0
        self.buckets: list[Bucket] = []
        self._memories: list[Memory] = []  # of the buckets, each once
        self._warm_starts = WarmStarts()
        self._started: dict[str, concurrent.futures.Future] = {}
        self._finished: set[str] = set()
        self._starting = threading.Lock()  # backward may have a thread for each device
        self._finite = True
        self._failed: BaseException | None = None  # why a bucket of this step could not be sent
        self._joinable = joinable
        self._tally: concurrent.futures.Future | None = None  # of the ranks that take part in the step
        self._chooser: Chooser | None = None
        self._fusion: Fusion | None = None
        self._turns = Turns(executor)
        self._early, self._late = self._new_early(), Late(self._started)
        self._total, self._last = Counts(), Counts()

    def bucket(self, name: str, tensors: list[Tensor], compressor: Compressor, communicator: Communicator) -> Bucket:
        """The bucket of these parts. Two kinds go by allreduce whatever the communicator: plain float32, because the result
        is the same and the bytes are fewer, without errors to remember; and low-rank factors, because only sums carry them.

        Raises ConfigError for parts that do not fit together.
        """
        memory = self.memory_of(tensors[0])
        if compressor.exact:
            return Bucket(name, tensors, compressor, Allreduce(), memory.exact())
        factors = FactorAllreduce(tensors, compressor, self._warm_starts) if compressor.lowrank is not None else None
        if isinstance(communicator, Auto):
            communicator = self._switch(compressor, memory, factors)
        else:
            communicator = factors or communicator
        return Bucket(name, tensors, compressor, communicator, memory)

    def _switch(self, compressor: Compressor, memory: Memory, factors: FactorAllreduce | None) -> Switch:
        if self.transport.between_steps() is None:
            raise ConfigError("communicator 'auto' has to measure the link between steps, and cannot do it here: use "
                              "allgather, sharded or allreduce")
        if memory.has_hooks:
            raise ConfigError(f"communicator 'auto' sends some steps dense, of which memory {memory.name!r} knows nothing: "
                              f"use residual or none")
        return Switch({"factors": factors}) if factors else Switch.of(compressor, self.transport.size)

    def set_buckets(self, buckets: list[Bucket]) -> None:
        """Replace the buckets; the memory's state follows its tensors into the new ones."""
        if self._started:
            raise ConfigError("buckets cannot change while an exchange is under way")
        state = self.state_dict() if self.buckets else {}
        self.buckets = buckets
        self._memories = list({id(bucket.memory): bucket.memory for bucket in buckets}.values())
        self.load_state_dict(state)
        self._fusion = Fusion(self.transport) if self.transport.can_fuse and len(buckets) > 1 else None
        switched = [bucket for bucket in buckets if isinstance(bucket.communicator, Switch)]
        self._chooser = Chooser(self.transport, switched) if switched and self.transport.size > 1 else None
        if self._kimad:
            self._kimad.set_buckets(buckets)

    def memory_of(self, tensor: Tensor) -> Memory:
        """The memory of a tensor that is compressed. Tensors of a bucket have the same one."""
        return self.memories.choose(tensor.name, tensor.size)

    def state_dict(self) -> dict:
        """This rank's state between steps: {"step": the number of the next one, field: {tensor name: float32[size]}}.
        Fields are those of the memories ("residual", …) and "lowrank", the factors of warm starts."""
        state = {_STEP: self.step}
        if factors := self._warm_starts.state_dict():
            state[_WARM_STARTS] = factors
        by_bucket = {id(memory): memory.state_dict() for memory in self._memories}
        for bucket in self.buckets:
            ends = np.cumsum(bucket.sizes)[:-1]
            for field, array in by_bucket[id(bucket.memory)].get(bucket.name, {}).items():
                parts = zip((tensor.name for tensor in bucket.tensors), np.split(array, ends), strict=True)
                state.setdefault(field, {}).update(parts)
        return state

    def load_state_dict(self, state: dict) -> None:
        """The inverse; tensors without a state start from zero. Fields that no memory here has are left out. Raises
        ConfigError for a state of another size."""
        by_memory: dict[int, dict] = {id(memory): {} for memory in self._memories}
        for bucket in self.buckets:
            for field in bucket.memory.states:
                given = state.get(field, {})
                if any(tensor.name in given for tensor in bucket.tensors):
                    parts = [_fitting(field, tensor, given.get(tensor.name)) for tensor in bucket.tensors]
                    by_memory[id(bucket.memory)].setdefault(bucket.name, {})[field] = np.concatenate(parts)
        for memory in self._memories:
            memory.load_state_dict(by_memory[id(memory)])
        self._warm_starts.load_state_dict(state.get(_WARM_STARTS, {}))
        self.step = state.get(_STEP, self.step)

    def layout(self) -> np.ndarray:
        """uint8[16]: a digest of all that must be the same on all ranks before the first step, and one of this rank's host.
        Raises ConfigError for a schedule of an option that there is not."""
        compressors = [bucket.declared for bucket in self.buckets]
        self.schedules.check(compressors)
        parts = [(b.name, str(b.declared), b.communicator.name, repr(b.memory),
                  [(tensor.common_name, tensor.shape) for tensor in b.tensors]) for b in self.buckets]
        parts += [*self.schedules.signature(compressors), self._watch.signature()]
        digest = xxhash.xxh64_digest(repr((parts, self.seed, self.weight)).encode())
        return np.concatenate([np.frombuffer(digest, np.uint8), topology.own()])

    def check_layouts(self, gathered: np.ndarray) -> None:
        """gathered: every rank's `layout`, in the order of ranks. Raises ConfigError if ranks were not built alike. Then the
        transport knows the hosts."""
        layouts, names = np.split(gathered.reshape(self.transport.size, -1), [-topology.SIZE], axis=1)
        other = [rank for rank, theirs in enumerate(layouts) if theirs.tobytes() != layouts[0].tobytes()]
        if other:
            raise ConfigError(f"ranks {other} have other parameters, specs or options than rank 0: all ranks must wrap the "
                              f"same model in the same way")
        self.transport.hosts = topology.numbered(names)

    def start(self, bucket: Bucket, pack: Callable[[np.ndarray], None], out=None) -> None:
        """Queue the bucket: the worker thread packs, encodes and sends it. pack must not need the caller's thread. It is
        called as the bucket's own `start` says. out: what `finish` will be given, if it may be written to from now on: then
        the worker decodes the bucket as soon as it has arrived and there is nothing to encode."""
        with self._starting:
            self._begin()
            look, transport = self._watch.look(self.step, bucket), self._transport_of(bucket)
            transport = self._watch.timed(self.step, bucket, transport)
            weigh = self._kimad.weigh_of(bucket) if self._kimad else None
            start = functools.partial(bucket.start, transport, pack, self._stream_of(bucket), look, weigh)
            self._started[bucket.name] = self._turns.submit(self._work, bucket, start, out)
        self._early.call()

    def _work(self, bucket: Bucket, start: Callable, out) -> Pending:
        """In the worker thread, or in that of a caller who would wait for it."""
        pending = self._sent(bucket, start)
        if out is not None:
            self._early.add(bucket, pending, out, len(bucket.communicator.collectives_of(self.transport)))
        self._early.look()
        return pending

    def _sent(self, bucket: Bucket, start: Callable) -> Pending:
        """start(), whose error those learn of that wait for this bucket's container to go with theirs. After an error
        nothing more of the step is sent: where collectives have no names, as in PyTorch DDP, the other ranks would take
        what comes next for this one."""
        try:
            self._check_sent()
            return start()
        except BaseException as error:
            self._failed = error
            if self._fusion:
                self._fusion.fail(bucket, error)
            raise

    def _check_sent(self) -> None:
        if self._failed is not None:
            raise self._failed

    def _new_early(self) -> Early:
        return Early(self._turns.executor, self._advance, self._receive, lambda: len(self._started) >= len(self.buckets))

    def _transport_of(self, bucket: Bucket) -> Transport:
        return self._fusion.transport_of(bucket) if self._fusion else self.transport

    def passes(self, bucket: Bucket) -> str | None:
        """The dense way, "float32" or "fp16", by which the adapter may reduce the bucket's tensors in this step itself, and
        tell it by `pass_on`; the same on all ranks. None if the bucket has to `start`."""
        switch = bucket.communicator
        return switch.way if bucket.may_pass and isinstance(switch, Switch) and switch.flushed else None

    def look(self, bucket: Bucket) -> Callable | None:
        """What wants to see the gradient of a bucket that passes: called with (float32[size], None). Or None."""
        return self._watch.look(self.step, bucket)

    def pass_on(self, bucket: Bucket, pending: Passed) -> None:
        """In the place of `start`. `finish` waits for it, and writes nothing."""
        with self._starting:
            self._begin()
            self._started[bucket.name] = _done(pending)

    def _begin(self) -> None:
        if not self._started:
            self._count_ranks(1)

    def _stream_of(self, bucket: Bucket) -> Stream:
        """This step's. The compressor becomes this step's, too."""
        if self.schedules:
            density = self._kimad.densities.get(bucket.name) if self._kimad else None
            bucket.compressor = self.schedules.at(bucket.declared, self.step, density)
        return Stream(self.seed, bucket.tensors[0].common_name, self.step, self.transport.rank)

    def _count_ranks(self, own: int) -> None:
        """A step begins. Where no bucket says by its length how many ranks have a gradient, ask."""
        if self._fusion:
            self._fusion.begin()
        if self._joinable and not any(bucket.communicator.sends_containers for bucket in self.buckets):
            self._tally = self._turns.submit(self.transport.allreduce, f"{self.buckets[0].name}.ranks",
                                             np.full(1, own, np.float32))

    def accompany(self, room: Callable, passed: Callable | None = None) -> bool:
        """For a rank that has nothing more to give: take part in a step of the others, so that they can finish it and this
        rank's exchange stays in step. False, without a step, when no rank has anything to give.

        room(bucket) -> what `finish` may write to. passed(bucket) -> what to `pass_on`, with zeros, for one that passes.
        """
        if not self.buckets:
            return False
        self._count_ranks(0)
        first = next((bucket for bucket in self.buckets if bucket.communicator.sends_containers), self.buckets[0])
        if self._tally is not None:
            others = bool(self._tally.result().wait()[0])
            self._tally = None
        else:
            together = self._fusion.together(first) if self._fusion else [first.name]
            for bucket in self.buckets:
                if bucket.name in together:
                    self._start_empty(bucket)
            pending = self.pending(first)
            pending.handle = _Received(pending.handle.wait())
            others = pending.handle.result.size > 0
        if not others:
            self._forget_step()
            return False
        for bucket in self.buckets:
            if self.passes(bucket):
                self._started[bucket.name] = _done(passed(bucket))
            elif not self.is_started(bucket):
                self._start_empty(bucket)
        self.advance()
        for bucket in self.buckets:
            self.finish(bucket, room(bucket))
        self.end_step()
        return True

    def _start_empty(self, bucket: Bucket) -> None:
        stream = self._stream_of(bucket)
        start = functools.partial(bucket.start_empty, self._transport_of(bucket), stream)
        self._started[bucket.name] = self._turns.submit(self._sent, bucket, start)

    def is_started(self, bucket: Bucket) -> bool:
        return bucket.name in self._started

    def unfinished(self) -> tuple[str, ...]:
        """Names of the buckets that were started in this step and are not finished. For any thread."""
        return tuple(name for name in tuple(self._started) if name not in self._finished)

    def pending(self, bucket: Bucket) -> Pending:
        """What the started bucket waits for. Returns when it is encoded and sent, by the worker thread, or in this one
        rather than to wait until that one begins."""
        future = self._started[bucket.name]
        while not future.done() and (done := self._turns.take()):
            self._late.did(done)
        return self._late.wait(future.result)

    def advance(self, *buckets: Bucket) -> None:
        """When all buckets are started: let those of several dependent collectives start all but the first, so that they
        overlap. The given ones start the next."""
        left = [(bucket, len(bucket.communicator.collectives_of(self.transport)) - 1) for bucket in self.buckets]
        levels = 1 if buckets else max((count for _, count in left), default=0)
        if levels and not buckets:
            for bucket in self.buckets:
                self.pending(bucket)  # the worker may be about to do the same
        self._late.wait(self._early.rest)
        self._check_sent()
        for level in range(levels):
            todo = buckets or [bucket for bucket, count in left if self._early.levels(bucket) <= level < count]
            for number, bucket in enumerate(todo, start=1):
                self._late.do(self._advance, bucket, self.pending(bucket), others=todo[number:])

    def _advance(self, bucket: Bucket, pending: Pending) -> None:
        before = self._watch.before(self.step, bucket, pending)
        bucket.advance(pending, self.transport)
        self._watch.after(self.step, bucket, pending, before)

    def finish(self, bucket: Bucket, out) -> None:
        """Wait for the bucket and write the weighted sum over ranks to out (float32[size], or what the bucket's own `finish`
        says). Errors of the worker thread surface here."""
        pending = self.pending(bucket)
        self._late.wait(self._early.rest)
        self._check_sent()
        if early := self._early.result(bucket):
            finite = early.result()
        else:
            finite = self._late.do(self._receive, bucket, pending, out, others=self.buckets)
        self._finite &= finite
        self._watch.finished(self.step, bucket, pending)
        self._finished.add(bucket.name)
        self._last.add(bucket, pending)
        if self._fusion and pending.received is not None:
            self._fusion.received(bucket, pending.received)
        for policy in filter(None, (self._chooser, self._kimad)):
            policy.add(bucket, pending)

    def _receive(self, bucket: Bucket, pending: Pending, out) -> bool:
        before = self._watch.before(self.step, bucket, pending)
        finite = bucket.finish(pending, self.transport, out, self.weight)
        self._watch.after(self.step, bucket, pending, before)
        return finite

    def end_step(self) -> bool:
        """Close the step after all buckets are finished. If some rank's gradient was not finite, every memory on every
        rank stays as it was, and False is returned."""
        finite, self._finite = self._finite, True
        if self._tally is not None:
            self._tally.result().wait()
            self._tally = None
        for state in (*self._memories, self._warm_starts):
            state.commit() if finite else state.rollback()
        step, last = self.step, self._last
        last.late, last.exposed = self._late.seconds, self._late.exposed
        self._forget_step()
        self.step += 1
        self._total.merge(last)
        self._total.last, self._last = last, Counts()
        self._watch.end_step(step, finite, last.report, self.buckets)
        if self._fusion:
            self._fusion.end_step(finite, self.buckets)
        for policy in filter(None, (self._chooser, self._kimad)):
            policy.end_step(finite)
        return finite

    def _forget_step(self) -> None:
        self._early.end()
        self._started.clear()
        self._finished.clear()
        self._failed = None
        self._early, self._late = self._new_early(), Late(self._started)

    def abort(self) -> None:
        """Forget a step that failed; the memory stays as it was."""
        for future in self._started.values():
            future.cancel()
        concurrent.futures.wait(self._started.values())  # the one that runs would still begin a memory's step
        self._forget_step()
        if self._fusion:
            self._fusion.abort()
        self._tally = None
        self._finite = True
        self._last = Counts()
        for state in (*self._memories, self._warm_starts):
            state.rollback()
        self._watch.forget()
        if self._kimad:
            self._kimad.abort()

    def close(self) -> None:
        """Forget a step under way and end the worker thread: for an exchange that another one takes the place of."""
        self.abort()
        self._turns.close()

    def stats(self, *others: "Exchange") -> dict:
        """Totals since the start, those of the others included, and the same for this one's last step under "last_step".

        bytes_in: float32 bytes of the gradients; of gradients that come as rows, those of each row as it came, duplicates
        included, and 8 for its index; bytes_out: payload bytes that this rank handed to collectives, headers and padding
        included; ratio: one by the other; compressed: the same for the buckets that are not plain float32; seconds: per
        stage, those of the worker thread included ("exchange" is what was not hidden behind other work); late_seconds: how
        long codecs worked while steps waited, and not beside backward; exposed_seconds: of these, those in which steps
        waited for nothing else, decoding while another bucket was still on its way left out; index_codecs: how
        many containers each index codec wrote, the ones that `auto` chose under their own names; residual_norm_ratio: by
        tensor, the L2 norm of its residual over that of this rank's gradient, when somebody last looked (an observer, or
        rank 0 after 8, 16, 32, ... steps); None where that is no number; ways: with communicator "auto", the next step's
        way of each tensor;
        bandwidth: with schedule "kimad", the bytes per second that this rank's link gives, None before anything is known;
        densities: of its next step, by tensor.
        """
        total, ratios = Counts(), {}
        for exchange in (*others, self):
            total.merge(exchange._total)
            ratios.update(exchange._watch.residual_norm_ratios())
        last = self._total.last or Counts()
        steps = sum(exchange.step for exchange in (self, *others))
        ways = {tensor.name: bucket.communicator.way for exchange in (*others, self) for bucket in exchange.buckets
                if isinstance(bucket.communicator, Switch) for tensor in bucket.tensors}
        densities = {tensor.name: exchange._kimad.densities[bucket.name] for exchange in (*others, self) if exchange._kimad
                     for bucket in exchange.buckets if bucket.name in exchange._kimad.densities for tensor in bucket.tensors}
        return {"steps": steps, **total.report(), "last_step": last.report(), "residual_norm_ratio": ratios, "ways": ways,
                "bandwidth": self._kimad and self._kimad.monitor.estimate, "densities": densities}


def _done(result) -> concurrent.futures.Future:
    future = concurrent.futures.Future()
    future.set_result(result)
    return future


@dataclasses.dataclass
class _Received:
    """The handle of a collective that has been waited for."""

    result: np.ndarray

    def wait(self) -> np.ndarray:
        return self.result


def _fitting(field: str, tensor: Tensor, state) -> np.ndarray:
    if state is None:
        return np.zeros(tensor.size, np.float32)
    if np.size(state) != tensor.size:
        raise ConfigError(f"{field} of {tensor.name!r} has {np.size(state)} elements, the tensor {tensor.size}")
    return np.asarray(state, np.float32).reshape(-1)
