"""The buckets of the PyTorch adapters over Horovod, driven by autograd hooks."""

import functools
import numbers
import threading

import numpy as np
import torch

from grace_ext import ConfigError, ExchangeError
from grace_ext.exchange.buckets import Bucket
from grace_ext.exchange.engine import Exchange
from grace_ext.exchange.shadow import shadow_step
from grace_ext.exchange.stalls import check_config_digests

from .._horovod.options import group_names
from .bucket_sizing import BucketSize
from .bypass import BypassBucket
from .device import behind_current_stream
from .gradients import own_array
from .output_buffer import OutputBuffer, to_gradient_layout
from .parameter_buckets import ParameterBuckets, as_tensor
from .rows import comes_as_rows, say_if_dense
from .taken import TakenGradients
from .torch_options import TorchOptions

JOIN_AND_CLOSURE = (
    "join() and step(closure): a rank without data has no loss to give; give all ranks as many batches, or "
    "step without a closure"
)
_NONE, _DENSE, _ROWS = 0, 1, 2  # what a rank's first backward pass says of a gradient


class TorchBuckets(ParameterBuckets):
    """Starts a bucket when backward has produced all its gradients; `synchronize` finishes them.

    The first step shows in which order backward produces gradients and which of them come as rows. Its buckets are made,
    and started, in `synchronize`; those of later steps start while backward goes on.

    parameters: by name, in the order of the model, frozen ones included: they take part from when they require gradients.
    passes: backward passes in a step.
    """

    #: Whether what is exchanged are the gradients, and nothing that `_pack` makes of them.
    sends_gradients = True

    def __init__(self, parameters: dict, exchange: Exchange, options: TorchOptions, *, prefix: str, passes: int = 1):
        super().__init__(exchange, options, prefix)
        self.all_parameters = parameters
        self._prescale, self._passes, self._sparse_as_dense = options.prescale, passes, options.sparse_as_dense
        self._grad_scaler = options.grad_scaler
        self._size = BucketSize(options, options.groups is not None, exchange, prefix)
        self._lends = self._releases = options.release_gradients
        self._taken = TakenGradients()
        self._starting = threading.Lock()  # backward may have a thread for each device
        self._groups = group_names(options.groups, {id(p): name for name, p in parameters.items() if p.requires_grad})
        #: Whether backward has produced a gradient since the last exchange.
        self.has_new_gradients = False
        #: Whether steps exchange what a closure returned.
        self.has_losses = False
        self._select_parameters()

    def _select_parameters(self) -> None:
        """The parameters that require gradients now are the ones to exchange."""
        self.parameters = {name: p for name, p in self.all_parameters.items() if p.requires_grad}
        for name, p in self.parameters.items():
            if not p.is_floating_point():
                raise ConfigError(f"parameter {name!r} is {p.dtype}; gradients must be real floating point")
        self.order: list[str] | None = None  # of the buckets' tensors, once all ranks agreed on it
        self._ready_order: list[str] = []  # the order of this rank's first backward pass, or that of a checkpoint
        self._gradient_kinds: dict[str, int] = {}  # what that backward pass gave
        self._size.requested = self._size.chosen
        self._build(list(reversed(self.parameters)))

    def check_config_digests(self) -> None:
        """Raises ConfigError on all ranks if they were not built alike."""
        check_config_digests(self.exchange, lambda digest: self.gather("config", digest))

    def request_order(self, order: list[str], bucket_bytes: int | None) -> None:
        """Before the next step the ranks agree on an order of the tensors and a size of buckets: these if rank 0 asks for them; for
        an empty order, or one of other names, that of the next backward pass. bucket_bytes: None for a size that is yet to be
        chosen."""
        self.order = None
        self._ready_order = list(order) if sorted(order) == sorted(self.parameters) else []
        self._size.requested = bucket_bytes if self._ready_order else None

    @property
    def wanted_order(self) -> list[str]:
        """The order in force, or what this rank will ask for; empty if it does not know yet."""
        return self._ready_order if self.order is None else self.order

    @property
    def wanted_bytes(self) -> int | None:
        """The size of buckets that belongs to `wanted_order`; None for one that is not chosen."""
        return self._size.requested if self.order is None else self._size.chosen

    # Buckets

    def _build(self, order: list[str], tables=frozenset()) -> None:
        """tables: names of those whose gradients come as rows; each has a bucket of its own."""
        self._built_with = order, tables
        self.exchange.transport.forget_lengths()
        tensors = [as_tensor(name, self.parameters[name]) for name in order]
        self._set_buckets([tensors], tables, bucket_bytes=self._size.bytes, groups=self._groups)
        for bucket in self.exchange.buckets:
            # Where collectives are paired by their order, a gradient cannot go as soon as it is there.
            has_names = not self.exchange.transport.in_order or bucket.device != "cpu"
            bucket.may_bypass = (
                self.sends_gradients
                and has_names
                and all(self.parameters[tensor.name].dtype == torch.float32 for tensor in bucket.tensors)
            )
        self._number_of = {tensor.name: i for b in self.exchange.buckets for i, tensor in enumerate(b.tensors)}
        self._reset_counts()

    def _agree_on_buckets(self, joined: bool = False) -> bool:
        """Before the first step: buckets in the order of the first rank that knows one; and each table whose gradient comes
        as rows, on all ranks that have a gradient for it, by itself. Ranks that have joined have no say. False if these are
        all. Raises ConfigError on all ranks if some have joined and others have losses to exchange."""
        names = list(self.parameters)
        if not names:
            return True
        number = {name: i for i, name in enumerate(names)}
        known = set(self._ready_order)
        order = self._ready_order + [name for name in reversed(names) if name not in known]
        own = np.array(
            [
                *((number[name], self._gradient_kinds.get(name, _NONE)) for name in order),
                (self.has_losses, self._size.requested or 0),
            ],
            "<u4",
        )
        message = np.empty(0, np.uint8) if joined else own.view(np.uint8).reshape(-1)
        received = self.exchange.transport.allgather(f"{self.prefix}.order", message).wait()
        reports = received.copy().view("<u4").reshape(-1, *own.shape)
        if len(reports) < self.exchange.transport.size and reports[:, -1, 0].any():
            raise ConfigError(JOIN_AND_CLOSURE)
        reports, sizes = reports[:, :-1], reports[:, -1, 1]
        kinds = np.zeros((len(reports), len(names)), np.uint8)
        for row, report in zip(kinds, reports, strict=True):
            row[report[:, 0]] = report[:, 1]
        some = kinds.any(axis=1)
        if not some.any():
            return bool(len(reports))  # no backward pass yet
        rows, dense = (kinds == _ROWS).any(axis=0), (kinds == _DENSE).any(axis=0)
        self.order = [names[i] for i in reports[np.argmax(some)][:, 0]]
        layout = self.order, {names[i] for i in np.flatnonzero(rows & ~dense)}
        is_resized = self._size.agree(int(sizes[np.argmax(some)]) or None)
        if layout != self._built_with or is_resized:
            self._build(*layout)
        return True

    def _end_step_of_size(self) -> None:
        if self._size.on_step_end(self._built_with[0]):
            self._build(*self._built_with)

    # The step

    def _reset_counts(self) -> None:
        self._passes_left = dict.fromkeys(self.parameters, self._passes)
        self._count_missing()
        self._taken.forget()
        self._loss_scale: float | None = None  # of this step, once a bucket has started
        self._bypassing: dict[str, BypassBucket] = {}  # by bucket
        self._complete: set[str] = set()  # buckets, where they are started in their order
        self._started = 0  # how many of them

    def set_passes(self, passes: int) -> None:
        if passes < 1 or self.under_way():
            raise ConfigError("backward_passes_per_step must be 1 or more, and cannot change between backward() and step()")
        self._passes = passes
        self._reset_counts()

    def under_way(self) -> bool:
        """Whether a bucket's gradients have been handed over and not yet been synchronized."""
        return bool(self._bypassing) or not all(self._missing.values())

    def on_gradient_ready(self, name: str) -> None:
        """The parameter has its gradient of one backward pass. Starts the bucket that it completes, except in a first step:
        there the ranks have yet to agree on the buckets."""
        self.has_new_gradients = True
        self._size.on_gradient(name)
        if name not in self.parameters:
            return  # it was frozen at the last exchange; the next one takes it in
        if self._passes_left[name] == 0:
            raise ExchangeError(
                f"the gradient of {name!r} was computed more than backward_passes_per_step="
                f"{self._passes} times before step(); increase backward_passes_per_step"
            )
        if self.order is None:
            as_rows = not self._sparse_as_dense and comes_as_rows(name, self.parameters[name].grad)
            self._gradient_kinds[name] = _ROWS if as_rows else _DENSE
        elif not self._sparse_as_dense:
            say_if_dense(name, self.parameters[name].grad, self._bucket_of[name])
        self._passes_left[name] -= 1
        if self._passes_left[name] == 0:
            if self.order is None and name not in self._ready_order:
                self._ready_order.append(name)
            bucket = self._bucket_of[name]
            self._missing[bucket.name] -= 1
            if self.order is not None and self.exchange.bypass_dtype(bucket):
                self._bypass(bucket, [self._number_of[name]])
            if self._missing[bucket.name] == 0 and self.order is not None:
                self._on_complete(bucket)

    def _on_complete(self, bucket: Bucket) -> None:
        """Start a bucket, all of whose gradients are there; if collectives are paired by their order, after all before it."""
        if not self.exchange.transport.in_order:
            self._start(bucket)
            return
        with self._starting:
            self._complete.add(bucket.name)
            for one in self.exchange.buckets[self._started :]:
                if one.name not in self._complete:
                    break
                self._started += 1
                self._start(one)

    def _bypass(self, bucket: Bucket, numbers) -> BypassBucket:
        """Let the gradients of these numbers in the bucket bypass the exchange. Those that this rank lacks become zero."""
        bypass = self._bypassing.get(bucket.name)
        if bypass is None:
            bypass = self._bypassing[bucket.name] = BypassBucket(self.exchange, bucket, self._prescale)
        for number in numbers:
            p = self.parameters[bucket.tensors[number].name]
            if p.requires_grad and p.grad is None:
                p.grad = torch.zeros_like(p)
            elif p.requires_grad and p.grad.layout != torch.strided:
                p.grad = to_gradient_layout(p, p.grad.to_dense())
            bypass.add(number, p.grad.detach() if p.requires_grad else torch.zeros_like(p))
        return bypass

    def _start(self, bucket: Bucket) -> None:
        if self.exchange.bypass_dtype(bucket):
            self.exchange.submit_bypass(bucket, self._bypass(bucket, range(len(bucket.tensors))).pending())
            return
        if self._loss_scale is None:
            self._loss_scale = float(self._grad_scaler.get_scale()) if self._grad_scaler else 1.0
        output, parameters = self._outputs[bucket.name], [self.parameters[tensor.name] for tensor in bucket.tensors]
        output.clear(parameters)
        factor = self._prescale / self._unit(bucket)
        if bucket.uses_loan and self._releases and factor == 1.0 and len(parameters) == 1:
            # The next residual then takes the gradient's place, and the result that of the residual.
            output.lend(own_array(parameters[0]))
        pack = functools.partial(self._pack, bucket, self._gradients_of(bucket), factor)
        decodes_early = bucket.device == "cpu" and not bucket.uses_loan
        if bucket.uses_loan and self._releases:
            self._taken.take(parameters)
            self.exchange.wait_for_room()
        if torch.device(bucket.device).type == "cuda":
            pack = behind_current_stream(bucket, pack)
        self.exchange.start(bucket, pack, output.out if decodes_early else None)

    def _gradient(self, name: str) -> torch.Tensor | None:
        p = self.parameters[name]
        return p.grad.detach() if p.requires_grad and p.grad is not None else None

    def synchronize(self) -> None:
        """Finish all buckets; those with a parameter that got no gradient on this rank are started first."""
        try:
            self._size.on_backward_end()
            if self.order is None:
                self._agree_on_buckets()
            for bucket in self.exchange.buckets:
                if not self.exchange.is_started(bucket):
                    self._start(bucket)
            self.exchange.advance()
            for bucket in self.exchange.buckets:
                self.exchange.finish(bucket, None if bucket.name in self._bypassing else self._outputs[bucket.name].out)
            self.exchange.end_step()
            for bucket in self.exchange.buckets:
                self._set_gradients(bucket)
        except BaseException:
            self.exchange.abort()
            raise
        finally:
            self._reset_counts()
            self.has_new_gradients = False
        self._follow_requires_grad()
        self._end_step_of_size()

    def reduce_loss(self, loss):
        """A collective: what a closure returned on each rank, a number or a tensor with one, summed over ranks and scaled as
        gradients are. If it is no number on any rank, it stays what it is. Raises ConfigError if it is one on some only."""
        value = loss.item() if isinstance(loss, torch.Tensor) and loss.numel() == 1 else loss
        known = isinstance(value, numbers.Real)
        own = np.array([known, value if known else 0], "<f8").view(np.uint8)
        are_known, values = self.gather("loss", own).copy().view("<f8").T
        if not are_known.any():
            return loss
        if not are_known.all():
            raise ConfigError(
                f"the closure returned a number on ranks {np.flatnonzero(are_known).tolist()} only; it has to "
                f"return one on all ranks, or on none"
            )
        reduced = sum(values.tolist()) * self._prescale * self.exchange.weight
        return torch.full_like(loss.detach(), reduced) if isinstance(loss, torch.Tensor) else reduced

    def shadow_step(self) -> bool:
        """For a rank that has joined: take part in a step of the others. False when there are no others."""
        try:
            if self.order is None and not self._agree_on_buckets(joined=True):
                return False
            goes_on = shadow_step(self.exchange, lambda bucket: OutputBuffer(bucket).out, self._bypass_with_zeros)
            if goes_on:
                self._end_step_of_size()
            return goes_on
        except BaseException:
            self.exchange.abort()
            raise

    def _bypass_with_zeros(self, bucket: Bucket):
        bypass = BypassBucket(self.exchange, bucket, self._prescale)
        for number, size in enumerate(bucket.sizes):
            bypass.add(number, torch.zeros(size, dtype=torch.float32, device=bucket.device))
        return bypass.pending()

    def abort(self) -> None:
        """Forget a step that cannot be finished."""
        self.exchange.abort()
        self._reset_counts()
        self.has_new_gradients = False

    def _set_gradients(self, bucket: Bucket) -> None:
        """Make the gradients views of the result, or copies where dtype, device or layout differ."""
        if bucket.name in self._bypassing:
            return
        for name, result in self._results(bucket):
            p = self.parameters[name]
            if p.requires_grad:
                p.grad = to_gradient_layout(p, result)

    # Freezing and unfreezing

    def _follow_requires_grad(self) -> None:
        """Where parameters were frozen or unfrozen since the last step: all ranks leave them out, or take them in. Those new
        in this step are summed as they are; from the next one on they have their place in buckets."""
        if all(p.requires_grad == (name in self.parameters) for name, p in self.all_parameters.items()):
            return
        before = self.parameters
        self._select_parameters()
        self.check_config_digests()
        for name, p in self.parameters.items():
            if name not in before:
                own = (
                    torch.zeros(p.shape, dtype=torch.float32) if p.grad is None else p.grad.detach().to("cpu", torch.float32)
                )
                own = (own if own.layout == torch.strided else own.to_dense()).flatten() * self._prescale
                summed = self.exchange.transport.allreduce(f"{self.prefix}.new.{name}", own.numpy()).wait()
                p.grad = to_gradient_layout(p, torch.from_numpy(summed * np.float32(self.exchange.weight)).view(p.shape))
