"""What connects the rounds of a torch module with the other ranks, and goes on when elastic Horovod changes these."""

import concurrent.futures
import functools
import logging
from collections.abc import Callable
from typing import NamedTuple

from grace_ext import ConfigError
from grace_ext.exchange.stalls import is_elastic
from grace_ext.rounds import Rounds
from grace_ext.transport.base import Transport

from .._common.local_rounds import LocalOptions, RoundSettings, build_rounds
from .module_parameters import ModuleParameters, take_from_first
from .saved_state import gather_memories

_LOG = logging.getLogger("grace_ext")


class Ranks(NamedTuple):
    """make_transport: makes a transport among the ranks there are now. members: this rank, and their number."""

    make_transport: Callable[[], Transport]
    members: Callable[[], tuple[int, int]]


class RoundMember:
    """Holds the rounds with the ranks there are now.

    prefix: what the names of collectives begin with. Under elastic Horovod the ranks connect in `reconnect`, which the handler of its
    state calls: a worker that is added must start no collective before, because the others are already somewhere else.
    """

    rank: int
    ranks: int
    _rounds: Rounds
    _worker: concurrent.futures.Executor

    def __init__(
        self, ranks: Ranks, prefix: str, settings: RoundSettings, options: LocalOptions, parameters: ModuleParameters
    ):
        self._ranks, self._prefix, self._parameters, self._buffers = ranks, prefix, parameters, settings.buffers
        self._build = functools.partial(build_rounds, settings, options)
        self._elastic, self._connecting, self._connected = is_elastic(), False, False
        self._committed: dict | None = None
        self._open()
        if not self._elastic:
            self._connect()

    def _open(self) -> None:
        transport = self._ranks.make_transport()
        self.rank, self.ranks = transport.rank, transport.size
        self._rounds, self._worker = self._build(transport, self._prefix, self._parameters, gather_memories)

    def _connect(self) -> None:
        self._connecting = True
        others, transport = self._parameters.others, self._rounds.fragments[0].transport
        layout = [(name, str(other.dtype), tuple(other.shape)) for name, other in others.items()]
        self._rounds.connect((layout, self._buffers))
        self._worker.submit(take_from_first, transport, f"{self._prefix}.other", others).result()
        self._connected = True

    def _current(self) -> Rounds:
        """The rounds with the ranks there are now, for a collective.

        Raises ConfigError if these were never connected, because elastic Horovod does not know of this object.
        """
        if not self._connected:
            raise ConfigError(
                "elastic Horovod does not know of these rounds: give them to its state, "
                "hvd.elastic.TorchState(model=model, optimizer=optimizer, local=local), and train in a function that "
                "hvd.elastic.run decorates"
            )
        if self._elastic and self._has_changed():  # it removed ranks, which it does not announce
            self.reconnect(None)
        return self._rounds

    def _has_changed(self) -> bool:
        return self._ranks.members() != (self.rank, self.ranks)

    def commit(self) -> dict | None:
        """What `reconnect` can go on from; None before the ranks were connected. No collective."""
        if self._connected:
            self._committed = self._rounds.state_dict()
        return self._committed

    def reconnect(self, state: dict | None) -> None:
        """Connect with the ranks there are now: a collective. All go on from what rank 0 shares; parameters become that.

        state: what `commit` gave, to return to that; None to go on from the state now.
        """
        if self._connecting or self._has_changed():
            if self._connected and state is None:
                state = self._state_now()
            before = self._rounds
            before.close()
            self._worker.shutdown()
            self._open()
            if state is not None:
                self._rounds.carry_over(before, state)
        self._connect()

    def _state_now(self) -> dict | None:
        """The one that was committed last if an exchange was cut off, whatever the library's error is."""
        try:
            return self._rounds.state_dict()
        except Exception as error:
            _LOG.warning(
                "a round was cut off (%s: %s); this rank brings what it had at its last commit", type(error).__name__, error
            )
            return self._committed

    def begin_optimizers(self) -> None:
        """Let optimizers that have no state yet have one. Horovod's handler does that by a step, which moves parameters that decay."""
        self._parameters.begin_optimizers()
