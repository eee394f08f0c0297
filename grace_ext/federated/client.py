"""A federated client: it rebuilds the model from containers, and compresses its update into one.

Algorithm 2 of DeepReduce (Xu, Kostopoulou, Dutta et al., NeurIPS 2021, appendix), with error feedback on the client.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .._util.rng import Stream
from ..errors import ConfigError, ContainerError
from ..pipeline.compressor import Compressor, as_dense
from .compression import checked_compressor
from .estimate import Estimate
from .messages import FRESH, WHOLE, Up, read_down

MEMORIES = ("residual", "ef21", "none")


class _Unanswered(NamedTuple):
    """An update that the server has not yet answered.

    Attributes:
        round: The round whose model the update is from.
        if_accepted: What the memory holds if the server has accepted the update, float32[d].
        if_rejected: What it holds otherwise, float32[d].
    """

    round: int
    if_accepted: np.ndarray
    if_rejected: np.ndarray


class Client:
    """Keeps what the server has told of the model, and what the client's own updates have left out.

    An update counts as sent only when the server says that it has accepted it; otherwise all of it is still owed. A client
    with memory "ef21" that has lost its state, or has an old one, learns from the server's next message that its estimate is
    not the server's; both then begin again with zeros.

    Args:
        start: float32[d], the initial model, the same on the server and on all clients.
        compression: Spec, Compressor or other argument of grace_ext.compressor, for the updates.
        memory: "residual" (what an update leaves out is added to the next one), "ef21" (the server keeps an estimate of this
            client's update, and containers correct it) or "none".
        number: The client's number, by which its random numbers differ from those of other clients.
        seed: Seed of the compressor's random numbers.

    Raises:
        ConfigError: There is no such memory, or the compression cannot be used with it: it is low-rank, or unbiased although
            there is a memory.
    """

    def __init__(
        self,
        start: np.ndarray,
        compression: str | dict | Compressor = "topk:0.1/rice/qsgd:7",
        *,
        memory: str = "residual",
        number: int = 0,
        seed: int = 0,
    ):
        if memory not in MEMORIES:
            raise ConfigError(f"memory={memory!r}; allowed: {', '.join(MEMORIES)}")
        self.compressor: Compressor = checked_compressor(compression, memory)
        start = np.array(start, np.float32).reshape(-1)
        self.model = Estimate(start)
        self.round = 0  # the round of self.model
        self._memory, self._number, self._seed = memory, number, seed
        self._memory_state = np.zeros(start.size, np.float32)  # the residual, or with "ef21" the estimate
        self._base = 0  # the last round whose update is known to have been taken; 0: none
        self._unanswered: _Unanswered | None = None

    @property
    def size(self) -> int:
        """Number of elements of the model."""
        return self.model.known.size

    def receive(self, message: np.ndarray) -> np.ndarray:
        """Take a message of the server, and rebuild the model.

        Args:
            message: uint8[m].

        Returns:
            The model to train on, float32[d], a copy.

        Raises:
            ContainerError: The bytes are no such message, the model in it is not finite, or it continues from a round that
                this client has not seen. The model then stays as it was.
        """
        down, containers = read_down(message, self.size)
        if down.base not in (FRESH, self.round):
            raise ContainerError(
                f"a message of round {down.round} that goes on from round {down.base}; this client is at round {self.round}"
            )
        if any(parsed.non_finite for parsed in containers):
            raise ContainerError("the server's model is not finite")
        following = Estimate(self._zeros() if down.base == FRESH else self.model.known)
        for blob in down.containers:
            following.apply(blob)
        if not np.isfinite(following.known).all():  # its values, or a sum that overflows
            raise ContainerError("the server's model is not finite")
        self.model, self.round = following, down.round
        if (sent := self._unanswered) is not None:
            self._memory_state = sent.if_accepted if down.taken == sent.round else sent.if_rejected
            self._base = sent.round if down.taken == sent.round else self._base
            self._unanswered = None
        if self._memory == "ef21" and down.taken != self._base:  # the server's estimate is another one
            self._memory_state, self._base = self._zeros(), 0
        return self.model.known.copy()

    def update(
        self, trained: npt.ArrayLike, samples: float, compression: str | dict | Compressor | None = None
    ) -> np.ndarray:
        """Make the message for a trained model.

        Args:
            trained: [d], the model after training, float32, float16, bfloat16 or float64.
            samples: Number of samples it was trained on.
            compression: Compression of this update only; None: as usual.

        Returns:
            The message, uint8[m].

        Raises:
            ConfigError: As for `update_by`.
        """
        after = self._checked(trained)
        with np.errstate(over="ignore", invalid="ignore"):  # update_by checks for it
            change = self.model.known - after
        return self.update_by(change, samples, compression)

    def update_by(
        self, change: npt.ArrayLike, samples: float, compression: str | dict | Compressor | None = None
    ) -> np.ndarray:
        """Make the message for an update.

        Args:
            change: [d], the model before training minus that after it, or a gradient; float32, float16, bfloat16 or float64.
            samples: Number of samples that the update is from.
            compression: Compression of this update only; None: as usual.

        Returns:
            The message, uint8[m].

        Raises:
            ConfigError: The update is of another size or dtype, it holds a NaN or an Inf, or does so together with what is
                still owed, or the compression cannot be used with this memory.
        """
        made = self.compressor if compression is None else checked_compressor(compression, self._memory)
        base = self._base if self._memory == "ef21" else WHOLE
        return Up(self.round, float(samples), self._encode(self._checked(change), made), base).pack()

    @property
    def told(self) -> np.ndarray:
        """What the server knows of this client's update with memory "ef21", float32[d], the last update included."""
        return self._memory_state if self._unanswered is None else self._unanswered.if_accepted

    def _encode(self, change: np.ndarray, made: Compressor) -> np.ndarray:
        with np.errstate(over="ignore", invalid="ignore"):  # it is checked
            owed = change + self._memory_state if self._memory == "residual" else change
            difference = owed - self._memory_state if self._memory == "ef21" else owed
        if not np.isfinite(difference).all():
            raise ConfigError("the update holds a NaN or an Inf, alone or with what is still owed")
        known = Estimate(self._memory_state if self._memory == "ef21" else self._zeros())
        blob = known.encode_and_apply(owed, made, Stream(self._seed, "up", self.round, self._number))
        if_accepted, if_rejected = known.known, self._memory_state
        if self._memory == "residual":
            if_accepted, if_rejected = owed - known.known, owed
        elif self._memory == "none":
            if_accepted = self._memory_state
        self._unanswered = _Unanswered(self.round, if_accepted, if_rejected)
        return blob

    def _checked(self, vector: npt.ArrayLike) -> np.ndarray:
        """Return a vector as float32[d]. Raises ConfigError for another size or dtype."""
        dense = as_dense(vector)[0]
        if dense.size != self.size:
            raise ConfigError(f"a vector of {dense.size} elements; this client's model has {self.size}")
        return dense

    def _zeros(self) -> np.ndarray:
        return np.zeros(self.size, np.float32)

    def state_dict(self) -> dict:
        """Return the client's state, for numpy.savez or torch.save.

        Of an update that is not yet answered, it holds both outcomes; the server's next message decides between them.

        Returns:
            Arrays and numbers by name.
        """
        sent = self._unanswered or _Unanswered(0, self._memory_state, self._memory_state)
        return {
            "model": self.model.known.copy(),
            "round": self.round,
            "owed": sent.if_rejected.copy(),
            "base": self._base,
            "sent_in": sent.round,
            "if_taken": sent.if_accepted.copy(),
        }

    def load_state_dict(self, state: dict) -> None:
        """Restore what `state_dict` returned.

        Args:
            state: Arrays and numbers by name.

        Raises:
            ConfigError: The state belongs to a model of another size, or a part of it is missing.
        """
        if missing := {"model", "round", "owed", "base", "sent_in", "if_taken"} - set(state):
            raise ConfigError(f"the state lacks {', '.join(sorted(missing))}")
        model, owed, if_taken = (np.array(state[key], np.float32).reshape(-1) for key in ("model", "owed", "if_taken"))
        if {model.size, owed.size, if_taken.size} != {self.size}:
            raise ConfigError(f"the state is of {model.size} elements, this client of {self.size}")
        round_, base, sent_in = (int(state[key]) for key in ("round", "base", "sent_in"))
        self.model, self.round, self._memory_state, self._base = Estimate(model), round_, owed, base
        self._unanswered = _Unanswered(sent_in, if_taken, owed) if sent_in else None
