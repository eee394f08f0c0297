"""What a client keeps between messages, in the state of Flower's Context, which the supernode holds."""

import dataclasses
from collections.abc import Callable

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context

from grace_ext import ConfigError, ContainerError
from grace_ext.federated import Client
from grace_ext.federated.messages import FRESH, read_down

from .layout import Layout
from .records import Told

_ARRAYS, _NUMBERS, _UNCHANGED = "grace_ext.client", "grace_ext.client.numbers", "grace_ext.client.unchanged"
_VECTORS, _COUNTS = ("model", "owed", "if_taken"), ("round", "base", "sent_in")
_INT64 = 2**63 - 1


class ClientState:
    """A client of one training: a grace_ext.federated.Client, the layout of its model, and what it has trained.

    Args:
        client: The client.
        layout: The layout of its model.
        unchanged: The arrays of the model that are not sent.
        session: Which training it takes part in.
        trained: The round of the last model that it was given for training; 0: none.
    """

    def __init__(self, client: Client, layout: Layout, unchanged: ArrayRecord, session: bytes, trained: int = 0):
        self.client, self.layout, self._unchanged = client, layout, unchanged
        self._session, self._trained = session, trained

    @classmethod
    def load(
        cls, context: Context, told: Told, start: Callable[[Context], ArrayRecord] | None, seed: int, most_elements: int
    ) -> "ClientState | None":
        """Restore the state of a training, or begin it.

        Args:
            context: Flower's context.
            told: What the server's message tells.
            start: Gives the initial model, if the client can make it.
            seed: Seed of the compressor's random numbers.
            most_elements: Most elements of a model, for which nothing is allocated yet.

        Returns:
            The state; None if the message continues from a model that the client does not have.

        Raises:
            ConfigError: The compression cannot be used, or the model is too large.
            ContainerError: The layout in the message is malformed.
        """

        def begun(model: np.ndarray) -> Client:
            return Client(model, told.compression, memory=told.memory, number=context.node_id & _INT64, seed=seed)

        numbers = context.state.get(_NUMBERS)
        if isinstance(numbers, ConfigRecord) and numbers["session"] == told.session:
            layout = Layout.read(numbers["layout"])
            client = begun(np.zeros(layout.size, np.float32))
            vectors = {name: array.numpy() for name, array in context.state[_ARRAYS].items()}
            client.load_state_dict(vectors | {name: numbers[name] for name in _COUNTS})
            return cls(client, layout, context.state[_UNCHANGED], told.session, numbers["trained"])
        if told.layout is None:
            return None
        layout = Layout.read(told.layout)
        if layout.size > most_elements:
            raise ConfigError(
                f"the server's model has {layout.size} elements; allowed here: {most_elements} (CompressionMod(most_elements=...))"
            )
        if told.start is None:
            return cls(begun(np.zeros(layout.size, np.float32)), layout, told.unchanged, told.session)
        arrays = None if start is None else start(context)
        try:
            model = None if arrays is None else layout.vector(arrays)
            if model is not None and layout.digest(arrays) == told.start:
                return cls(begun(model), layout, layout.unchanged(arrays), told.session)
        except ConfigError:
            pass  # it is another model, and the server's counts
        return None

    def receive(self, told: Told, trains: bool) -> ArrayRecord | None:
        """Rebuild the model from the server's message.

        Args:
            told: What the message tells.
            trains: Whether the model is for training.

        Returns:
            The model; None if the message continues from a round that the client has not seen.

        Raises:
            ContainerError: The message is malformed, or of a round that the client has trained already.
        """
        down, _ = read_down(told.message, self.client.size)
        if trains and down.round <= self._trained:
            raise ContainerError(f"a message of round {down.round}; this client has trained that of round {self._trained}")
        if down.base != FRESH:
            # What the client has already, because the server has not got its last answer, is left out.
            seen = self.client.round - down.base
            if not 0 <= seen <= len(down.containers):
                return None
            down = dataclasses.replace(down, base=self.client.round, containers=down.containers[seen:])
        elif told.unchanged:
            self._unchanged = told.unchanged
        vector = self.client.receive(down.pack())
        self._trained = down.round if trains else self._trained
        return self.layout.arrays(vector, self._unchanged)

    def save(self, context: Context) -> None:
        """Keep the state in Flower's context.

        Args:
            context: The context.
        """
        state = self.client.state_dict()
        context.state[_ARRAYS] = ArrayRecord({name: Array(state[name]) for name in _VECTORS})
        context.state[_UNCHANGED] = self._unchanged
        context.state[_NUMBERS] = ConfigRecord(
            {
                **{name: state[name] for name in _COUNTS},
                "trained": self._trained,
                "session": self._session,
                "layout": self.layout.text,
            }
        )
