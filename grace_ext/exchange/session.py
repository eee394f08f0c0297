"""What a rank saves and loads of its exchange, and how the ranks come to start from one state.

Adapters keep one session for as long as the optimizer lives. Exchanges may come and go under it, as when elastic Horovod
changes the ranks, or there may be none, as with one rank alone.
"""

from collections.abc import Callable

import numpy as np

from ..errors import ConfigError
from . import checkpoint
from .engine import Exchange

_FRESH, _LOADED, _CARRIED_OVER = 0, 1, 2  # what a rank starts with, as it tells the others


class StateSession:
    """Saves, loads and gathers what a rank's exchange remembers, and settles with the other ranks what they start with.

    Args:
        on_resize: What becomes of the memories of other numbers of ranks: see grace_ext.exchange.checkpoint.POLICIES.
        gather_memories: gather_memories(transport, name, memory, to) is a collective: every rank's dict of arrays, in the
            order of ranks, on rank `to`; elsewhere an empty list.

    Raises:
        ConfigError: on_resize is not one of the policies.
    """

    def __init__(self, on_resize: str | None, gather_memories: Callable[..., list[dict]]):
        checkpoint.check_policy(on_resize)
        self._on_resize, self._gather_memories = on_resize, gather_memories
        #: A saved state that no exchange has taken over yet.
        self.waiting: dict | None = None
        #: Whether the ranks have settled what they start with.
        self.settled = False
        self._starts_with = _FRESH
        self._memory: dict | None = None
        self._consolidated: dict[int, dict] = {}

    def _start_with(self, what: int, memory: dict | None = None) -> None:
        self._starts_with, self._memory, self.settled, self.waiting = what, memory, False, None

    def save(self, exchange: Exchange | None, order: list[str], bucket_bytes: int | None = None) -> dict:
        """The state of this rank, as grace_ext.exchange.checkpoint describes it. No collective.

        Args:
            exchange: The exchange in force; None only while a state is waiting for one.
            order: The names of the tensors in the order of the buckets; empty if it is not known yet.
            bucket_bytes: The size of buckets that the ranks have chosen; None if they have not.

        Returns:
            The saved state, with the memories of all ranks after `consolidate`.
        """
        if self.waiting is not None:
            return self.waiting
        transport = exchange.transport
        saved = checkpoint.pack(exchange.state_dict(), transport.rank, transport.size, order, bucket_bytes)
        if not self.settled and self._starts_with == _CARRIED_OVER:
            saved["memories"][transport.rank] = self._memory
        saved["memories"].update(self._consolidated)
        return saved

    def load(self, saved: dict | None, exchange: Exchange | None) -> None:
        """Go on from a saved state. No collective: the ranks settle in the next step what they start with.

        Args:
            saved: What `save` gave; None for a checkpoint without a state of grace_ext.
            exchange: The exchange that takes it over; None to let it wait for one.

        Raises:
            ConfigError: The state is of an unknown version, or does not fit.
        """
        self._consolidated = {}
        if exchange is not None:
            self._start_with(_LOADED if checkpoint.load(saved, exchange, self._on_resize) else _FRESH)
            return
        if saved is not None:
            checkpoint.check_version(saved)
        self.waiting = saved or checkpoint.pack({"step": 0}, 0, 1, [])

    def restore(self, saved: dict, exchange: Exchange | None) -> None:
        """Return to a state that this rank itself saved, maybe among other ranks, from a step that could not be finished.

        Args:
            saved: What `save` gave.
            exchange: The exchange in force; None if there is none.
        """
        memory = next(iter(saved["memories"].values()))  # its own is the first
        if exchange is None:
            self.waiting = checkpoint.pack(
                {"step": saved["step"], **memory}, 0, 1, saved["order"], saved.get("bucket_bytes")
            )
            return
        exchange.step = saved["step"]
        self._start_with(_CARRIED_OVER, memory)

    def carry_over(self, saved: dict, exchange: Exchange | None) -> None:
        """Take this rank's memory over into an exchange with other ranks.

        Args:
            saved: What `save` gave of the exchange before.
            exchange: The exchange with the new ranks; None if this rank is alone now.
        """
        self._consolidated = {}
        memory, *others = saved["memories"].values()
        if exchange is not None:
            if others:
                memory = checkpoint.redistribute(exchange, [memory, *others], 1)
            exchange.step = saved["step"]
            self._start_with(_CARRIED_OVER if saved["step"] else _FRESH, memory)
        elif self.waiting is None:
            kept = {} if self._on_resize == checkpoint.RESET else memory
            self.waiting = checkpoint.pack({"step": saved["step"], **kept}, 0, 1, saved["order"], saved.get("bucket_bytes"))

    def begin_step(self) -> None:
        """Discard what `consolidate` gathered."""
        self._consolidated = {}

    def consolidate(self, exchange: Exchange, order: list[str], prefix: str, to: int) -> None:
        """Gather the memories of all ranks on one, for `save` until the next step: a collective.

        Args:
            exchange: The exchange in force.
            order: See `save`.
            prefix: Of the collective's name.
            to: The rank.

        Raises:
            ConfigError: There is no such rank.
        """
        transport = exchange.transport
        if not 0 <= to < transport.size:
            raise ConfigError(f"consolidate_state_dict: to={to}; allowed: 0 to {transport.size - 1}")
        if self.waiting is not None:
            return
        self._consolidated = {}
        own = self.save(exchange, order)["memories"][transport.rank]
        self._consolidated = dict(enumerate(self._gather_memories(transport, f"{prefix}.consolidate", own, to)))

    def settle(self, exchange: Exchange, prefix: str) -> None:
        """Have all ranks start from one state: a collective, in the first step with these ranks or after a `load`.

        Args:
            exchange: The exchange in force.
            prefix: Of the collectives' names.

        Raises:
            ConfigError: The ranks loaded checkpoints of different steps.
        """
        mine = np.array([self._starts_with, exchange.step], "<i8").view(np.uint8)
        joined = exchange.transport.allgather(f"{prefix}.state", mine).wait()
        brought, steps = joined.copy().view("<i8").reshape(-1, 2).T
        if (brought == _CARRIED_OVER).any():
            self._settle_resized(exchange, f"{prefix}.state", int(steps[0]), int(np.count_nonzero(brought == _CARRIED_OVER)))
        else:
            checkpoint.settle(exchange, brought == _LOADED, steps)
        self._memory, self.settled = None, True

    def _settle_resized(self, exchange: Exchange, prefix: str, step: int, earlier: int) -> None:
        """earlier: how many ranks were there before the change."""
        reset = self._on_resize == checkpoint.RESET
        own = self._memory if self._starts_with == _CARRIED_OVER else None
        state = {} if reset else checkpoint.gather_and_redistribute(exchange, own, prefix)
        exchange.load_state_dict({**state, "step": step})
        exchange.states_settled()
        memories = "start from zero (on_resize='reset')" if reset else f"of these {earlier} were redistributed"
        checkpoint.report(
            exchange,
            f"the ranks have changed: there are {exchange.transport.size}, of which {earlier} were there before; "
            f"memories {memories}; the memories of ranks that left are lost",
        )
