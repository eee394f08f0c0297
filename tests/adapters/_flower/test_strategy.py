"""The strategy, with nodes in this process: what it tells them, and which of their replies it accepts."""

import logging
import math

import numpy as np
import pytest
from support import launch

launch.skip_without("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402
from flwr.serverapp.strategy import FedAvg  # noqa: E402
from support.flower_apps import FEW, LocalGrid, Node, flat, model, moved, record, strategy, targets  # noqa: E402

from grace_ext import ConfigError  # noqa: E402
from grace_ext.adapters._flower.records import RECORD, UNCHANGED  # noqa: E402
from grace_ext.federated import Client, ClippedMean, Median, Server, TrimmedMean  # noqa: E402

SPEC = "topk:0.2/rice/qsgd:7"


def nodes(count=3, **options):
    return [Node(2**63 + number, target, number + 1, **options) for number, target in enumerate(targets(count))]


def train(ours, grid, rounds=4, **options):
    return ours.start(grid, model(), num_rounds=rounds, timeout=5, **options)


def update_of(reply: Message) -> bytes:
    return reply.content[RECORD]["message"]


def replacing(number: int, change):
    """An `up` of LocalGrid: what the node of that number sends becomes what change(update) gives."""

    def up(node, reply):
        if node.node_id == 2**63 + number and reply.metadata.message_type == MessageType.TRAIN and not reply.has_error():
            record = change(update_of(reply))
            reply.content[RECORD] = ConfigRecord({"message": record}) if isinstance(record, bytes) else record
        return reply

    return up


@pytest.mark.parametrize("memory", ["residual", "ef21", "none"])
def test_models_are_those_of_the_same_training_without_flower(memory):
    ours, them = strategy(SPEC, memory=memory, fraction_evaluate=0.0), nodes()
    result = train(ours, LocalGrid(them), rounds=5)
    server = Server(flat(model()), 3, SPEC, memory=memory)
    clients = [Client(flat(model()), SPEC, memory=memory, number=number) for number in range(3)]
    for _ in range(5):
        server.begin_round()
        for number, client in enumerate(clients):
            trained = flat(moved(split(client.receive(server.message_for(number))), them[number].target))
            server.receive(number, client.update(trained, 1))
        server.end_round()
    assert np.array_equal(flat(result.arrays), flat(split(server.model)))
    assert [report.taken for report in ours.reports] == [[0, 1, 2]] * 5


def split(vector: np.ndarray) -> ArrayRecord:
    return record(
        weight=vector[:400].reshape(40, 10), bias=vector[400:419].astype(np.float64), scale=np.array(vector[419], np.float32)
    )


def test_without_compression_it_is_flowers_fedavg():
    options = {"weights": "samples", "most_samples": 10}
    ours = train(strategy("dense/raw", **options), LocalGrid(nodes()))
    theirs = train(FedAvg(**FEW), LocalGrid(nodes(mods=[])))
    assert np.allclose(flat(ours.arrays), flat(theirs.arrays), atol=1e-5)
    for mine, other in (
        (ours.train_metrics_clientapp, theirs.train_metrics_clientapp),
        (ours.evaluate_metrics_clientapp, theirs.evaluate_metrics_clientapp),
    ):
        assert mine.keys() == other.keys() and all(mine[key]["loss"] == pytest.approx(other[key]["loss"]) for key in mine)
    assert {name: array.dtype for name, array in ours.arrays.items()} == {name: one.dtype for name, one in model().items()}


def test_it_goes_where_the_mean_of_the_targets_is():
    result = train(strategy("topk:0.5/rice/qsgd:7"), LocalGrid(nodes()), rounds=60)
    goal = np.mean(targets(3), axis=0)
    assert np.linalg.norm(flat(result.arrays) - goal) < 0.1 * np.linalg.norm(flat(model()) - goal)


def test_clients_hold_what_the_server_has_told_and_evaluate_the_next_model():
    ours, them = strategy(SPEC), nodes()
    told = []

    def measure(round_, arrays):
        if round_:
            told.append(ours.server.told.known.copy())
            assert np.array_equal(flat(arrays), flat(split(ours.server.model)))

    train(ours, LocalGrid(them), evaluate_fn=measure)
    for node in them:
        trained_on, evaluated = node.models[::2], node.models[1::2]
        assert np.array_equal(evaluated, told)
        assert np.array_equal(trained_on[1:], evaluated[:-1])
        # What was told for the evaluation is not told again.
        assert all(down < 250 for down, _ in node.bytes[2::2]) and all(down > 300 for down, _ in node.bytes[1::2])


def test_the_whole_model_is_told_once_and_never_to_who_begins_with_it():
    told = {}
    for shared in (False, True):
        them = nodes(start=lambda context: model())
        train(strategy(SPEC, shared_start=shared), LocalGrid(them))
        told[shared] = [[down for down, _ in node.bytes] for node in them]
    assert all(first > 4 * 420 > 3 * max(rest) for first, *rest in told[False])
    assert all(first < 700 for first, *_ in told[True])


@pytest.mark.parametrize(
    "start", [None, lambda context: model(seed=5), lambda context: record(other=np.ones(3, np.float32))]
)
def test_who_begins_with_another_model_is_told_the_servers(start, caplog):
    ours, them = strategy(SPEC, shared_start=True, fraction_evaluate=0.0), nodes(start=lambda context: model())
    them[1] = Node(2**63 + 1, targets(3)[1], start=start)
    with caplog.at_level(logging.WARNING, "grace_ext"):
        train(ours, LocalGrid(them))
    assert [report.taken for report in ours.reports] == [[0, 2], [0, 1, 2], [0, 1, 2], [0, 1, 2]]
    assert "client 1 has not got the model, and will be told all of it" in caplog.text
    assert np.array_equal(them[1].models[-1], them[0].models[-1])


def test_messages_and_replies_that_are_lost_are_made_up_for():
    """Every other message to one node, and every other reply of another one, gets nowhere; nothing of an update is lost."""
    count = {"down": 0, "up": 0}

    def lossy(way, number):
        def passed(node, message):
            count[way] += node.node_id == 2**63 + number
            return None if node.node_id == 2**63 + number and count[way] % 2 == 0 else message

        return passed

    ours, them = strategy(SPEC, fraction_evaluate=0.0), nodes()
    train(ours, LocalGrid(them, down=lossy("down", 0), up=lossy("up", 1)), rounds=6)
    assert [report.taken for report in ours.reports] == [[0, 1, 2], [2]] * 3
    assert [report.missing for report in ours.reports] == [[], [0, 1]] * 3
    assert not any(report.rejected for report in ours.reports)
    assert np.array_equal(them[0].models[-1], them[2].models[-2]) and np.array_equal(them[1].models[-1], them[2].models[-1])
    # The residual of the node whose replies were lost holds all of its last update.
    state = them[1].context.state
    assert state["grace_ext.client.numbers"]["sent_in"] == 6
    owed, left = (state["grace_ext.client"][name].numpy() for name in ("owed", "if_taken"))
    assert np.count_nonzero(owed) > 2 * np.count_nonzero(owed - left)


def test_who_has_missed_more_rounds_than_are_kept_gets_the_whole_model():
    round_ = {"now": 0}

    def absent(node, message):
        round_["now"] = message.content["config"]["server-round"]
        return None if node.node_id == 2**63 and 2 <= round_["now"] <= 5 else message

    ours, them = strategy("topk:0.02/rice/qsgd:7", fraction_evaluate=0.0, keep=2), nodes()
    train(ours, LocalGrid(them, down=absent), rounds=7)
    assert [0 in report.taken for report in ours.reports] == [True, False, False, False, False, True, True]
    sizes = [down for down, _ in them[0].bytes]
    assert min(sizes[0], sizes[1]) > 4 * 420 > 4 * sizes[2]
    assert np.array_equal(them[0].models[-1], them[1].models[-1])


def test_nodes_that_leave_and_nodes_that_come():
    ours, them = strategy(SPEC, memory="ef21", fraction_evaluate=0.0), nodes()
    grid = LocalGrid(them[:2])

    def change(round_, arrays):
        if round_ == 2:
            del grid.nodes[2**63]
            grid.nodes[2**63 + 2] = them[2]
        if round_ == 4:
            grid.nodes[2**63] = them[0]

    train(ours, grid, rounds=6, evaluate_fn=change)
    assert [report.taken for report in ours.reports] == [[0, 1], [0, 1], [1, 2], [1, 2], [0, 1, 2], [0, 1, 2]]
    assert np.array_equal(them[0].models[-1], them[2].models[-1])


def test_estimates_of_nodes_that_have_left_do_not_count():
    ours, them = strategy("dense/raw", memory="ef21", fraction_evaluate=0.0), nodes()
    grid = LocalGrid(them)
    goal = np.mean(targets(3)[1:], axis=0)
    train(ours, grid, rounds=30, evaluate_fn=lambda round_, _: grid.nodes.pop(2**63, None) and None if round_ == 2 else None)
    assert np.linalg.norm(ours.server.model - goal) < 1e-3


def flipped(update: bytes) -> bytes:
    return update[:60] + bytes([update[60] ^ 1]) + update[61:]


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda update: b"", "malformed"),
        (lambda update: b"garbage" * 30, "malformed"),
        (lambda update: update[:-1], "malformed"),
        (lambda update: update + b"\0", "malformed"),
        (flipped, "malformed"),
        (lambda update: bytes(10_000_000), "oversized"),
        (lambda update: ConfigRecord({"message": "text"}), "malformed: the reply has no container"),
        (lambda update: ConfigRecord({"other": 1}), "malformed: the reply has no container"),
        (lambda update: MetricRecord({"message": 1}), "malformed: the reply has no container"),
        (lambda update: ArrayRecord({"message": Array(np.ones(420, np.float32))}), "malformed: the reply has no container"),
    ],
)
def test_a_reply_that_is_no_update_is_left_out_and_the_round_goes_on(change, reason):
    ours, them = strategy(SPEC), nodes()
    train(ours, LocalGrid(them, up=replacing(1, change)))
    assert all(report.taken == [0, 2] for report in ours.reports)
    assert all(report.rejected[1].startswith(reason) for report in ours.reports)
    assert np.array_equal(them[1].models[-1], them[0].models[-1])


