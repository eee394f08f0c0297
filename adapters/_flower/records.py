"""What strategy and mod tell each other beside the containers, as records of Flower's messages.

A message down has a ConfigRecord RECORD with these fields: "message", what grace_ext.federated sends; "session", which is
drawn anew for each training; "keys", the keys of the model and of the number of samples; "up", the spec and the memory of
the updates; "layout", until the client has answered once; and "start", the digest of the initial model, where the message
continues from that. Where it holds the whole model, an ArrayRecord UNCHANGED has the arrays that are not sent later.

A reply has a ConfigRecord RECORD with "message", the update; or with "needs", if the client cannot use the message that
it got.
"""

import dataclasses

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from grace_ext import ConfigError, ContainerError

RECORD, UNCHANGED = "grace_ext", "grace_ext.unchanged"
MODEL = "model"  # what a client needs


@dataclasses.dataclass(frozen=True)
class Told:
    """What a message down tells beside the user's records.

    Attributes:
        message: Of grace_ext.federated, uint8[m].
        session: Which training it is of.
        arrays_key: The key of the model's ArrayRecord.
        samples_key: The key of the number of samples in a reply's MetricRecord.
        compression: The spec of the updates.
        memory: The memory of the clients.
        layout: The layout as text; None if the client knows it.
        start: Digest of the initial model, if the message continues from that; None otherwise.
        unchanged: With the whole model, the arrays that are not sent later.
    """

    message: np.ndarray
    session: bytes
    arrays_key: str
    samples_key: str
    compression: str
    memory: str
    layout: str | None = None
    start: bytes | None = None
    unchanged: ArrayRecord | None = None

    def put(self, content: RecordDict) -> None:
        """Add what is told to the records of a message.

        Args:
            content: The records, which are changed.
        """
        fields = {
            "message": self.message.tobytes(),
            "session": self.session,
            "keys": [self.arrays_key, self.samples_key],
            "up": [self.compression, self.memory],
        }
        fields |= {key: value for key in ("layout", "start") if (value := getattr(self, key)) is not None}
        if self.unchanged:
            content[UNCHANGED] = self.unchanged
        content[RECORD] = ConfigRecord(fields)

    @classmethod
    def take(cls, content: RecordDict) -> "Told":
        """Remove what is told from the records of a message.

        Args:
            content: The records, which are changed.

        Returns:
            What is told.

        Raises:
            ConfigError: There is nothing of the kind.
            ContainerError: A part of it is missing.
        """
        record, unchanged = content.pop(RECORD, None), content.pop(UNCHANGED, None)
        if not isinstance(record, ConfigRecord):
            raise ConfigError(
                "the message has no container; CompressionMod needs the strategy CompressedFedAvg on the server"
            )
        try:
            (arrays_key, samples_key), (compression, memory) = record["keys"], record["up"]
            told = cls(
                np.frombuffer(record["message"], np.uint8),
                record["session"],
                arrays_key,
                samples_key,
                compression,
                memory,
                record.get("layout"),
                record.get("start"),
                unchanged if unchanged is not None else ArrayRecord(),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ContainerError(f"the message's record {RECORD!r} lacks a part: {error!r}") from error
        return told


def answer_up(update: np.ndarray) -> ConfigRecord:
    """Make the record of a reply with an update.

    Args:
        update: The message of grace_ext.federated, uint8[m].

    Returns:
        The record.
    """
    return ConfigRecord({"message": update.tobytes()})


def answer_needs_model(message: Message) -> Message:
    """Make the reply of a client that cannot use what it was told.

    Args:
        message: The message that it got.

    Returns:
        The reply.
    """
    return Message(RecordDict({RECORD: ConfigRecord({"needs": MODEL})}), reply_to=message)


def needs_model(content: RecordDict) -> bool:
    """Look whether a reply says that the client cannot use what it was told.

    Args:
        content: The records of the reply.

    Returns:
        Whether it says so.
    """
    record = content.get(RECORD)
    return isinstance(record, ConfigRecord) and record.get("needs") == MODEL


def read_update(content: RecordDict) -> np.ndarray | None:
    """Read the update of a reply.

    Args:
        content: The records of the reply.

    Returns:
        The message of grace_ext.federated, uint8[m]; None if there is none.
    """
    record = content.get(RECORD)
    update = record.get("message") if isinstance(record, ConfigRecord) else None
    return np.frombuffer(update, np.uint8) if isinstance(update, bytes) else None
