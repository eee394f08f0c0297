"""When a fragment is exchanged and its result applied."""

import concurrent.futures
import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from ..errors import ConfigError
from .fragment import Fragment
from .header import Outcome
from .parameters import Parameters, fitting_arrays
from .timing import MOVES, share_kept


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
        began_at: The parameters when that exchange began, float32[size] by name, if moves from then on stay; else None.
    """

    fragment: Fragment
    following: int
    rounds: int = 0
    due: int | None = None
    steps: int = 0
    samples: float = 0.0
    outcome: "concurrent.futures.Future[Outcome] | None" = None
    began_at: dict[str, np.ndarray] | None = None

    def begin(self, outcome: "concurrent.futures.Future[Outcome]", due: int) -> None:
        """Begin an exchange with what has been done since the last one.

        Args:
            outcome: What comes of it.
            due: The step at which it is applied.
        """
        self.outcome, self.due = outcome, due
        self.rounds += 1
        self.steps, self.samples = 0, 0.0

    def note_parameters(self, parameters: Parameters) -> None:
        """Let the parameters keep what they move from now on, until the result is applied.

        Args:
            parameters: The model.
        """
        self.began_at = {name: np.empty_like(shared) for name, shared in self.fragment.shared.items()}
        for name, array in self.began_at.items():
            parameters.read(name, array)

    def apply(self, outcome: Outcome, parameters: Parameters, keep: float | str) -> None:
        """Give the parameters what the ranks share since the exchange, which has ended.

        Args:
            outcome: What came of it.
            parameters: The model.
            keep: See Rounds.
        """
        if keep == MOVES and self.began_at is not None:
            for name, before in self.began_at.items():
                moved = np.empty_like(before)
                parameters.read(name, moved)
                moved -= before
                moved += self.fragment.shared[name]
                parameters.assign(name, moved, 0.0)
        else:
            self.fragment.assign(share_kept(keep) if outcome.finite else 0.0)
        self.outcome = self.due = self.began_at = None

    def state_dict(self) -> dict:
        """Copy what belongs into a checkpoint, once what is under way has arrived.

        Returns:
            The state.
        """
        under_way: dict = {}
        if self.outcome is not None:
            outcome = self.outcome.result()
            under_way = {"due": self.due, "finite": outcome.finite, "other_bytes": outcome.other_bytes}
            if outcome.buffers is not None:
                under_way["buffers"] = outcome.buffers.copy()
            if self.began_at is not None:
                under_way["began_at"] = {name: array.copy() for name, array in self.began_at.items()}
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
        began_at = state["under_way"].get("began_at")
        if began_at is not None:
            began_at = fitting_arrays("parameters of an exchange under way", began_at, self.fragment.shared)
        self.fragment.load_state_dict(state["fragment"])
        self.following, self.steps, self.samples = state["following"], state["steps"], state["samples"]
        self.rounds, self.outcome, self.due, self.began_at = self.fragment.step - 1, None, None, began_at
        if under_way := state["under_way"]:
            self.outcome, self.due = concurrent.futures.Future(), under_way["due"]
            self.outcome.set_result(
                Outcome(under_way["finite"], True, False, under_way.get("buffers"), under_way["other_bytes"])
            )


def check_saved(saved: Mapping[int, dict], turns: Sequence[Turn], keep: float | str) -> None:
    """Check that turns of a checkpoint can be loaded.

    Args:
        saved: What `state_dict` gave of each turn, by the number of its fragment.
        turns: Those that there are.
        keep: See Rounds.

    Raises:
        ConfigError: There are others, or what is under way cannot be applied as `keep` says.
    """
    if len(saved) != len(turns):
        raise ConfigError(f"the state is of {len(saved)} fragments, and there are {len(turns)}")
    for turn in saved.values():
        if (under_way := turn["under_way"]) and ("began_at" in under_way) != (keep == MOVES):
            raise ConfigError(
                f"keep={keep!r}, and the state has an exchange under way with another one; allowed: keep as then"
            )