def test_updates_of_another_round_are_refused():
    kept = []

    def replayed(update):
        kept.append(update)
        return kept[0]

    ours = strategy(SPEC, fraction_evaluate=0.0)
    train(ours, LocalGrid(nodes(), up=replacing(1, replayed)))
    assert [1 in report.taken for report in ours.reports] == [True, False, False, False]
    assert ours.reports[1].rejected[1] == "late: an update of round 1; one of round 2 is expected"


def test_a_reply_of_a_node_that_was_not_asked_does_not_count(caplog):
    def disguised(node, reply):
        if node.node_id == 2**63 + 1:
            reply.metadata.__dict__["_src_node_id"] = 77
        return reply

    ours = strategy(SPEC, fraction_evaluate=0.0)
    with caplog.at_level(logging.WARNING, "grace_ext"):
        train(ours, LocalGrid(nodes(), up=disguised))
    assert all(report.taken == [0, 2] and report.missing == [1] for report in ours.reports)
    assert "aggregate_train: node 77 was not asked" in caplog.text


def test_two_replies_of_a_node_count_once():
    class Twice(LocalGrid):
        def send_and_receive(self, messages, *, timeout=None):
            return [one for reply in super().send_and_receive(messages) for one in (reply, reply)]

    ours, once = strategy(SPEC), strategy(SPEC)
    assert np.array_equal(flat(train(ours, Twice(nodes())).arrays), flat(train(once, LocalGrid(nodes())).arrays))


