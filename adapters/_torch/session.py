"""What connects a wrapped torch optimizer with the other ranks, and carries its state over when these change."""

import weakref
from collections.abc import Callable

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from grace_ext import ExchangeError
from grace_ext.exchange.engine import Exchange
from grace_ext.exchange.session import StateSession
from grace_ext.exchange.stats import Statistics

from .buckets import TorchBuckets
from .saved_state import gather_memories

#: Who exchanges a parameter's gradient: weak references to MembershipSessions.
_owners = WeakTensorKeyDictionary()


class MembershipSession:
    """Holds the buckets for the ranks there are now.

    membership() -> (rank, ranks), or None where this process takes no part. build(parameters) -> TorchBuckets, for more than
    one rank. on_resize: see grace_ext.exchange.checkpoint.POLICIES. The parameters' hooks are the session's, so they are
    registered once.
    """

    def __init__(self, parameters: dict, membership: Callable, build: Callable, on_resize):
        self._states = StateSession(on_resize, gather_memories)
        self._membership, self._build = membership, build
        self._members = membership()
        self._hooks: dict[str, torch.utils.hooks.RemovableHandle] = {}
        self._detached = False
        self._earlier: list[Statistics] = []  # of exchanges with other ranks
        self._claim_parameters(parameters)
        self._build_buckets()
        if self._buckets is None:
            self._states.load(None, None)

    def _claim_parameters(self, parameters: dict[str, torch.nn.Parameter]) -> None:
        """Whoever exchanged one of these before is detached."""
        self.parameters = parameters
        for name, p in parameters.items():
            before = _owners[p]() if p in _owners else None
            if before is not None and before is not self:
                before.detach()
            _owners[p] = weakref.ref(self)
            if name not in self._hooks and p.is_floating_point():
                required = p.requires_grad
                p.requires_grad_(True)  # a frozen one takes no hook
                self._hooks[name] = p.register_post_accumulate_grad_hook(_hook(weakref.ref(self), name))
                p.requires_grad_(required)

    def add(self, parameters: dict[str, torch.nn.Parameter]) -> None:
        """These are all parameters from now on. The next step takes in the new ones."""
        self._claim_parameters(parameters)
        if self._buckets is not None:
            self._buckets.all_parameters = parameters

    def detach(self) -> None:
        """Leave the parameters to another session, for good."""
        self._detached = True
        for handle in self._hooks.values():
            handle.remove()
        if self._buckets is not None:
            self._buckets.exchange.close()

    @property
    def buckets(self) -> TorchBuckets | None:
        """The buckets; None for one rank alone, which has nothing to exchange."""
        if self._membership() != self._members:  # as when elastic Horovod removed ranks, which it does not announce
            self.reconnect()
        return self._buckets

    @property
    def _exchange(self) -> Exchange | None:
        return self._buckets and self._buckets.exchange

    def _build_buckets(self) -> None:
        alone = self._members is None or self._members[1] == 1
        self._buckets: TorchBuckets | None = None if alone else self._build(self.parameters)

    def reconnect(self) -> None:
        """Build the buckets for the ranks there are now. What this rank remembers is its part in what they start with."""
        self._states.begin_step()
        saved = self.save()
        if self._buckets is not None:
            self._buckets.exchange.close()
            self._earlier.append(self._buckets.exchange.statistics)
        self._members = self._membership()
        self._build_buckets()
        if self._buckets is not None:
            self._buckets.request_order(saved["order"], saved.get("bucket_bytes"))
        self._states.carry_over(saved, self._exchange)

    def on_gradient_ready(self, name: str) -> None:
        """Backward has accumulated the parameter's gradient."""
        buckets = self.buckets
        if buckets is not None:
            buckets.on_gradient_ready(name)

    def synchronize(self) -> None:
        """Finish the exchange of a step."""
        if self._detached:
            raise ExchangeError("these parameters were wrapped once more; another DistributedOptimizer exchanges them now")
        buckets = self.buckets
        self._states.begin_step()
        if buckets is None:
            self._states.waiting["step"] += 1
            return
        try:
            self.settle()
        except BaseException:
            buckets.abort()
            raise
        buckets.synchronize()

    def settle(self) -> None:
        """A collective, in the first step with these ranks or after a checkpoint: they start from one state."""
        if not self._states.settled:
            self._buckets.check_config_digests()
            self._states.settle(self._exchange, self._buckets.prefix)

    def stats(self) -> dict:
        """See grace_ext.exchange.stats.report."""
        buckets = self.buckets
        return {"steps": 0} if buckets is None else buckets.exchange.stats(earlier=self._earlier)

    def join(self) -> int:
        """Shadow the steps of the other ranks until all have joined; returns the rank that joined last."""
        buckets = self.buckets
        if buckets is None:
            return 0
        if buckets.under_way():
            raise ExchangeError("optimizer.join() between backward() and step() or synchronize()")
        self.settle()
        joined_at = np.array([buckets.exchange.step], "<i8").view(np.uint8)
        while buckets.shadow_step():
            self._states.begin_step()
        steps = buckets.gather("joined", joined_at).copy().view("<i8")[:, 0]
        return int(np.flatnonzero(steps == steps.max())[-1])

    # State: see StateSession

    def save(self) -> dict:
        """No collective."""
        order, chosen = (self._buckets.wanted_order, self._buckets.wanted_bytes) if self._buckets else ([], None)
        return self._states.save(self._exchange, order, chosen)

    def load(self, saved: dict | None) -> None:
        """Raises ConfigError for what does not fit, and ExchangeError during a step. All ranks must load, or all take their
        first step after it."""
        buckets = self.buckets
        if buckets is not None and buckets.under_way():
            raise ExchangeError("load_state_dict() between backward() and step(): load before backward(), on all ranks")
        self._states.load(saved, self._exchange)
        if buckets is not None:
            buckets.request_order(*((saved["order"], saved.get("bucket_bytes")) if saved else ([], None)))

    def restore(self, saved: dict) -> None:
        """To be followed by `reconnect`."""
        if self._buckets is not None:
            self._buckets.abort()
            self._buckets.request_order(saved["order"], saved.get("bucket_bytes"))
        self._states.restore(saved, self._exchange)

    def consolidate(self, to: int) -> None:
        """A collective: until the next step, `save` on rank `to` has the memories of all ranks."""
        buckets = self.buckets
        if buckets is not None:
            self._states.consolidate(buckets.exchange, buckets.wanted_order, buckets.prefix, to)


def _hook(owner: weakref.ref, name: str) -> Callable:
    """Does not keep the session alive: the gradients of an optimizer that is gone are exchanged by nobody."""

    def hook(_):
        session = owner()
        if session is not None:
            session.on_gradient_ready(name)

    return hook
