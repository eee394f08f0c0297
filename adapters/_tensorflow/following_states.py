"""What the exchanges of one Reducer remember, which follows the variables from one exchange into the next.

Each set of gradients has an exchange of its own, with its own buckets. What is remembered of a tensor is held by one of them, or
by none: when a step of another exchange begins, it takes over what there is of its tensors, and the number of the step. That is
in the first Python part of a step, since which exchange a graph contains is known when it is traced, and not which one runs.
"""

from grace_ext.exchange import checkpoint
from grace_ext.exchange.engine import Exchange
from grace_ext.exchange.state import DENSITY, WARM_STARTS

from .saved_state import Restore


class FollowingStates:
    """The states of the tensors of all exchanges of a Reducer: memories, warm starts and densities, by field and tensor name."""

    def __init__(self) -> None:
        self._names: dict[Exchange, list[str]] = {}  # of the tensors, in the order of the variables
        self._order: list[str] = []  # all of these names
        self._holding: set[Exchange] = set()
        self._parked: dict[str, dict] = {}  # what no exchange holds, by field and tensor name
        self._last: Exchange | None = None  # whose step began last
        self._step = 0  # of the next step, before the first one
        self._restore: Restore | None = None
        self._claimed: set[str] = set()  # names for which nothing more is taken from self._restore

    @property
    def step(self) -> int:
        """The number of the next step."""
        return self._step if self._last is None else self._last.step

    def add(self, exchange: Exchange, names: list[str], variables: list[str]) -> None:
        """Take in a new exchange. names: of its tensors. variables: those of all variables of the step, in their order.

        Raises ConfigError where a state that was loaded does not fit."""
        known = {*self._order, *names}
        self._order = [
            *(name for name in variables if name in known),
            *(name for name in self._order if name not in variables),
        ]
        self._names[exchange] = names
        try:
            self._restored(exchange)
        except BaseException:
            del self._names[exchange]
            raise
        if not self._holding:
            self.begin(exchange)

    def begin(self, exchange: Exchange) -> None:
        """A step of this exchange begins. On all ranks alike, and while no exchange is under way."""
        if self._last is not exchange:
            exchange.step, self._last = self.step, exchange
        if exchange in self._holding:
            return
        names = {*self._names[exchange]}
        for other in [one for one in self._holding if not names.isdisjoint(self._names[one])]:
            self._park(other, self._names[other])
        kept = {
            tensor.name: {WARM_STARTS, DENSITY, *bucket.memory.states, *bucket.memory.shared}
            for bucket in exchange.buckets
            for tensor in bucket.tensors
        }
        taken = {
            field: {name: arrays.pop(name) for name in [*arrays] if field in kept.get(name, ())}
            for field, arrays in self._parked.items()
        }
        exchange.load_state_dict(taken, take=True)
        exchange.states_settled()
        self._holding.add(exchange)

    def _park(self, exchange: Exchange, names: list[str]) -> None:
        """Take from an exchange what it holds of these tensors. Beside them in a bucket there may be zeros of others."""
        for field, arrays in exchange.state_dict(take=True).items():
            if field != "step":
                kept = {name: array for name, array in arrays.items() if name in names}
                self._parked.setdefault(field, {}).update(kept)
        exchange.load_state_dict({})  # also what is not taken, but copied
        self._holding.discard(exchange)

    def state_dict(self, rank: int, ranks: int) -> list[dict]:
        """Saved states as in grace_ext.exchange.checkpoint: one of all tensors, and what was loaded of others."""
        found: dict[str, dict] = {field: dict(arrays) for field, arrays in self._parked.items() if arrays}
        for exchange in self._holding:
            for field, arrays in exchange.state_dict().items():
                if field != "step":
                    found.setdefault(field, {}).update(arrays)
        waiting = self._restore.unclaimed() if self._restore else []
        if not self._names:
            return waiting
        own = checkpoint.pack({"step": self.step, **found}, rank, ranks, self._order)
        return [own, *({**saved, "step": self.step} for saved in waiting)]

    def load(self, restore: Restore) -> None:
        """Go on from a state that all ranks have agreed on. Raises ConfigError where it does not fit; then all stays as it was."""
        first, step = self._last, self.step
        for exchange in [*self._holding]:
            self._park(exchange, self._names[exchange])
        before = self._parked, self._restore, self._claimed
        self._parked, self._restore, self._claimed, self._last, self._step = {}, restore, set(), None, restore.step
        try:
            for exchange in self._names:
                self._restored(exchange)
        except BaseException:
            for exchange in self._names:
                exchange.load_state_dict({})
            self._parked, self._restore, self._claimed = before
            self._last, self._step = None, step
            raise
        finally:
            if first is not None:
                self.begin(first)

    def _restored(self, exchange: Exchange) -> None:
        """Park what the loaded state has for an exchange that holds nothing."""
        wanted = [name for name in self._names[exchange] if name not in self._claimed]
        if self._restore is not None and wanted:
            self._restore.load_into(exchange, self._names[exchange], wanted)
            self._park(exchange, wanted)
        self._claimed.update(wanted)
        exchange.step = self.step
