"""When a fragment is exchanged and its result applied."""

import concurrent.futures
import dataclasses

import numpy as np

from .._util.numerics import non_finite_allowed
from .fragment import Fragment
from .header import Outcome
from .parameters import Parameters, fitting_arrays


@dataclasses.dataclass
class Turn:
    """Of one fragment: the steps at which it is exchanged and applied, and what this rank has done since the last exchange.

    Attributes:
        fragment: The fragment.
        following: The step at which it is exchanged next.
        rounds: Number of its rounds that have begun.
        due: The step at which what is under way is applied; None if nothing is.
        steps: Number of local steps since the last exchange.
        samples: Number of samples since then.
        outcome: What comes of the exchange under way; None if none is.
        before: What the parameters were when it began, float32[size] by name, if what they have moved by since then is kept;
            else empty.
        buffers: The buffers that were sent, likewise.
    """

    fragment: Fragment
    following: int
    rounds: int = 0
    due: int | None = None
    steps: int = 0
    samples: float = 0.0
    outcome: "concurrent.futures.Future[Outcome] | None" = None
    before: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    buffers: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0, np.float32))

    def remember(self, parameters: Parameters, buffers: np.ndarray) -> None:
        """Note where an exchange begins, so that what parameters and buffers move by from here on can be kept.

        Args:
            parameters: The model.
            buffers: The buffers that are sent, float32[n].
        """
        self.before = self._read(parameters)
        self.buffers = buffers

    def assign_with_moves(self, parameters: Parameters, averaged: np.ndarray | None) -> None:
        """Give parameters and buffers what the ranks share, plus what they have moved by since `remember`.

        Args:
            parameters: The model.
            averaged: The shared buffers, float32[n]; None if there are none.
        """
        with non_finite_allowed():
            for name, now in self._read(parameters).items():
                now -= self.before[name]
                now += self.fragment.shared[name]
                parameters.assign(name, now, 0.0)
            if averaged is not None:
                parameters.assign_buffers(averaged + (parameters.read_buffers() - self.buffers), 0.0)

    def _read(self, parameters: Parameters) -> dict[str, np.ndarray]:
        found = {name: np.empty_like(shared) for name, shared in self.fragment.shared.items()}
        for name, array in found.items():
            parameters.read(name, array)
        return found

    def state_dict(self) -> dict:
        """Copy what belongs into a checkpoint, once what is under way has arrived.

        Returns:
            The state.
        """
        under_way: dict = {}
        if self.outcome is not None:
            outcome = self.outcome.result()
            under_way = {"due": self.due, "finite": outcome.finite, "other_bytes": outcome.other_bytes}
            under_way["before"] = {name: array.copy() for name, array in self.before.items()}
            under_way["buffers_before"] = self.buffers.copy()
            if outcome.buffers is not None:
                under_way["buffers"] = outcome.buffers.copy()
        return {
            "fragment": self.fragment.state_dict(),
            "following": self.following,
            "steps": self.steps,
            "samples": self.samples,
            "under_way": under_way,
        }

    def load_state_dict(self, state: dict) -> None:
        """Load what `state_dict` gave.

        Args:
            state: The state.

        Raises:
            ConfigError: See Fragment.load_state_dict.
        """
        self.fragment.load_state_dict(state["fragment"])
        self.following, self.steps, self.samples = state["following"], state["steps"], state["samples"]
        self.rounds, self.outcome, self.due = self.fragment.step - 1, None, None
        if under_way := state["under_way"]:
            self.outcome, self.due = concurrent.futures.Future(), under_way["due"]
            if before := under_way.get("before"):
                self.before = fitting_arrays("parameters under way", before, self.fragment.shared)
                self.buffers = np.array(under_way["buffers_before"], np.float32)
            self.outcome.set_result(
                Outcome(under_way["finite"], True, False, under_way.get("buffers"), under_way["other_bytes"])
            )