class Liar(Node):
    """A node that goes far to the other side, and claims all samples of the world."""

    far = 4.0

    def train(self, message, context):
        reply = super().train(message, context)
        reply.content["arrays"] = moved(message.content["arrays"], self.target, -self.far)
        reply.content["metrics"]["num-examples"] = 1e30
        return reply


@pytest.mark.parametrize("mean", [Median(), TrimmedMean(0.3), ClippedMean()])
def test_robust_means_go_where_honest_clients_want_to(mean):
    alike = targets(1)[0]

    def distance(mean):
        them = [(Liar if number < 2 else Node)(2**63 + number, alike) for number in range(7)]
        ours = strategy("topk:0.3/rice/raw", memory="ef21", mean=mean, norm_limit=math.inf)
        return float(np.linalg.norm(flat(train(ours, LocalGrid(them), rounds=30).arrays) - alike))

    assert distance(mean) < 1 and not distance(None) < 100


def test_a_capped_claim_counts_up_to_the_cap_and_metrics_with_it():
    alike = targets(1)[0]
    them = [Node(2**63, alike, samples=10), Node(2**63 + 1, alike, samples=1e30)]
    ours = strategy("dense/raw", weights="samples", most_samples=30)
    result = train(ours, LocalGrid(them), rounds=1)
    assert np.allclose(flat(result.arrays), (flat(model()) + alike) / 2, atol=1e-5)
    losses = [np.linalg.norm(node.models[0] - alike) for node in them]
    assert result.train_metrics_clientapp[1]["loss"] == pytest.approx(np.average(losses, weights=[10, 30]))


