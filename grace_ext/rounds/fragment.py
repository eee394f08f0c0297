"""A fragment of a model in rounds of local steps: what the ranks share of it, and one exchange of how it has moved."""

import contextlib
import math
import time
from collections.abc import Callable

import numpy as np
import xxhash

from .._util.numerics import non_finite_allowed
from ..errors import ConfigError
from ..exchange.buckets import Bucket
from ..exchange.engine import Exchange
from ..exchange.session import StateSession
from ..exchange.stalls import watch_ranks
from ..means import Mean
from ..outer import OuterOptimizer
from ..transport.base import CollectiveHandle, Transport
from .buffers import mean_of_rows
from .header import HEADER, Contribution, Outcome, log_losses, read_headers, start_headers
from .parameters import Parameters, fitting_arrays, is_finite, parts_of
from .rank_mean import RankMean
from .weights import shares_of


class Fragment:
    """Tensors that are exchanged together.

    With θ what the ranks share, θ_r what a rank has, and C the compression with its memory, a round is
    Δ_r = θ - θ_r; Δ = Σ share_r C(Δ_r); θ = outer(θ, Δ). The memory, the containers and the sum over ranks are those of an
    Exchange, in which the rank's vector is share_r · ranks · Δ_r: the residual, too, is in these units. With a `mean`, the vector
    is Δ_r, and Δ = mean(C(Δ_r)). Whatever has collectives runs in one thread, the same for all fragments.

    Args:
        exchange: The exchange, whose weight is 1 / ranks, with its buckets.
        transport: The transport that the exchange was made with.
        outer: The outer optimizer.
        parameters: The model.
        states: Saves and loads the exchange's memories.
        prefix: What the names of this fragment's collectives begin with, unique in the job and the same on all ranks.
        most: The largest weight that a rank can have in the mean, above 0, whatever it claims.
        mean: A mean of what each rank sends, in the place of the weighted sum. The buckets go by communicator Separate then.

    Raises:
        ConfigError: A memory applies a momentum or changes an optimizer's step, `most` is not above 0, or the mean cannot be
            taken of what the buckets send.
    """

    def __init__(
        self,
        exchange: Exchange,
        transport: Transport,
        outer: OuterOptimizer,
        parameters: Parameters,
        states: StateSession,
        prefix: str,
        most: float = math.inf,
        mean: Mean | None = None,
    ):
        if not most > 0:
            raise ConfigError(f"most={most}; allowed: weights above 0")
        self.exchange, self.transport, self.outer, self._parameters = exchange, transport, outer, parameters
        self.states, self.prefix, self._most = states, prefix, most
        #: Number of the round that comes next, from 1 on.
        self.step = 1
        self._outer_steps = 0  # fewer than rounds: in some nobody contributes
        for bucket in exchange.buckets:
            if bucket.memory.applies_momentum or bucket.memory.needs_step:
                raise ConfigError(
                    f"memory {str(bucket.memory)!r} is for gradients; allowed for pseudo-gradients: residual, ef21, none, "
                    "with the momentum in the outer optimizer"
                )
        self.mean = mean
        self._of_ranks = None if mean is None else RankMean(mean, exchange, transport, prefix)
        self._tensors = [tensor for bucket in exchange.buckets for tensor in bucket.tensors]
        #: What the ranks share, float32[size] by name. Between rounds all ranks have the same bits.
        self.shared = {tensor.name: np.empty(tensor.size, np.float32) for tensor in self._tensors}
        for name, array in self.shared.items():
            parameters.read(name, array)
        self._outer_state = {tensor.name: outer.begin(tensor.size) for tensor in self._tensors}
        self._moved = {bucket.name: np.empty(bucket.size, np.float32) for bucket in exchange.buckets}
        self._waiting: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """The names of the tensors, in the order of the buckets."""
        return [tensor.name for tensor in self._tensors]

    def unfinished(self) -> tuple[str, ...]:
        """Name what is waited for, as Exchange.unfinished does. Any thread may call it.

        Returns:
            Names of collectives or buckets; empty between rounds.
        """
        return self.exchange.unfinished() or self._waiting

    # In the thread of the training loop

    def measure(self) -> bool:
        """Compute by how much the parameters have moved, for the round that begins.

        Returns:
            Whether all of them are finite.
        """
        finite = True
        for bucket in self.exchange.buckets:
            for tensor, part in parts_of(bucket, self._moved[bucket.name]):
                self._parameters.moved(tensor, self.shared[tensor], part)
            finite &= is_finite(self._moved[bucket.name])
        return finite

    def assign(self, keep: float) -> None:
        """Give the parameters what the ranks share.

        Args:
            keep: The share that a parameter keeps of itself.
        """
        for name, shared in self.shared.items():
            self._parameters.assign(name, shared, keep)

    # In the thread of the collectives

    def connect(self, signature: object) -> None:
        """Check that all ranks were built alike, let them watch each other, and give all of them what rank 0 shares.

        Args:
            signature: What else has to be the same on all ranks; its repr is compared.

        Raises:
            ConfigError: The ranks differ; on all ranks.
        """
        own = xxhash.xxh64_digest(repr((signature, str(self.outer), self._most, self.mean)).encode())
        message = np.concatenate([self.exchange.config_digest(), np.frombuffer(own, np.uint8)])
        gathered = watch_ranks(self, lambda sent: self._gather("config", sent), message)
        self.exchange.check_config_digests(gathered[:, : -len(own)])
        self._check_equal("are set up differently from", gathered[:, -len(own) :])
        counters = np.array([self.step, self._outer_steps], "<i8")
        self.take_from_first("counters", counters)
        self.step, self._outer_steps = counters.tolist()
        for name, shared in self.shared.items():
            self.take_from_first(name, shared)
            if self._outer_steps:
                for field, array in self._outer_state[name].items():
                    self.take_from_first(f"{name}.{field}", array)

    def take_from_first(self, name: str, array: np.ndarray) -> None:
        """Give all ranks what rank 0 has: a collective.

        Args:
            name: Name of the collective, behind the fragment's prefix.
            array: Contiguous, of the same dtype and size on all ranks; changed on all others.
        """
        payload = array.view(np.uint8) if self.transport.rank == 0 else np.empty(0, np.uint8)
        array[:] = self.transport.broadcast(f"{self.prefix}.{name}", payload, 0).wait().view(array.dtype)

    def exchange_round(self, own: Contribution, clock: Callable[[], float] = time.monotonic) -> Outcome:
        """Make a round with what `measure` has computed. A collective.

        Args:
            own: What this rank brings.
            clock: Returns the time in seconds.

        Returns:
            What came of it. If nothing was exchanged, memories and shared values are as before.

        Raises:
            ConfigError: The ranks start from different states.
            ExchangeError: The ranks are in different rounds.
        """
        try:
            self._waiting = (f"{self.prefix}.round",)
            self.states.begin_step()
            self._settle()
            counts = own.finite and 0 < own.weight < math.inf
            header = start_headers(self.transport, f"{self.prefix}.header", self.step, own)
            goes_along, buffers = self._of_ranks is not None, None
            if goes_along:  # what a rank sends does not depend on the others' headers
                buffers = self._send(own.buffers, float(counts))
            headers = read_headers(header.wait(), self.transport.size)
            began = clock()
            shares = shares_of({rank: min(claimed, self._most) for rank, claimed in enumerate(headers["weight"].tolist())})
            exists = any(shares.values())
            if exists and not goes_along:
                buffers = self._send(own.buffers, shares[self.transport.rank] * self.transport.size)
            averaged = None
            if exists and buffers is not None:
                rows = buffers.wait().copy().view(np.float32).reshape(self.transport.size, -1)
                averaged = mean_of_rows(rows, shares, own.shared_buffers, self._of_ranks)
            exchanged = (exists or goes_along) and self._receive(shares)
            if exchanged:
                self._step()
            if self.transport.rank == 0:
                log_losses(headers, self.step, exchanged)
            self.step += 1
            joined, nbytes = bool(headers["joined"].all()), HEADER.itemsize + (0 if buffers is None else own.buffers.nbytes)
            steps, before = (float(headers[field].max()) for field in ("step_seconds", "exchange_seconds"))
            return Outcome(own.finite, exchanged, joined, averaged, nbytes, steps, before, clock() - began)
        except BaseException:
            self._abort()
            raise
        finally:
            self._waiting = ()

    def _settle(self) -> None:
        """In the first round, and the first one after a state was loaded."""
        if self.states.settled:
            return
        self.states.settle(self.exchange, self.prefix)
        digest = xxhash.xxh64(repr((self.step, self._outer_steps)).encode())
        for name, shared in self.shared.items():
            for array in (shared, *self._outer_state[name].values()):
                digest.update(array)
        rows = self._gather("shared", np.frombuffer(digest.digest(), np.uint8)).reshape(self.transport.size, -1)
        self._check_equal("start from another state than", rows)
        if self._of_ranks is not None:
            self._of_ranks.settle()

    def _check_equal(self, differ: str, rows: np.ndarray) -> None:
        others = [rank for rank, row in enumerate(rows) if row.tobytes() != rows[0].tobytes()]
        if others:
            raise ConfigError(
                f"ranks {others} {differ} rank 0: all ranks must make their rounds from the same model with the same "
                f"options, or load checkpoints of the same step"
            )

    def _gather(self, name: str, payload: np.ndarray) -> np.ndarray:
        return self.transport.allgather(f"{self.prefix}.{name}", payload).wait()

    def _send(self, buffers: np.ndarray, factor: float) -> CollectiveHandle | None:
        """Send the buffers, and the pseudo-gradient times a factor; 0 for a rank that does not count. Returns the handle of the
        buffers, if there are any, when all is on its way."""
        exchange, handle = self.exchange, None
        if buffers.size:
            own = buffers if factor else np.zeros_like(buffers)
            handle = self.transport.allgather(f"{self.prefix}.buffers", own.view(np.uint8))
        # What the others keep of a rank that does not count is led to zero, or it would count in their mean for ever.
        sent = [bool(factor) or self._of_ranks is None and bucket.memory.sends_differences for bucket in exchange.buckets]
        if not sent[0]:
            exchange.begin_step(gradients=False)
        for bucket, packs in zip(exchange.buckets, sent, strict=True):
            if packs:
                exchange.start(bucket, self._packed(bucket, np.float32(factor)))
            else:
                exchange.start_empty(bucket)
        for bucket in exchange.buckets:
            exchange.pending(bucket)
        return handle

    def _receive(self, shares: dict[int, float]) -> bool:
        """Write Δ to `_moved`. False if it is not finite, which no memory keeps, or if no rank counts."""
        exchange = self.exchange
        exchange.advance()
        for bucket in exchange.buckets:
            exchange.finish(bucket, self._moved[bucket.name])
        if self._of_ranks is not None:
            self._of_ranks.check_received([rank for rank, share in shares.items() if share])
        finite = exchange.end_step() and any(shares.values())
        if self._of_ranks is not None:
            return finite and self._of_ranks.take(shares, self._moved)
        return finite and all(is_finite(array) for array in self._moved.values())

    def _abort(self) -> None:
        """Give up the exchange. What is queued for this thread has to be taken from the queue here: nobody else will."""
        for bucket in self.exchange.buckets:
            with contextlib.suppress(BaseException):  # after the first error, each of them raises that at once
                if self.exchange.is_started(bucket):
                    self.exchange.pending(bucket)
        self.exchange.abort()

    def _packed(self, bucket: Bucket, factor: np.float32) -> Callable[[np.ndarray], None]:
        moved = self._moved[bucket.name]

        def pack(out: np.ndarray) -> None:
            if not factor:  # what has moved may not be finite
                out[:] = 0
                return
            with non_finite_allowed():
                np.multiply(moved, factor, out=out)

        return pack

    def _step(self) -> None:
        self._outer_steps += 1
        with non_finite_allowed():
            for bucket in self.exchange.buckets:
                for name, change in parts_of(bucket, self._moved[bucket.name]):
                    self.outer.step(self.shared[name], change, self._outer_state[name], self._outer_steps)

    # State

    def state_dict(self) -> dict:
        """Copy this rank's state, between rounds. No collective.

        Returns:
            The memories as StateSession.save gives them, the shared values, the outer optimizer's state and number of
            steps, and the number of the next round.
        """
        return {
            "exchange": self.states.save(self.exchange, self.names),
            "shared": {name: array.copy() for name, array in self.shared.items()},
            "outer": {
                name: {field: array.copy() for field, array in fields.items()}
                for name, fields in self._outer_state.items()
                if fields
            },
            "round": self.step,
            "outer_steps": self._outer_steps,
            "separate": self._of_ranks is not None,
        }

    def load_state_dict(self, state: dict) -> None:
        """Load what `state_dict` gave. No collective: the ranks settle in the next round that they have the same.

        Args:
            state: The state.

        Raises:
            ConfigError: It is that of other tensors or of another outer optimizer or mean. Then nothing has changed.
        """
        taken = self._fitting(state)
        self.states.load(state["exchange"], self.exchange)
        self._take(*taken, state)

    def carry_over(self, state: dict) -> None:
        """Go on with other ranks, from what `state_dict` gave among the ranks before. No collective; `connect` has to follow.

        Args:
            state: The state.
        """
        self._take(*self._fitting(state), state)
        self.states.carry_over(state["exchange"], self.exchange)

    def _fitting(self, state: dict) -> tuple[dict[str, np.ndarray], dict[str, dict[str, np.ndarray]]]:
        """Shared values and the outer optimizer's state, if they fit. Raises ConfigError."""
        kept = any(bucket.memory.sends_differences for bucket in self.exchange.buckets)
        if kept and state.get("separate", False) != (self._of_ranks is not None):  # a part of what such memories keep
            raise ConfigError("the checkpoint's memory goes with another mean; allowed: `mean` given, or left out, as there")
        shared = fitting_arrays("shared values", state["shared"], self.shared)
        outer = {
            name: fitting_arrays(f"outer state of {name!r}", state["outer"].get(name, {}), fields)
            for name, fields in self._outer_state.items()
        }
        return shared, outer

    def _take(self, shared: dict, outer: dict, state: dict) -> None:
        self.shared, self._outer_state = shared, outer
        self.step, self._outer_steps = int(state["round"]), int(state["outer_steps"])
