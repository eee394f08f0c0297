"""torch optimizers whose gradients are compressed and exchanged over Horovod before each step."""

import concurrent.futures
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import horovod.torch as hvd
import torch
from torch.amp.grad_scaler import OptState

from grace_ext import ConfigError, ExchangeError
from grace_ext.exchange import checkpoint
from grace_ext.exchange.stalls import is_elastic

from .._common.subclassing import instance_like, subclass
from .._horovod.exits import guard_exit
from .._horovod.options import prefix_of
from .adam_step import MomentsInMemory, moments_in_memory, own_memory
from .buckets import JOIN_AND_CLOSURE, TorchBuckets
from .elastic import CompressedOptimizer
from .gradients import named
from .horovod_backends import make_transport
from .saved_state import to_numpy, to_torch
from .session import MembershipSession
from .torch_options import TorchOptions


def wrap(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None,
    options: TorchOptions,
    plain: type | None = None,
    buckets_for: Callable = lambda _: TorchBuckets,
) -> Any:
    """See horovod_torch.DistributedOptimizer. For optimizers of our own, plain is the class to derive from, and
    buckets_for(wrapped optimizer) gives what makes the buckets."""
    if hasattr(optimizer, "_allreduce_grad_async"):
        raise ConfigError("hvd.DistributedOptimizer has wrapped this optimizer: wrap the plain one instead")
    members = options.process_set.included() and (options.process_set.rank(), options.process_set.size())
    options.choose_defaults(own_memory(optimizer) if plain is None else None, members or (0, 1))
    named_parameters = named_parameters if named_parameters is None else list(named_parameters)
    parameters = _named(optimizer, named_parameters)
    below = getattr(optimizer, "_plain", type(optimizer)) if plain is None else plain
    # A leaf class with Horovod's module name: hvd.broadcast_optimizer_state knows by it that it must not call our step.
    horovods = hvd.DistributedOptimizer.__module__
    wrapped = instance_like(subclass(below, _WrappedOptimizer, bases=(CompressedOptimizer,), __module__=horovods), optimizer)
    # A learning-rate scheduler made before leaves a bound `step` on the instance; it would bypass ours.
    vars(wrapped).pop("step", None)
    wrapped._plain, wrapped._named_parameters = below, named_parameters
    wrapped._before = weakref.WeakSet([optimizer, *getattr(optimizer, "_before", ())])
    wrapped._should_synchronize, wrapped._synchronized, wrapped._asked_by_scaler = True, False, False
    wrapped._grad_scaler, wrapped._process_set = options.grad_scaler, options.process_set
    wrapped._passes = options.backward_passes_per_step
    process_set, prefix = options.process_set, prefix_of(options.process_set)

    def build(parameters: dict[str, torch.nn.Parameter]) -> TorchBuckets:
        guard_exit(hvd)
        exchange = options.make_exchange(make_transport(process_set, options.backend, prefix), joinable=True)
        return buckets_for(wrapped)(parameters, exchange, options, prefix=prefix, passes=wrapped._passes)

    def membership() -> tuple[int, int] | None:
        return (process_set.rank(), process_set.size()) if process_set.included() else None

    wrapped._session = MembershipSession(parameters, membership, build, options.on_resize)
    if wrapped._grace is None:
        options.warn_of_one_rank(stacklevel=3)
        return wrapped
    wrapped._moments_in_memory()
    # A worker that elastic Horovod adds must start no collective here: the others are already somewhere else.
    if not is_elastic():
        wrapped._grace.check_config_digests()
    return wrapped


def _named(
    optimizer: torch.optim.Optimizer, named_parameters: list[tuple[str, torch.nn.Parameter]] | None
) -> dict[str, torch.nn.Parameter]:
    """The optimizer's parameters by unique name, in the order of the model; of those with several names by the first one."""
    own = [(f"group{i}.{j}", p) for i, group in enumerate(optimizer.param_groups) for j, p in enumerate(group["params"])]
    by_name = named(own if named_parameters is None else named_parameters)
    optimized = {id(p) for _, p in own}
    unnamed = len(optimized - {id(p) for p in by_name.values()})
    if unnamed:
        raise ConfigError(f"named_parameters lacks {unnamed} of the optimizer's parameters")
    first: dict[int, str] = {}
    for name, p in by_name.items():
        first.setdefault(id(p), name)
    return {name: p for name, p in by_name.items() if id(p) in optimized and first[id(p)] == name}


