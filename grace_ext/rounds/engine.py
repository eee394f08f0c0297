"""When the fragments of a model are exchanged, and when the result reaches the parameters.

Local SGD with an outer optimizer: Douillard et al., DiLoCo, arXiv 2311.08105, algorithm 1. Fragments, delay and mixing:
Douillard et al., Streaming DiLoCo, arXiv 2501.18512, algorithm 2. Moves that stay: Shen et al., CoCoD-SGD, arXiv 1906.12043.
"""

import concurrent.futures
import copy
import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from ..errors import ConfigError, ExchangeError
from ..exchange.stats import Statistics
from ..means.base import check_mean
from .auto_steps import AutoSteps
from .buffers import SharedBuffers
from .fragment import Fragment
from .header import Contribution, Outcome
from .parameters import Parameters, fitting_arrays
from .timing import MOVES, check_kept, check_timing, first_exchange, share_kept
from .turn import Turn, check_saved
from .weights import SAMPLES, UNIFORM

VERSION = 2


class Rounds:
    """Counts the local steps of a worker, and exchanges fragments when it is their turn.

    With fragments p = 0, 1, … of P, fragment p is exchanged every `steps` steps, with the offset p · steps / P. What comes of
    it is applied `delay` steps later, θ_r = θ plus what θ_r has moved in these steps, or θ_r = keep · θ_r + (1 - keep) · θ; the
    exchange goes on in a thread of its own meanwhile.

    A rank whose parameters are not finite contributes nothing to the round, and returns to what the ranks share.

    Args:
        fragments: The fragments, the same on all ranks.
        parameters: The model.
        worker: An executor of one thread, in which all collectives run, in the same order on all ranks.
        steps: Number of local steps between two exchanges of a fragment; or steps(round), from round 1 on, the same on all
            ranks, for a single fragment; or an AutoSteps, for a single fragment without delay.
        seconds: In the place of `steps`: each rank makes as many steps as fit into this time, then waits for the others. For
            a single fragment without delay.
        delay: Number of steps that hide an exchange, from 0 to below steps / P, so that one fragment is under way at a time.
        keep: What a parameter keeps when the result is applied: "moves", those since the exchange began; or a share of itself, 0
            to below 1, above 0 only with a delay, and where no memory keeps the moves that are not sent, too.
        weights: "uniform", or "samples": each rank counts by its number of samples since the fragment's last exchange, which a
            mean by coordinates does not allow.
        clock: Returns the time in seconds.

    Raises:
        ConfigError: An argument is out of range, or arguments do not fit together.
    """

    def __init__(
        self,
        fragments: Sequence[Fragment],
        parameters: Parameters,
        worker: concurrent.futures.Executor,
        *,
        steps: int | Callable[[int], int] | None = None,
        seconds: float | None = None,
        delay: int = 0,
        keep: float | str = MOVES,
        weights: str = UNIFORM,
        clock: Callable[[], float] = time.monotonic,
    ):
        check_timing(len(fragments), steps, seconds, delay, keep, weights)
        check_kept(keep, [bucket for fragment in fragments for bucket in fragment.exchange.buckets])
        for mean in [fragment.mean for fragment in fragments if fragment.mean is not None]:
            check_mean(mean, weights == UNIFORM)
        self._parameters, self._worker, self._clock = parameters, worker, clock
        self._buffers = SharedBuffers(parameters)
        steps = copy.copy(steps)  # an AutoSteps changes
        self._length, self._seconds, self._delay, self._keep, self._weights = steps, seconds, delay, keep, weights
        #: Number of local steps so far.
        self.steps = 0
        self._position = 0  # in the schedule: local steps, and those of others that were shadowed
        #: Rounds in which this rank contributed nothing, because its parameters were not finite.
        self.lost = 0
        self._other_bytes, self._waited, self._exchanged_in = 0, 0.0, 0.0
        self._earlier: list[Statistics] = []  # of exchanges with other ranks
        self._error: BaseException | None = None
        self._turns = [Turn(fragment, 0) for fragment in fragments]
        self._schedule()
        self._began = clock()

    @property
    def fragments(self) -> list[Fragment]:
        """The fragments."""
        return [turn.fragment for turn in self._turns]

    def connect(self, signature: object = ()) -> None:
        """Check that all ranks were built alike, and give all of them what rank 0 shares: a collective, before training.

        Args:
            signature: What else has to be the same on all ranks; its repr is compared.

        Raises:
            ConfigError: The ranks differ; on all ranks.
        """
        steps = self._length if isinstance(self._length, int | AutoSteps | None) else "by round"
        own = (signature, len(self._turns), steps, self._seconds, self._delay, self._keep, self._weights)
        for turn in self._turns:
            self._worker.submit(turn.fragment.connect, own).result()
            turn.fragment.assign(0.0)
            turn.rounds = turn.fragment.step - 1
        self._buffers.values = self._parameters.read_buffers()
        self._worker.submit(self.fragments[0].take_from_first, "buffers", self._buffers.values).result()
        if isinstance(self._length, AutoSteps):
            chosen = np.array([self._length.steps], "<i8")
            self._worker.submit(self.fragments[0].take_from_first, "auto_steps", chosen).result()
            self._length.steps = int(chosen[0])
        self._schedule()
        self._began = self._clock()

    def step(self, samples: float = 1.0) -> bool:
        """Count a local step, and do what is due after it.

        Args:
            samples: Number of samples of the step, which counts with weights "samples".

        Returns:
            Whether parameters have changed.

        Raises:
            ConfigError: `samples` is negative or not finite, or what is trained has changed.
            ExchangeError: An earlier exchange failed, or the ranks are in different rounds.
        """
        if not (samples >= 0 and math.isfinite(samples)):
            raise ConfigError(f"samples={samples}; allowed: finite and not negative")
        self.steps += 1
        for turn in self._turns:
            turn.steps += 1
            turn.samples += samples
        return bool(self._tick(joined=False))

    def synchronize(self) -> None:
        """End the round now: afterwards the parameters of all ranks have the same bits. A collective, at the same step.

        The next round begins here. What is under way is applied first. Where no rank has made a step, nothing changes.
        """
        self._check_usable()
        for turn in self._turns:
            if turn.outcome is not None:
                self._apply(turn, self._keep)
        for turn in self._turns:
            self._start(turn, joined=False)
            self._apply(turn, 0.0)
        self._schedule()
        self._began = self._clock()

    def join(self) -> None:
        """Take part in the rounds of the other ranks until all have called it. For ranks with fewer steps than others.

        What this rank has done since the last round goes into its first round here; afterwards it does not count in the means.
        At the end the parameters of all ranks have the same bits.
        """
        while not any(outcome.all_joined for outcome in self._tick(joined=True)):
            pass
        self.synchronize()

    def show_shared(self) -> None:
        """Give the parameters what the ranks share, what is under way included. The caller puts back what they were."""
        self._wait()
        for fragment in self.fragments:
            fragment.assign(0.0)

    def _wait(self) -> None:
        """For what is under way."""
        for turn in self._turns:
            if turn.outcome is not None:
                self._result(turn)

    def _check_usable(self) -> None:
        if self._error is not None:
            raise ExchangeError(
                "an earlier round failed, so the ranks may be out of step: restart from a checkpoint"
            ) from self._error

    def _schedule(self) -> None:
        """The fragments' next turns, from this step on."""
        for number, turn in enumerate(self._turns):
            length = self._steps_of(turn)
            turn.following = self._position + first_exchange(number, len(self._turns), length)

    def _steps_of(self, turn: Turn) -> int:
        """Number of steps of the fragment's next round; 0 where a round has a time."""
        if callable(self._length):
            steps = self._length(turn.rounds + 1)
            if not isinstance(steps, int) or steps <= self._delay:
                raise ConfigError(
                    f"steps({turn.rounds + 1}) is {steps!r}; allowed: whole numbers above the delay, {self._delay}"
                )
            return steps
        return self._length or 0

    def _is_turn(self, turn: Turn, joined: bool) -> bool:
        if self._seconds is not None:
            return joined or self._clock() - self._began >= self._seconds
        return self._position >= turn.following

    def _tick(self, joined: bool) -> list[Outcome]:
        """A step has been made, or with `joined` one of the others' is shadowed. Returns what came of the rounds that ended."""
        self._check_usable()
        self._position += 1
        ended = [
            self._apply(turn, self._keep) for turn in self._turns if turn.due is not None and turn.due <= self._position
        ]
        for turn in self._turns:
            if self._is_turn(turn, joined):
                self._start(turn, joined)
                if not self._delay:
                    ended.append(self._apply(turn, 0.0))
                    self._began = self._clock()
                turn.following = self._position + self._steps_of(turn)
        return ended

    def _start(self, turn: Turn, joined: bool) -> None:
        self._parameters.check()
        buffers, shared, are_finite = self._buffers.read(turn is self._turns[0])
        finite = turn.fragment.measure() and are_finite
        if not finite:
            self._recover()
        weight = turn.samples if self._weights == SAMPLES else float(turn.steps > 0)
        each = (self._clock() - self._began) / turn.steps if turn.steps else 0.0
        own = Contribution(weight, finite, joined, buffers, shared, each, self._exchanged_in)
        if self._delay and self._keep == MOVES:
            turn.note_parameters(self._parameters)
        turn.begin(self._worker.submit(turn.fragment.exchange_round, own, self._clock), self._position + self._delay)

    def _recover(self) -> None:
        """All parameters of this rank return to what the ranks share, those of other fragments as well: each is computed with
        the others."""
        self.lost += 1
        self.show_shared()
        self._buffers.restore()
        self._parameters.recovered()

    def _result(self, turn: Turn) -> Outcome:
        began = time.perf_counter()
        try:
            return turn.outcome.result()  # type: ignore[union-attr]  # there is one
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._waited += time.perf_counter() - began

    def _apply(self, turn: Turn, keep: float | str) -> Outcome:
        outcome = self._result(turn)
        turn.apply(outcome, self._parameters, keep)
        if outcome.buffers is not None:
            self._buffers.take(outcome.buffers, share_kept(keep) if outcome.finite else 0.0)
        self._other_bytes += outcome.other_bytes
        self._exchanged_in = outcome.own_seconds
        if isinstance(self._length, AutoSteps):
            self._length.observe(outcome.step_seconds, outcome.exchange_seconds)
        return outcome

    def close(self) -> None:
        """Wait for what is under way, and end the exchanges."""
        for turn in self._turns:
            if turn.outcome is not None:
                concurrent.futures.wait([turn.outcome])
            turn.fragment.exchange.close()

    def stats(self) -> dict:
        """Report totals since the start. It waits for an exchange under way, which changes them in another thread.

        Returns:
            What grace_ext.exchange.stats.report describes, with a step for each exchange of a fragment, and: local_steps;
            rounds, how many rounds the first fragment has made; lost_rounds, in which this rank contributed nothing because
            its parameters were not finite; other_bytes_out, bytes of headers and buffers; waited_seconds, how long local steps
            waited for exchanges.
        """
        self._wait()
        *others, last = [fragment.exchange for fragment in self.fragments]
        return {
            **last.stats(*others, earlier=self._earlier),
            "local_steps": self.steps,
            "rounds": self._turns[0].fragment.step - 1,
            "lost_rounds": self.lost,
            "other_bytes_out": self._other_bytes,
            "waited_seconds": self._waited,
        }

    def state_dict(self) -> dict:
        """Copy this rank's state, between two local steps. No collective, but it waits for an exchange under way.

        Returns:
            The state. What is under way is in it as its result.
        """
        found: dict = {"version": VERSION, "steps": self.steps, "position": self._position, "lost": self.lost, "turns": {}}
        # Amid a round, parameters are not those that the ranks share, which are in the turns.
        amid = any(turn.steps or turn.outcome is not None for turn in self._turns)
        found |= {"buffers": self._buffers.values.copy(), "own": self._parameters.save_own(amid)}
        if isinstance(self._length, AutoSteps):
            found["auto_steps"] = self._length.steps
        for number, turn in enumerate(self._turns):
            if turn.outcome is not None:
                self._result(turn)
            found["turns"][number] = turn.state_dict()
        return found

    def load_state_dict(self, state: dict) -> None:
        """Load what `state_dict` gave, on all ranks, each its own, and with it parameters amid a round, and buffers.

        Args:
            state: The state.

        Raises:
            ConfigError: It is of an unknown version, of other fragments or of another outer optimizer.
        """
        if state.get("version") != VERSION:
            raise ConfigError(f"the state of local steps is of version {state.get('version')}; known: {VERSION}")
        check_saved(state["turns"], self._turns, self._keep)
        buffers = fitting_arrays("buffers", {"": state["buffers"]}, {"": self._buffers.values})
        self._wait()
        for number, turn in enumerate(self._turns):
            turn.load_state_dict(state["turns"][number])
        self._parameters.load_own(state["own"])
        self._buffers.values = buffers[""]
        self._count_from(state)
        self._began = self._clock()

    def _count_from(self, state: dict) -> None:
        self.steps, self._position, self.lost = state["steps"], state["position"], state["lost"]
        if isinstance(self._length, AutoSteps):
            self._length.steps = state.get("auto_steps", self._length.steps)

    def carry_over(self, before: "Rounds", state: dict) -> None:
        """Go on in the place of rounds with other ranks, which are closed. No collective; `connect` has to follow.

        What parameters have moved since the last round is dropped, and a result that waits for its delay is applied.

        Args:
            before: Those rounds, with as many fragments.
            state: What their `state_dict` gave, now or earlier.
        """
        for number, turn in enumerate(self._turns):
            turn.fragment.carry_over(state["turns"][number]["fragment"])
        self._count_from(state)
        statistics = [fragment.exchange.statistics for fragment in before.fragments]
        self._earlier = [*before._earlier, *statistics]
        self._other_bytes, self._waited = before._other_bytes, before._waited