def test_an_update_far_longer_than_the_others_is_refused():
    them = [Liar(2**63, targets(1)[0]), *nodes(4)[1:]]
    them[0].far = 1000.0
    ours = strategy(SPEC)
    train(ours, LocalGrid(them))
    assert all(report.rejected[0].startswith("norm") and report.taken == [1, 2, 3] for report in ours.reports)


def test_a_sparse_update_is_refused_where_the_mean_needs_all_elements():
    ours = strategy(SPEC, mean=Median())
    assert train(ours, LocalGrid(nodes())).arrays is not None
    assert all(not report.taken and "sparse" in report.rejected[0] for report in ours.reports)
    ours = strategy(SPEC, client_compression="dense/minmax:8", mean=Median())
    train(ours, LocalGrid(nodes()))
    assert all(report.taken == [0, 1, 2] for report in ours.reports)


def test_clients_whose_training_fails_are_left_out(caplog):
    class Failing(Node):
        def train(self, message, context):
            reply = super().train(message, context)
            reply.content["arrays"]["bias"] = Array(np.full(19, math.nan))
            return reply

    them = [Failing(2**63, targets(1)[0]), *nodes()[1:]]
    ours = strategy(SPEC)
    with caplog.at_level(logging.WARNING, "grace_ext"):
        train(ours, LocalGrid(them))
    assert all(report.taken == [1, 2] for report in ours.reports)
    assert "client 0 has failed: ConfigError: the update holds a NaN or an Inf" in caplog.text


def test_clients_without_the_mod_are_left_out(caplog):
    them = nodes()
    them[1] = Node(2**63 + 1, targets(3)[1], mods=[])
    ours = strategy(SPEC)
    with caplog.at_level(logging.WARNING, "grace_ext"):
        train(ours, LocalGrid(them))
    assert all(report.taken == [0, 2] for report in ours.reports) and "client 1 has failed: KeyError" in caplog.text


def test_a_strategy_around_it_may_change_the_model():
    class Shifted:
        """As Flower's strategies for differential privacy, which add noise to what the one within has made."""

        def __init__(self, within):
            self.within = within

        def rounds(self, grid, count):
            arrays = model()
            for number in range(1, count + 1):
                replies = grid.send_and_receive(self.within.configure_train(number, arrays, ConfigRecord(), grid))
                arrays, _ = self.within.aggregate_train(number, replies)
                arrays = record(**{name: array.numpy() + array.numpy().dtype.type(1) for name, array in arrays.items()})

    ours, them = strategy("dense/raw"), nodes()
    Shifted(ours).rounds(LocalGrid(them), 2)
    expected = flat(model()) * 0.5 + np.mean(targets(3), axis=0) * 0.5 + 1
    assert np.allclose(them[0].models[1], expected, atol=1e-5)


