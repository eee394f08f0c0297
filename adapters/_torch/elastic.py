"""Elastic Horovod: hvd.elastic.TorchState(model=..., optimizer=...) with an optimizer that grace_ext wrapped.

Importing grace_ext.adapters.horovod_torch registers the handler below with Horovod, so users need nothing from here. They
wrap the optimizer before the function that hvd.elastic.run decorates, as Horovod's examples do, not in it.
"""

from typing import Any

import torch
from horovod.torch import broadcast_optimizer_state
from horovod.torch.elastic import state as horovods

from grace_ext.exchange import checkpoint

from .saved_state import to_numpy
from .session import MembershipSession


class CompressedOptimizer:
    """A base of all wrapped optimizers, by which Horovod finds their handler."""

    param_groups: list[dict]
    state: dict
    _plain: Any
    _session: MembershipSession

    def _load_plain(self, state_dict: dict) -> None:
        """Load the wrapped optimizer's state into the list and the dict that it shares with the optimizer before wrapping, so
        that a learning-rate scheduler of that one goes on setting the rates of this one."""
        groups, states = self.param_groups, self.state
        self._plain.load_state_dict(self, state_dict)
        groups[:] = self.param_groups
        loaded = dict(self.state)
        states.clear()
        states.update(loaded)
        self.param_groups, self.state = groups, states


class CompressedOptimizerStateHandler(horovods.OptimizerStateHandler):
    """Every rank saves and restores its own memory. `sync` gives all ranks the optimizer's own state of rank 0, and connects
    them; in their next step the memories follow on_resize, see grace_ext.adapters.horovod_torch.DistributedOptimizer."""

    def __init__(self, optimizer: CompressedOptimizer):
        super().__init__(optimizer)
        self._synced = False

    def restore(self) -> None:
        saved = dict(self._saved_optimizer_state)
        self.value._session.restore(to_numpy(saved.pop(checkpoint.KEY)))
        self.value._load_plain(saved)

    def sync(self) -> None:
        if self._synced:  # Horovod was shut down and initialized meanwhile
            self.value._session.reconnect()
        self._synced = True
        # To get at an optimizer's state, Horovod may let it step once, which moves parameters that decay.
        parameters = [p for group in self.value.param_groups for p in group["params"]]
        before = [p.detach().clone() for p in parameters]
        broadcast_optimizer_state(self.value, root_rank=0)
        with torch.no_grad():
            for p, value in zip(parameters, before, strict=True):
                p.copy_(value)
        self.value.zero_grad()


def register() -> None:
    """Put the handler before Horovod's own for optimizers, once."""
    put_first(CompressedOptimizer, CompressedOptimizerStateHandler)


def put_first(kind: type, handler: type[horovods.StateHandler]) -> None:
    """Let Horovod handle values of a kind by a handler of ours, before its own."""
    entry = (kind, handler)
    if entry not in horovods.get_handler_registry():
        horovods.set_handler_registry([entry, *horovods.get_handler_registry()])
