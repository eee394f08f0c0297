"""What connects a wrapped torch optimizer with the other ranks, and carries its state over when these change."""

import logging
import weakref
from collections.abc import Callable

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from grace_ext import ConfigError, ExchangeError
from grace_ext.exchange import checkpoint

from .buckets import TorchBuckets
from .saved_state import gather_on

_LOG = logging.getLogger("grace_ext")
#: What a rank brings to the first step of a membership.
_NOTHING, _CHECKPOINT, _EARLIER = 0, 1, 2
#: Who exchanges a parameter's gradient: weak references to MembershipSessions.
_owners = WeakTensorKeyDictionary()


class MembershipSession:
    """Holds the buckets for the ranks there are now.

    membership() -> (rank, ranks), or None where this process takes no part. build(parameters) -> TorchBuckets, for more than
    one rank. on_resize: see grace_ext.exchange.checkpoint.POLICIES. The parameters' hooks are the session's, so they are
    registered once.
    """

    def __init__(self, parameters: dict, membership: Callable, build: Callable, on_resize):
        checkpoint.check_policy(on_resize)
        self._membership, self._build, self._on_resize = membership, build, on_resize
        self._members = membership()
        self._consolidated: dict[int, dict] = {}
        self._hooks: dict[str, torch.utils.hooks.RemovableHandle] = {}
        self._detached = False
        self._own(parameters)
        self._open()
        self._kept = checkpoint.pack({"step": 0}, 0, 1, [])  # what one rank alone keeps for when there are more
        self._set_initial_state(_NOTHING)

    def _own(self, parameters: dict[str, torch.nn.Parameter]) -> None:
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
        self._own(parameters)
        if self._buckets is not None:
            self._buckets.all_parameters = parameters

    def detach(self) -> None:
        """Leave the parameters to another one, for good."""
        self._detached = True
        for handle in self._hooks.values():
            handle.remove()
        if self._buckets is not None:
            self._buckets.exchange.close()

    @property
    def buckets(self) -> TorchBuckets | None:
        """None for one rank alone, which has nothing to exchange."""
        if self._membership() != self._members:  # as when elastic Horovod removed ranks, which it does not announce
            self.reconnect()
        return self._buckets

    def _open(self) -> None:
        alone = self._members is None or self._members[1] == 1
        self._buckets: TorchBuckets | None = None if alone else self._build(self.parameters)

    def _set_initial_state(self, what: int, state: dict | None = None) -> None:
        self._initial, self._state, self._synced = what, state, False

    def reconnect(self) -> None:
        """Build the buckets for the ranks there are now. What this rank remembers is its part in what they start with."""
        self._consolidated = {}
        saved, before = self.save(), self._buckets
        if before is not None:
            before.exchange.close()
        self._members = self._membership()
        self._open()
        (memory, *more) = saved["memories"].values()
        if self._buckets is None:
            keep = {} if self._on_resize == checkpoint.RESET else memory
            self._kept = checkpoint.pack({"step": saved["step"], **keep}, 0, 1, saved["order"]) if before else saved
            return
        if more:
            memory = checkpoint.redistribute(self._buckets.exchange, [memory, *more], 1)
        self._buckets.follow(saved["order"])
        self._buckets.exchange.step = saved["step"]
        self._set_initial_state(_EARLIER if saved["step"] else _NOTHING, memory)

    def on_gradient_ready(self, name: str) -> None:
        """Backward has accumulated the parameter's gradient."""
        buckets = self.buckets
        if buckets is not None:
            buckets.on_gradient_ready(name)

    def synchronize(self) -> None:
        if self._detached:
            raise ExchangeError(
                "this optimizer's parameters were wrapped once more, by another DistributedOptimizer, which "
                "exchanges their gradients now"
            )
        buckets = self.buckets
        self._consolidated = {}
        if buckets is None:
            self._kept["step"] += 1
            return
        if not self._synced:
            self._sync_initial_state(buckets)
        buckets.synchronize()

    def join(self) -> int:
        """Accompany the steps of the other ranks until all have joined; returns the one that did last."""
        buckets = self.buckets
        if buckets is None:
            return 0
        if buckets.under_way():
            raise ExchangeError("optimizer.join() between backward() and step() or synchronize()")
        if not self._synced:
            self._sync_initial_state(buckets)
        joined_at = np.array([buckets.exchange.step], "<i8").view(np.uint8)
        while buckets.shadow_step():
            self._consolidated = {}
        steps = buckets.gather("joined", joined_at).copy().view("<i8")[:, 0]
        return int(np.flatnonzero(steps == steps.max())[-1])

    # State

    def save(self) -> dict:
        """See grace_ext.exchange.checkpoint. No collective."""
        if self._buckets is None:
            return self._kept
        rank, ranks = self._members
        saved = checkpoint.pack(self._buckets.exchange.state_dict(), rank, ranks, self._buckets.wanted_order)
        if not self._synced and self._initial == _EARLIER:
            saved["memories"][rank] = self._state
        saved["memories"].update(self._consolidated)
        return saved

    def load(self, saved: dict | None) -> None:
        """Raises ConfigError for what does not fit, and ExchangeError during a step. No collective: the ranks settle what
        they start with in the next step, so they must all load, or all take their first step then."""
        buckets = self.buckets
        if buckets is None:
            checkpoint.check_version(saved) if saved else None
            self._kept = saved or checkpoint.pack({"step": 0}, 0, 1, [])
            return
        if buckets.under_way():
            raise ExchangeError(
                "optimizer.load_state_dict() between backward() and step() or synchronize(): load before "
                "backward(), on all ranks"
            )
        loaded = checkpoint.choose(saved, buckets.exchange, self._on_resize)
        buckets.exchange.load_state_dict(loaded.state)
        buckets.follow(saved["order"] if saved else [])
        self._consolidated = {}
        self._set_initial_state(_CHECKPOINT if loaded.whole else _NOTHING)
        if self._members[0] == 0:  # the others' part is said when the ranks settle
            _LOG.log(logging.WARNING if loaded.lost else logging.INFO, loaded.what)

    def go_back(self, saved: dict) -> None:
        """To what this rank itself saved earlier, maybe in another membership, from a step that could not be finished. To be
        followed by `reconnect`."""
        buckets = self._buckets
        memory = next(iter(saved["memories"].values()))  # its own is the first
        if buckets is None:
            self._kept = checkpoint.pack({"step": saved["step"], **memory}, 0, 1, saved["order"])
            return
        buckets.abort()
        buckets.follow(saved["order"])
        buckets.exchange.step = saved["step"]
        self._set_initial_state(_EARLIER, memory)

    def consolidate(self, to: int) -> None:
        """A collective: until the next step, `save` on rank `to` has the memories of all ranks."""
        buckets = self.buckets
        if buckets is None:
            return
        rank, ranks = self._members
        if not 0 <= to < ranks:
            raise ConfigError(f"consolidate_state_dict: to={to}; allowed: 0 to {ranks - 1}")
        self._consolidated = {}
        memories = gather_on(buckets.exchange.transport, f"{buckets.prefix}.consolidate", self.save()["memories"][rank], to)
        self._consolidated = dict(enumerate(memories))

    def _sync_initial_state(self, buckets: TorchBuckets) -> None:
        """A collective, in the first step of a membership or after a checkpoint: all ranks start from one state."""
        exchange, rank = buckets.exchange, self._members[0]
        buckets.check_config_digests()
        mine = np.array([self._initial, exchange.step], "<i8").view(np.uint8)
        brought, steps = buckets.gather("state", mine).copy().view("<i8").T
        if (brought == _EARLIER).any():
            self._sync_resized_state(buckets, int(steps[0]), np.count_nonzero(brought == _EARLIER))
        elif (warning := checkpoint.settle(exchange, brought == _CHECKPOINT, steps)) and rank == 0:
            _LOG.warning(warning)
        self._state, self._synced = None, True

    def _sync_resized_state(self, buckets: TorchBuckets, step: int, earlier: int) -> None:
        exchange, rank = buckets.exchange, self._members[0]
        reset = self._on_resize == checkpoint.RESET
        own = self._state if self._initial == _EARLIER else None
        state = {} if reset else checkpoint.gather_and_redistribute(exchange, own, f"{buckets.prefix}.state")
        exchange.load_state_dict({**state, "step": step})
        if rank == 0:
            _LOG.warning(
                "the ranks have changed: there are %d, of which %d were there before; memories %s; what ranks held "
                "that are gone is lost",
                exchange.transport.size,
                earlier,
                "start from zero (on_resize='reset')" if reset else f"of these {earlier} were redistributed",
            )


def _hook(owner: weakref.ref, name: str) -> Callable:
    """Does not keep the session alive: the gradients of an optimizer that is gone are exchanged by nobody."""

    def hook(_):
        session = owner()
        if session is not None:
            session.on_gradient_ready(name)

    return hook