def test_arrays_that_are_not_sent_stay_as_they_are():
    def counted():
        return ArrayRecord({**model(), "batches": Array(np.array(7, np.int64))})

    class Counting(Node):
        def train(self, message, context):
            assert message.content["arrays"]["batches"].numpy() == 7
            given = message.content["arrays"]
            message.content["arrays"] = ArrayRecord({name: one for name, one in given.items() if name != "batches"})
            reply = super().train(message, context)
            reply.content["arrays"]["batches"] = Array(np.array(9, np.int64))
            return reply

        def evaluate(self, message, context):
            del message.content["arrays"]["batches"]
            return super().evaluate(message, context)

    for shared in (False, True):
        them = [
            Counting(2**63 + number, target, start=lambda context: counted()) for number, target in enumerate(targets(3))
        ]
        ours = strategy(SPEC, unchanged=["batch*"], shared_start=shared)
        result = ours.start(LocalGrid(them), counted(), num_rounds=3, timeout=5)
        assert result.arrays["batches"].numpy() == 7 and all(report.taken == [0, 1, 2] for report in ours.reports)
    with pytest.raises(ConfigError, match="'batches' is int64"):
        strategy(SPEC).start(LocalGrid(nodes()), counted(), num_rounds=1, timeout=5)


def test_nodes_without_a_weight_are_not_asked():
    ours = strategy("dense/raw", weights={2**63 + 2: 1.0, 2**63: 3.0}, fraction_evaluate=0.0)
    them = nodes()
    result = train(ours, LocalGrid(them), rounds=1)
    assert not them[1].bytes and ours.reports[0].taken == [0, 1]
    goals = targets(3)
    assert np.allclose(flat(result.arrays), (flat(model()) + 0.25 * goals[2] + 0.75 * goals[0]) / 2, atol=1e-5)


def test_another_training_begins_anew():
    ours, them = strategy(SPEC), nodes()
    first = train(ours, LocalGrid(them))
    second = train(ours, LocalGrid(them))
    assert np.array_equal(flat(first.arrays), flat(second.arrays)) and len(ours.reports) == 4


def test_other_keys_than_flowers_usual_ones():
    class Named(Node):
        def train(self, message, context):
            arrays = message.content["net"]
            assert set(message.content) == {"net", "settings"} and not {RECORD, UNCHANGED} & set(message.content)
            content = {"trained": moved(arrays, self.target), "m": MetricRecord({"rows": 4, "loss": 1.0})}
            return Message(RecordDict(content), reply_to=message)

    them = [Named(2**63 + number, target) for number, target in enumerate(targets(3))]
    keys = {"arrayrecord_key": "net", "configrecord_key": "settings", "weighted_by_key": "rows"}
    ours = strategy("dense/raw", fraction_evaluate=0.0, **keys)
    result = train(ours, LocalGrid(them), rounds=1)
    assert np.allclose(flat(result.arrays), (flat(model()) + np.mean(targets(3), axis=0)) / 2, atol=1e-5)
    assert result.train_metrics_clientapp[1]["loss"] == 1.0


def test_only_trainings_and_evaluations_are_changed():
    app, seen = ClientApp(mods=nodes(1)[0].app._mods), []
    LocalGrid([])

    @app.query()
    def query(message, context):
        seen.append(set(message.content))
        return Message(RecordDict({}), reply_to=message)

    message = Message(RecordDict({"question": ConfigRecord({"a": 1})}), dst_node_id=3, message_type=MessageType.QUERY)
    app(message, nodes(1)[0].context)
    assert seen == [{"question"}]


@pytest.mark.parametrize(
    "options, text",
    [
        ({"memory": "some"}, "memory='some'; allowed: residual, ef21, none"),
        ({"compression": 7}, "compression=7; allowed: a spec, which clients are told as text"),
        ({"compression": "no/such"}, "no"),
        ({"client_compression": "powersgd:2"}, "makes no container"),
        ({"weights": "samples"}, "most_samples"),
        ({"weights": {5: -1.0}}, "allowed: finite and above 0"),
        ({"weights": {5: 1.0, 6: 2.0}, "mean": Median()}, "takes no weights"),
        ({"mean": "median"}, "mean='median'; allowed: an instance of"),
        ({"norm_limit": 1}, "norm_limit=1; allowed: above 1"),
        ({"keep": 0}, "keep=0; allowed: from 1 on"),
        ({"most_nodes": 0}, "most_nodes=0; allowed: from 1 on"),
        ({"optimizer": "adm"}, "adm"),
    ],
)
def test_options_that_cannot_be_met_are_refused_at_once(options, text):
    with pytest.raises(ConfigError, match=text):
        strategy(**options)