class _WrappedOptimizer:
    """What a wrapped optimizer does differently from the class that was wrapped, its `_plain`."""

    if TYPE_CHECKING:  # what the class that is made of it has
        param_groups: list[dict]
        _plain: Any
        _load_plain: Callable[[dict], None]
        _session: MembershipSession
        _named_parameters: list[tuple[str, torch.nn.Parameter]] | None
        _before: weakref.WeakSet[torch.optim.Optimizer]
        _process_set: hvd.ProcessSet
        _grad_scaler: Any

    @property
    def _grace(self) -> TorchBuckets | None:
        """The buckets for the ranks there are now; None without other ranks."""
        return self._session.buckets

    def synchronize(self) -> None:
        """Finish the exchange: afterwards every gradient is the average (or sum) over ranks, the same on all."""
        self._session.synchronize()
        self._synchronized, self._asked_by_scaler = True, False

    def join(self, *others: "_WrappedOptimizer") -> int:
        """Take part in the other ranks' steps with nothing, until all ranks have joined.

        Use it instead of hvd.join(), on ranks that have fewer batches than others. Averages are still over all ranks. This
        rank's memory stays as it is meanwhile. Until all have joined, the other ranks may use no other collective of
        Horovod, and must not freeze or unfreeze parameters.

        Args:
            *others: The loop's other wrapped optimizers, if there are several; they can only be joined together.

        Returns:
            The rank that joined last. It has made all steps: go on with hvd.broadcast_parameters and
            hvd.broadcast_optimizer_state from it.

        Raises:
            ExchangeError: It is called between backward() and step().
            ConfigError: It is called after step(closure), which exchanges losses as well.
        """
        if any(optimizer._grace is not None and optimizer._grace.has_losses for optimizer in (self, *others)):
            raise ConfigError(JOIN_AND_CLOSURE)
        sessions = [optimizer._session for optimizer in (self, *others)]
        with concurrent.futures.ThreadPoolExecutor(len(sessions)) as threads:  # whatever the order in which they step
            last, *_ = threads.map(MembershipSession.join, sessions)
        return self._process_set.ranks[last] if self._process_set.included() else hvd.rank()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside, step() does not synchronize: for gradient clipping or unscaling after an explicit synchronize()."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronize (unless skipped), then make the wrapped optimizer's step.

        Args:
            closure: A function that computes the gradients, so that each call of it synchronizes, unless it has done so
                itself, for example to clip gradients. Where it returns numbers, the optimizer gets their average over ranks
                (their sum with op=hvd.Sum), as with the gradients: an optimizer that looks at the loss, like LBFGS, does the
                same on all ranks. A step is then counted for each call.

        Returns:
            What the wrapped optimizer's step returns.

        Raises:
            ExchangeError: Gradients are already on their way, or the closure has not synchronized in skip_synchronize().
            ConfigError: The closure returns a number on some ranks only.
        """
        if closure is not None:
            return self._step_with(closure)
        if self._should_synchronize and not (self._asked_by_scaler and self._is_synchronized()):
            if self._is_synchronized():
                warnings.warn(
                    "optimizer.step() after optimizer.synchronize() exchanges the gradients again; wrap it in "
                    "optimizer.skip_synchronize()",
                    stacklevel=2,
                )
            self.synchronize()
        return self._inner_step()

    def _step_with(self, closure: Callable[[], Any]) -> Any:
        buckets = self._grace
        if buckets is not None and buckets.has_new_gradients:
            raise ExchangeError(
                "step(closure) exchanges the gradients that the closure computes, and others are on their "
                "way: call backward() in the closure only, or optimizer.synchronize() before the step"
            )

        def synchronized() -> Any:
            self._synchronized = False
            loss = closure()
            if not self._is_synchronized():
                if not self._should_synchronize:
                    raise ExchangeError("in skip_synchronize() the closure has to call synchronize() after backward()")
                self.synchronize()
            return loss if self._grace is None else self._grace.reduce_loss(loss)

        if buckets is not None:
            buckets.has_losses = True
        return self._inner_step(synchronized)

    def _inner_step(self, closure: Callable[[], Any] | None = None) -> Any:
        self._synchronized = self._asked_by_scaler = False
        for optimizer in self._before:
            optimizer._opt_called = True  # a learning-rate scheduler made before wrapping looks at it
        moments = self._moments_in_memory()
        with nullcontext() if moments is None else moments.left_to_memory():
            loss = self._plain.step(self, closure)
        self._synchronized = False
        return loss

    def _moments_in_memory(self) -> MomentsInMemory | None:
        """For the buckets there are now; None if no memory applies a momentum."""
        buckets = self._grace
        return None if buckets is None else moments_in_memory(self, buckets.exchange.buckets, buckets.parameters)

    def _is_synchronized(self) -> bool:
        buckets = self._grace
        return self._synchronized and not (buckets is not None and buckets.has_new_gradients)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """GradScaler.step reads this before anything else: the moment to finish the exchange, so that it unscales gradients
        that are the same on all ranks, and skips the step on all ranks or on none."""
        if self._should_synchronize:
            if not self._is_synchronized():
                self._check_scaler()
                self.synchronize()
            self._asked_by_scaler = True
        return vars(self).get("_step_supports_amp_scaling", False)  # what the wrapped optimizer has to say

    def _check_scaler(self) -> None:
        """When GradScaler.step is about to look at gradients that are not exchanged yet."""
        scaler = self._grad_scaler
        if scaler is not None:
            # GradScaler tells nobody in public whether unscale_ was called.
            if scaler._per_optimizer_states[id(self)]["stage"] is OptState.UNSCALED:
                raise ExchangeError(
                    "scaler.unscale_(optimizer) changed gradients that were on their way: call optimizer.synchronize() "
                    "before it"
                )
        elif self._grace is not None and any(b.memory.stateful for b in self._grace.exchange.buckets):
            warnings.warn(
                "this optimizer was not told of its GradScaler: its memory keeps scaled units, which are wrong for a "
                "step whenever the loss scale changes; pass grad_scaler=scaler to DistributedOptimizer",
                stacklevel=4,
            )

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """See the wrapped optimizer's.

        Args:
            *args: See the wrapped optimizer's.
            **kwargs: See the wrapped optimizer's.

        Raises:
            ExchangeError: It is called between backward() and step() or synchronize().
        """
        if self._grace is not None and self._grace.under_way():
            raise ExchangeError(
                "optimizer.zero_grad() between backward() and step() or synchronize() would race with the "
                "exchange of the gradients"
            )
        self._synchronized = False
        return self._plain.zero_grad(self, *args, **kwargs)

    def add_param_group(self, param_group: dict) -> None:
        """See the wrapped optimizer's; call it on all ranks in the same step.

        Args:
            param_group: See the wrapped optimizer's.

        Raises:
            ConfigError: Its parameters were not among named_parameters, if these were given.
        """
        self._plain.add_param_group(self, param_group)
        try:
            parameters = _named(self, self._named_parameters)
        except ConfigError:
            self.param_groups.pop()
            raise
        self._session.add(parameters)

    def state_dict(self) -> dict:
        """The wrapped optimizer's state and this rank's memory. No collective.

        Returns:
            The wrapped optimizer's state dict, and under "grace_ext" this rank's memory, or those of all ranks after
            consolidate_state_dict().
        """
        return {**self._plain.state_dict(self), checkpoint.KEY: to_torch(self._session.save())}

    def load_state_dict(self, state_dict: dict) -> None:
        """Load the state of a wrapped optimizer or a plain one. No collective.

        Call it on all ranks, or, before the first step, on rank 0 and then hvd.broadcast_optimizer_state. The log "grace_ext"
        says what was done with the memories.

        Args:
            state_dict: What `state_dict` gave.

        Raises:
            ConfigError: The memories do not fit, or some are missing and on_resize is "redistribute".
        """
        saved = state_dict.get(checkpoint.KEY)
        # The optimizer first: what its memory is may depend on it, as that of 1-bit Adam does.
        self._load_plain({key: value for key, value in state_dict.items() if key != checkpoint.KEY})
        self._session.load(None if saved is None else to_numpy(saved))

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the memories of all ranks for state_dict() on one, until the next step: a collective.

        Args:
            to: The rank.
        """
        self._session.consolidate(to)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backward passes are accumulated before gradients are exchanged, from the next step on.

        Args:
            passes: Their number.
        """
        if self._grace is not None:
            self._grace.set_passes(passes)
        self._passes = passes

    def compression_stats(self) -> dict:
        """Bytes, ratio and seconds per stage, in total and of the last step.

        Returns:
            What docs/observability.md describes.
        """
        return self._session.stats()
