"""When a fragment is exchanged and its result applied."""

import concurrent.futures
import dataclasses

from .fragment import Fragment
from .header import Outcome


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
    """

    fragment: Fragment
    following: int
    rounds: int = 0
    due: int | None = None
    steps: int = 0
    samples: float = 0.0
    outcome: "concurrent.futures.Future[Outcome] | None" = None

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
            self.outcome.set_result(
                Outcome(under_way["finite"], True, False, under_way.get("buffers"), under_way["other_bytes"])
            )
