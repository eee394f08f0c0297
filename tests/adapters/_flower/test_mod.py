"""The mod, and what a client keeps: with one node, whose messages are made by hand."""

import tracemalloc

import numpy as np
import pytest
from support import launch

launch.skip_without("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict  # noqa: E402
from support.flower_apps import LocalGrid, Node, flat, model, record, sent, strategy, targets  # noqa: E402

from grace_ext import ConfigError, ContainerError  # noqa: E402
from grace_ext.adapters._flower.records import RECORD  # noqa: E402

SPEC = "topk:0.2/rice/qsgd:7"


def told(ours, node, round_=1) -> Message:
    """The message to the node, as the strategy makes it."""
    (message,) = ours.configure_train(round_, ours._made or model(), ConfigRecord(), LocalGrid([node]))
    return message


def again(message: Message) -> Message:
    """A message with the same content."""
    return Message(sent(message.content), dst_node_id=message.metadata.dst_node_id, message_type=MessageType.TRAIN)


def node(**options) -> Node:
    return Node(2**63, targets(1)[0], **options)


def test_the_state_stays_in_the_context_between_messages():
    """A node whose app is made anew for each message, as a supernode does, is the same as one whose app stays."""

    class Fresh(Node):
        def handle(self, message):
            following = Node(self.node_id, self.target)
            following.context = self.context
            reply = following.handle(message)
            self.models += following.models
            return reply

    stays, fresh = strategy(SPEC), strategy(SPEC)
    one, other = node(), Fresh(2**63, targets(1)[0])
    kept = stays.start(LocalGrid([one]), model(), num_rounds=4, timeout=5)
    made = fresh.start(LocalGrid([other]), model(), num_rounds=4, timeout=5)
    assert np.array_equal(flat(kept.arrays), flat(made.arrays)) and np.array_equal(one.models, other.models)


def test_a_message_that_comes_twice_is_trained_once():
    ours, one = strategy(SPEC), node()
    message = told(ours, one)
    second = again(message)
    assert not one.handle(message).has_error()
    before = sent(one.context.state)
    reply = one.handle(second)
    assert (
        reply.has_error()
        and "ContainerError: a message of round 1; this client has trained that of round 1" in reply.error.reason
    )
    assert sent(one.context.state) == before and len(one.models) == 1


def test_no_flipped_bit_reaches_the_training():
    ours, one = strategy(SPEC), node()
    message = told(ours, one)
    blob = message.content[RECORD]["message"]
    for at in [*range(0, 60, 7), len(blob) // 2, len(blob) - 1]:
        damaged = again(message)
        damaged.content[RECORD]["message"] = blob[:at] + bytes([blob[at] ^ 16]) + blob[at + 1 :]
        reply = one.handle(damaged)
        assert reply.has_error() and "ContainerError" in reply.error.reason, at
    assert not one.models and not one.handle(again(message)).has_error()


def test_a_model_above_the_limit_is_refused_before_room_is_made_for_it():
    ours, size = strategy(SPEC), flat(model()).size
    message, huge = told(ours, node()), node()
    message.content[RECORD]["layout"] = f'[["weight",[{2**30}],"float32",true]]'
    tracemalloc.start()
    reply = huge.handle(again(message))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert f"the server's model has {2**30} elements; allowed here: {2**28}" in reply.error.reason and most < 2**24
    for limit, is_refused in ((size - 1, True), (size, False)):
        one = node(most_elements=limit)
        assert one.handle(again(told(ours, one))).has_error() == is_refused
    with pytest.raises(ConfigError, match="most_elements=0; allowed: above 0"):
        node(most_elements=0)


@pytest.mark.parametrize("part", ["message", "session", "keys", "up"])
def test_records_that_lack_a_part(part):
    ours, one = strategy(SPEC), node()
    message = told(ours, one)
    del message.content[RECORD][part]
    with pytest.raises(ContainerError, match=f"record 'grace_ext' lacks a part: .*{part}"):
        one.app(message, one.context)


def test_a_server_with_another_strategy_is_told_so():
    one = node()
    LocalGrid([one])
    message = Message(RecordDict({"arrays": model()}), dst_node_id=one.node_id, message_type=MessageType.TRAIN)
    with pytest.raises(ConfigError, match="CompressionMod needs the strategy CompressedFedAvg on the server"):
        one.app(message, one.context)


@pytest.mark.parametrize(
    "content, text",
    [
        (
            {"metrics": MetricRecord({"num-examples": 1})},
            "the reply has 0 ArrayRecords; needed: one, with the trained model",
        ),
        ({"arrays": model()}, "the reply has 0 MetricRecords; needed: one, with 'num-examples'"),
        ({"arrays": model(), "metrics": MetricRecord({"other": 1})}, "'num-examples' of the MetricRecord is None"),
        ({"arrays": record(weight=np.ones(3)), "metrics": MetricRecord({"num-examples": 1})}, "the model lacks the arrays"),
    ],
)
def test_replies_of_an_app_that_cannot_be_sent(content, text):
    class Other(Node):
        def train(self, message, context):
            return Message(RecordDict(content), reply_to=message)

    one = Other(2**63, targets(1)[0])
    with pytest.raises(ConfigError, match=text):
        one.app(told(strategy(SPEC), one), one.context)


def test_a_training_that_fails_leaves_the_state_as_it_was():
    class Failing(Node):
        fails = False

        def train(self, message, context):
            if self.fails:
                raise RuntimeError("no memory")
            return super().train(message, context)

    ours, one = strategy(SPEC), Failing(2**63, targets(1)[0])
    ours.aggregate_train(1, [one.handle(told(ours, one))])
    before, one.fails = sent(one.context.state), True
    reply = one.handle(told(ours, one, 2))
    assert reply.has_error() and sent(one.context.state) == before
    ours.aggregate_train(2, [reply])
    one.fails = False
    ours.aggregate_train(3, [one.handle(told(ours, one, 3))])
    assert [report.taken for report in ours.reports] == [[0], [], [0]]


def test_a_message_that_goes_on_from_a_model_that_the_client_has_not_is_answered_so():
    ours, one = strategy(SPEC), node()
    ours.aggregate_train(1, [one.handle(told(ours, one))])
    one.context.state = RecordDict()
    reply = one.handle(told(ours, one, 2))
    assert dict(reply.content[RECORD]) == {"needs": "model"} and len(one.models) == 1
    ours.aggregate_train(2, [reply])
    message = told(ours, one, 3)
    assert len(message.content[RECORD]["message"]) > 4 * 420
    ours.aggregate_train(3, [one.handle(message)])
    assert [report.taken for report in ours.reports] == [[0], [], [0]]


def test_the_app_sees_what_it_would_see_without_the_mod():
    seen = []

    class Looking(Node):
        def train(self, message, context):
            seen.append({key: type(one) for key, one in message.content.items()})
            message.content["arrays"]["bias"] = Array(np.zeros(19))  # what the app does to its arrays is its own affair
            reply = super().train(message, context)
            reply.content["more"] = ConfigRecord({"note": "kept"})
            return reply

    ours, one = strategy(SPEC), Looking(2**63, targets(1)[0])
    reply = one.handle(told(ours, one))
    assert seen == [{"config": ConfigRecord, "arrays": ArrayRecord}]
    assert {key: type(record) for key, record in reply.content.items()} == {
        "metrics": MetricRecord,
        "more": ConfigRecord,
        RECORD: ConfigRecord,
    }
