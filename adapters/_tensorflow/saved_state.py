"""What TensorFlow's reducers keep from one run to the next: what ranks agree upon when it comes back, and its files.

TensorFlow's own checkpoints hold variables, and none of this is in variables, so that they load without grace_ext. A
state is one rank's, between two steps, of numpy arrays and plain Python:

    {"rank": r, "ranks": n, "layouts": [of grace_ext.exchange.checkpoint.pack, "order" being that of the variables],
     "passes": what backward_passes_per_step has summed since the last exchange, if anything}
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from grace_ext import ConfigError
from grace_ext._util.files import atomic_write
from grace_ext.exchange import checkpoint

from .._common import state_files
from .eager import gather_json


class Restore:
    """A state that all ranks have agreed to start from. It waits for the layouts, which the first step makes."""

    def __init__(self, states, process_set, on_resize=None):
        """A collective. states: this rank's own, or a list of several ranks'; None if this rank has none.

        Raises ConfigError if they do not belong together, on one rank or between ranks, and for an unknown on_resize.
        """
        checkpoint.check_policy(on_resize)
        states = [] if states is None else [states] if isinstance(states, dict) else list(states)
        self._on_resize = on_resize
        rank, ranks = process_set.rank(), process_set.size()
        self._layouts = _merged(states)
        self._named: list[dict] = []  # those of self._layouts whose names are known to be those of variables here
        same = all(saved["ranks"] == ranks for saved in self._layouts)
        whole = bool(self._layouts) and all(
            rank in saved["memories"] if same else len(saved["memories"]) == saved["ranks"] for saved in self._layouts
        )
        passes = next((state.get("passes") for state in states if state["rank"] == rank), None) if same else None
        own = {"whole": whole, "calls": passes["calls"] if passes else 0, "layouts": list(map(_outline, self._layouts))}
        told = gather_json(own, process_set)
        outlines = [one["layouts"] for one in told if one["layouts"]]
        if any(outline != outlines[0] for outline in outlines):
            raise ConfigError(
                "the ranks load states of different steps or models: "
                f"steps {[[saved['step'] for saved in outline] for outline in outlines]}"
            )
        self._whole = np.array([one["whole"] for one in told])
        if outlines and (not self._layouts or not same and not self._whole.all()):
            self._layouts = [{**outline, "memories": {}} for outline in outlines[0]]
        #: The number of the next step.
        self.step = max((saved["step"] for saved in self._layouts), default=0)
        self._is_empty = not self._layouts
        #: This rank's sums of backward passes, if all ranks have made equally many since the last exchange.
        self.passes = passes if self._whole.all() and len({one["calls"] for one in told}) == 1 else None

    def load_into(self, exchange, names: list[str], wanted: list[str]) -> None:
        """Load what the layout that fits best has of some tensors; the rest waits for others. names: those of the exchange's
        tensors, in the order of the variables. wanted: those to be loaded.

        Raises ConfigError for tensors of other sizes, and as grace_ext.exchange.checkpoint.choose.
        """
        saved = self._take(names, wanted)
        if saved is None and not self._is_empty and not self._layouts:
            return  # others have it all
        checkpoint.load(saved, exchange, self._on_resize)
        # What is needed of the other ranks was gathered before.
        whole = self._whole if saved else np.zeros_like(self._whole)
        checkpoint.settle(exchange, whole, np.full(whole.size, exchange.step))

    def unclaimed(self) -> list[dict]:
        """The layouts that no exchange has taken over yet."""
        return self._layouts

    def _take(self, names: list[str], wanted: list[str]) -> dict | None:
        """Remove what there is of these names, and return the wanted part of the layout with most of them. If there is none,
        take one with equally many tensors and match them by their order: automatic names count on ("dense_1") when a model is
        made once more."""

        def likeness(saved):
            return len({*names} & {*saved["order"]}), -abs(len(saved["order"]) - len(names))

        if not self._layouts:
            return None
        best = max(self._layouts, key=likeness)
        common, difference = likeness(best)
        if not common and (difference or any(best is saved for saved in self._named)):
            return None
        saved = best if common else _renamed(best, dict(zip(best["order"], names, strict=True)))
        rest = [_part(saved if one is best else one, lambda name: name not in names) for one in self._layouts]
        self._layouts = [part for part in rest if part["order"]]
        self._named = [*self._layouts]
        return _part(saved, lambda name: name in wanted)


def _merged(states: list[dict]) -> list[dict]:
    """The layouts with the memories of all these ranks."""
    if any(
        [_outline(saved) for saved in state["layouts"]] != [_outline(saved) for saved in states[0]["layouts"]]
        for state in states
    ):
        raise ConfigError("the states are of different steps, models or numbers of ranks")
    return [
        {**parts[0], "memories": {rank: memory for saved in parts for rank, memory in saved["memories"].items()}}
        for parts in zip(*(state["layouts"] for state in states), strict=True)
    ]


def _outline(saved: dict) -> dict:
    return {key: saved[key] for key in ("version", "ranks", "step", "order")}


def _renamed(saved: dict, names: dict) -> dict:
    memories = {
        rank: {field: {names[name]: array for name, array in arrays.items()} for field, arrays in memory.items()}
        for rank, memory in saved["memories"].items()
    }
    return {**saved, "order": [names[name] for name in saved["order"]], "memories": memories}


def _part(saved: dict, wanted: Callable[[str], bool]) -> dict:
    """What a layout has of the tensors with some names."""
    memories = {
        rank: {field: {name: array for name, array in arrays.items() if wanted(name)} for field, arrays in memory.items()}
        for rank, memory in saved["memories"].items()
    }
    return {**saved, "order": [name for name in saved["order"] if wanted(name)], "memories": memories}


def write(path, state: dict) -> None:
    """Save a state in a file of NumPy's (.npz). The file is there as a whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as part, open(part, "wb") as file:
        state_files.write(file, state)


def read(path) -> dict:
    """The inverse of write."""
    state = state_files.read(path)
    return {**state, "layouts": [state_files.with_numbered_ranks(saved) for saved in state["layouts"]]}
