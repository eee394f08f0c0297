"""A federated client: it rebuilds the model from containers, and compresses its update into one.

Algorithm 2 of DeepReduce (Xu, Kostopoulou, Dutta et al., NeurIPS 2021, appendix), with error feedback on the client.
"""

import numpy as np

from .._util.rng import Stream
from ..errors import ConfigError, ContainerError
from ..pipeline.compressor import Compressor, make_compressor
from .estimate import Estimate
from .messages import FRESH, WHOLE, Up, read_down

MEMORIES = ("residual", "ef21", "none")


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
        ConfigError: There is no such memory, or memory "residual" is combined with an unbiased compressor.
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
        self.compressor: Compressor = make_compressor(compression)
        if self.compressor.unbiased and memory == "residual":
            raise ConfigError(f"{str(self.compressor)!r} is right on average by itself: use memory 'none'")
        start = np.array(start, np.float32).reshape(-1)
        self.model = Estimate(start.size, start)
        self.round = 0  # after which the model is as it is
        self._memory, self._number, self._seed = memory, number, seed
        self._owed = np.zeros(start.size, np.float32)  # the residual, or with ef21 the estimate
        self._base = 0  # the last round whose update is known to have been taken; 0: none
        self._open: tuple[int, np.ndarray, np.ndarray] | None = None  # round, owed if it was taken, owed if not

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
        following = Estimate(self.size, None if down.base == FRESH else self.model.known)
        for blob in down.containers:
            following.apply(blob)
        self.model, self.round = following, down.round
        if self._open is not None:
            sent_in, if_taken, otherwise = self._open
            self._owed = if_taken if down.taken == sent_in else otherwise
            self._base = sent_in if down.taken == sent_in else self._base
            self._open = None
        if self._memory == "ef21" and down.taken != self._base:  # the server's estimate is another one
            self._owed, self._base = np.zeros(self.size, np.float32), 0
        return self.model.known.copy()

    def update(self, trained: np.ndarray, samples: float, compression: str | dict | Compressor | None = None) -> np.ndarray:
        """Make the message for a trained model.

        Args:
            trained: float32[d], the model after training.
            samples: Number of samples it was trained on.
            compression: Compression of this update only; None: as usual.

        Returns:
            The message, uint8[m].

        Raises:
            ConfigError: The model is not finite.
        """
        return self.update_by(self.model.known - np.asarray(trained, np.float32).reshape(-1), samples, compression)

    def update_by(
        self, change: np.ndarray, samples: float, compression: str | dict | Compressor | None = None
    ) -> np.ndarray:
        """Make the message for an update.

        Args:
            change: float32[d], the model before training minus that after it, or a gradient.
            samples: Number of samples that the update is from.
            compression: Compression of this update only; None: as usual.

        Returns:
            The message, uint8[m].

        Raises:
            ConfigError: The update is not finite.
        """
        made = self.compressor if compression is None else make_compressor(compression)
        base = self._base if self._memory == "ef21" else WHOLE
        return Up(self.round, float(samples), self._encode(change, made), base).pack()

    @property
    def told(self) -> np.ndarray:
        """What the server knows of this client's update with memory "ef21", float32[d], the last update included."""
        return self._owed if self._open is None else self._open[1]

    def _encode(self, change: np.ndarray, made: Compressor) -> np.ndarray:
        if not np.isfinite(change).all():
            raise ConfigError("the trained model holds a NaN or an Inf")
        stream = Stream(self._seed, "up", self.round, self._number)
        if self._memory == "ef21":
            estimate = Estimate(self.size, self._owed)
            blob = estimate.encode(change, made, stream)
            self._open = self.round, estimate.known, self._owed
            return blob
        owed = change + self._owed if self._memory == "residual" else change
        sent = Estimate(self.size)
        blob = sent.encode(owed, made, stream)
        left = owed - sent.known if self._memory == "residual" else self._owed
        self._open = self.round, left, owed if self._memory == "residual" else self._owed
        return blob

    def state_dict(self) -> dict:
        """Return the client's state, for numpy.savez or torch.save.

        Of an update that is not yet answered, it holds both outcomes; the server's next message decides between them.

        Returns:
            Arrays and numbers by name.
        """
        sent_in, if_taken, owed = self._open or (0, self._owed, self._owed)
        return {
            "model": self.model.known.copy(),
            "round": self.round,
            "owed": owed.copy(),
            "base": self._base,
            "sent_in": sent_in,
            "if_taken": if_taken.copy(),
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
        self.model, self.round, self._owed = Estimate(model.size, model), int(state["round"]), owed
        self._base = int(state["base"])
        sent_in = int(state["sent_in"])
        self._open = (sent_in, if_taken, owed) if sent_in else None
