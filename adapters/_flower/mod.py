"""The client's side: a mod that unpacks models, and packs what training has changed."""

from collections.abc import Callable

from flwr.app import ArrayRecord, Context, Message, MessageType

from grace_ext import ConfigError

from .client_state import ClientState
from .metrics import read_samples
from .records import RECORD, Told, answer_needs_model, answer_up


class CompressionMod:
    """A mod for Flower's ClientApp, for clients of the strategy CompressedFedAvg: ClientApp(mods=[CompressionMod()]).

    The app's train and evaluate functions get and return whole models, as without the mod. What the strategy chose for the
    updates, it tells the clients. What an update leaves out, and the model that the client has been told, stay in the
    Context's state, which the supernode keeps for the length of a run. A mod that changes arrays, such as Flower's for
    differential privacy, goes behind this one in the list.

    Args:
        start: A function of the Context that gives the initial model, the same as on the server, for a strategy with
            shared_start=True. A client without it, or with another one, is told the whole model.
        seed: Seed of the compressor's random numbers.
        most_elements: Most elements of the server's model, above 0. A message of some bytes can stand for a model of any size; the
            client makes room for so many elements on a server's word, and refuses a larger model.

    Raises:
        ConfigError: `most_elements` is not above 0.
    """

    def __init__(self, start: Callable[[Context], ArrayRecord] | None = None, *, seed: int = 0, most_elements: int = 2**28):
        if not most_elements > 0:
            raise ConfigError(f"most_elements={most_elements}; allowed: above 0")
        self._start, self._seed, self._most_elements = start, seed, most_elements

    def __call__(self, message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
        """Handle a message.

        Args:
            message: The server's message. Those that are neither for training nor for evaluation go on as they are.
            context: Flower's context.
            call_next: The next mod, or the app.

        Returns:
            The reply.

        Raises:
            ConfigError: The message is not of the strategy CompressedFedAvg, the model is too large, or the app's reply has another
                model or no number of samples.
            ContainerError: The message is malformed.
        """
        kind = message.metadata.message_type.partition(".")[0]
        if kind not in (MessageType.TRAIN, MessageType.EVALUATE):
            return call_next(message, context)
        trains = kind == MessageType.TRAIN
        told = Told.take(message.content)
        state = ClientState.load(context, told, self._start, self._seed, self._most_elements)
        model = None if state is None else state.receive(told, trains)
        if state is None or model is None:
            return answer_needs_model(message)
        message.content[told.arrays_key] = model
        reply = call_next(message, context)
        if trains and not reply.has_error():
            _pack(reply, state, told.samples_key)
        state.save(context)
        return reply


def _pack(reply: Message, state: ClientState, samples_key: str) -> None:
    """Replace the model in a reply by the update."""
    records = reply.content.array_records
    if len(records) != 1:
        raise ConfigError(f"the reply has {len(records)} ArrayRecords; needed: one, with the trained model")
    try:
        samples = read_samples(reply.content, samples_key)
    except ValueError as error:
        raise ConfigError(f"the reply has {error}") from error
    ((name, trained),) = records.items()
    update = state.client.update(state.layout.vector(trained), samples)
    del reply.content[name]
    reply.content[RECORD] = answer_up(update)
