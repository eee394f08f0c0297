"""States that follow the tensors from one exchange into the next. Under real ranks: checks_changing.py of horovod_tensorflow."""

import numpy as np
import pytest
from support.arrays import gauss

pytest.importorskip("tensorflow")
pytest.importorskip("horovod.tensorflow")

import grace_ext  # noqa: E402
from grace_ext import ConfigError  # noqa: E402
from grace_ext.adapters._tensorflow.following_states import FollowingStates  # noqa: E402
from grace_ext.exchange import checkpoint  # noqa: E402
from grace_ext.exchange.buckets import Tensor  # noqa: E402
from grace_ext.exchange.engine import Exchange  # noqa: E402
from grace_ext.pipeline.spec import parse_stage  # noqa: E402
from grace_ext.transport import InProcessGroup  # noqa: E402

SIZES = {"trunk": 300, "a": 200, "b": 100}


def exchange_of(*names, memory="residual"):
    exchange = Exchange(InProcessGroup(1).transport(0), memory, 1.0)
    tensors = [Tensor(name, SIZES[name], 2, shape=(SIZES[name] // 10, 10)) for name in names]
    spec, communicator = grace_ext.compressor("topk:0.1/rice/raw"), parse_stage("communicator", "allgather")
    exchange.set_buckets([exchange.bucket("bucket", tensors, spec, communicator)])
    return exchange


def step(states, exchange, seed):
    """A step of an exchange with other gradients for each seed."""
    (bucket,) = exchange.buckets
    states.begin(exchange)
    exchange.start(bucket, lambda out: np.copyto(out, gauss(out.size, seed)))
    exchange.finish(bucket, np.empty(bucket.size, np.float32))
    exchange.end_step()


def kept(states) -> dict:
    (layout,) = states.state_dict(0, 1)
    return layout["memories"][0]


def with_heads(memory="residual"):
    states = FollowingStates()
    one, other = exchange_of("trunk", "a", memory=memory), exchange_of("trunk", "b", memory=memory)
    for exchange, names in ((one, ["trunk", "a"]), (other, ["trunk", "b"])):
        states.add(exchange, names, [*SIZES])
    return states, one, other


@pytest.mark.parametrize("memory, fields", [("residual", ["residual"]), ("adam", ["held", "residual", "second_moment"])])
def test_what_is_remembered_of_a_tensor_is_in_one_exchange(memory, fields):
    states, one, other = with_heads(memory)
    step(states, one, 1)
    before = kept(states)
    assert sorted(before) == fields and all(sorted(arrays) == ["a", "trunk"] for arrays in before.values())
    states.begin(other)
    assert kept(states).keys() == before.keys() and (states.step, other.step) == (1, 1)
    for field, arrays in before.items():
        assert np.array_equal(other.state_dict()[field]["trunk"], arrays["trunk"])
        assert all(np.array_equal(kept(states)[field][name], array) for name, array in arrays.items())
    assert not any(arrays for field, arrays in one.state_dict().items() if field != "step")
    step(states, other, 2)
    assert all(np.array_equal(kept(states)[field]["a"], before[field]["a"]) for field in fields)
    states.begin(one)
    assert one.step == 2 and all(np.array_equal(one.state_dict()[field]["a"], before[field]["a"]) for field in fields)


class Loaded:
    """As saved_state.Restore; gives each exchange ones, or fails at one of them."""

    step = 7

    def __init__(self, fails_at=None):
        self.fails_at, self.asked = fails_at, []

    def load_into(self, exchange, names, wanted):
        self.asked.append(wanted)
        if exchange is self.fails_at:
            raise ConfigError("does not fit")
        exchange.load_state_dict({"step": 3, "residual": {name: np.ones(SIZES[name], np.float32) for name in wanted}})

    def unclaimed(self):
        return [checkpoint.pack({"step": 7}, 0, 1, ["c"])]


def test_a_state_is_loaded_once_for_each_tensor():
    states, one, other = with_heads()
    step(states, one, 1)
    restore = Loaded()
    states.load(restore)
    assert restore.asked == [["trunk", "a"], ["b"]] and states.step == one.step == 7
    layout, rest = states.state_dict(0, 1)
    assert layout["order"] == [*SIZES] and layout["step"] == rest["step"] == 7
    assert all((array == 1).all() for array in layout["memories"][0]["residual"].values())
    step(states, one, 2)
    late = exchange_of("b", "a")
    states.add(late, ["b", "a"], [*SIZES])
    assert len(restore.asked) == 2
    states.begin(late)
    assert late.step == 8 and (late.state_dict()["residual"]["b"] == 1).all()
    assert [saved["step"] for saved in states.state_dict(0, 1)] == [8, 8]


def test_what_cannot_be_loaded_leaves_all_as_it_was():
    states, one, other = with_heads()
    step(states, one, 1)
    before = kept(states)
    with pytest.raises(ConfigError, match="does not fit"):
        states.load(Loaded(fails_at=other))
    assert states.step == one.step == 1
    assert all(np.array_equal(kept(states)["residual"][name], array) for name, array in before["residual"].items())


def test_a_state_of_several_layouts_as_they_were_saved_before():
    import horovod.tensorflow as hvd

    from grace_ext.adapters._tensorflow.saved_state import Restore

    hvd.init()
    layouts = [
        checkpoint.pack({"step": at, "residual": {name: gauss(SIZES[name], at) for name in names}}, 0, 1, names)
        for at, names in ((3, ["trunk", "a"]), (5, ["trunk", "b"]))
    ]
    states, one, other = with_heads()
    step(states, other, 1)
    states.load(Restore({"rank": 0, "ranks": 1, "layouts": layouts}, hvd.global_process_set))
    assert states.step == other.step == 5
    found = kept(states)["residual"]
    for name, at in (("trunk", 3), ("a", 3), ("b", 5)):
        assert np.array_equal(found[name], gauss(SIZES[name], at)), name
