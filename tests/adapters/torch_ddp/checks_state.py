"""What is checked inside the ranks of one job: saving and loading."""

import io
import logging

import numpy as np
import torch
import torch.distributed as dist
from harness import EACH, batches, flat, loss_of, module, same_on_all_ranks, sgd, train, wrap
from support.checking import check, check_under_every_launcher, raises

from grace_ext import ConfigError

TOPK = "topk:0.01/rice/qsgd:7"


def stored(saved):
    """As it comes back from a file."""
    file = io.BytesIO()
    torch.save(saved, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def steps(net, model, optimizer, data):
    for x, y in data:
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()


def half(spec, save=lambda state: state.state_dict(), **options):
    """Train three steps; returns what is saved then."""
    net = module()
    model, state = wrap(net, spec, **options)
    optimizer = sgd(net)
    steps(net, model, optimizer, batches(3))
    return stored({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "state": save(state)})


def resumed(saved, spec, after=3, **options):
    """Train on, in a new model; returns its flat parameters and the state."""
    net = module(seed=9)
    model, state = wrap(net, spec, **options)
    optimizer = sgd(net)
    net.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    state.load_state_dict(saved["state"])
    steps(net, model, optimizer, batches(after, start=3))
    return flat(net), state


def consolidated(state):
    """The memories of all ranks on each, as from one file."""
    state.consolidate_state_dict()
    box = [state.state_dict()]
    dist.broadcast_object_list(box)
    assert len(box[0]["memories"]) == dist.get_world_size()
    return box[0]


def unchanged_memory(saved, spec=TOPK, **options):
    """What this rank's memory is after a state was loaded: after a step with a NaN, which changes no memory."""
    net = module()
    model, state = wrap(net, spec, **options)
    state.load_state_dict(saved["state"])
    x, y = next(batches(1))
    (loss_of(model, x, y) * float("nan")).backward()
    return state._buckets.exchange.state_dict()


class Log(logging.Handler):
    def __enter__(self):
        self.lines = []
        logging.getLogger("grace_ext").addHandler(self)
        logging.getLogger("grace_ext").setLevel(logging.INFO)
        return self

    def emit(self, record):
        self.lines.append(record.getMessage())

    def __exit__(self, *_):
        logging.getLogger("grace_ext").removeHandler(self)
        logging.getLogger("grace_ext").setLevel(logging.NOTSET)


@check_under_every_launcher
def resuming_is_bit_identical_to_going_on():
    for spec, memory in (
        (TOPK, "residual"),
        (EACH, "ef21"),
        (EACH, "dgc:momentum=0.9:clip=1.0"),
        (EACH, "momentum:decay=0.9"),
        ("powersgd:2", "residual"),
        (TOPK, {"0.*": "none", "*": "residual:decay=0.9"}),
    ):
        expected, _ = train(spec, steps=6, memory=memory)
        for save in (lambda state: state.state_dict(), consolidated):
            weights, state = resumed(half(spec, save, memory=memory), spec, memory=memory)
            assert torch.equal(weights, expected), (spec, memory)
            assert state.state_dict()["step"] == 6
    # A memory that is left behind makes a difference.
    saved = half(TOPK)
    saved["state"]["memories"][dist.get_rank()] = {}
    assert not torch.equal(resumed(saved, TOPK)[0], train(TOPK, steps=6)[0])


@check
def consolidated_memories_go_to_the_rank_that_is_named():
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    net = module()
    model, state = wrap(net, TOPK)
    steps(net, model, sgd(net), batches(3))
    own = state.state_dict()["memories"][rank]["residual"]
    state.consolidate_state_dict(to=last)
    memories = state.state_dict()["memories"]
    assert sorted(memories) == (list(range(last + 1)) if rank == last else [rank])
    box = [memories]
    dist.broadcast_object_list(box, src=last)
    assert all(np.array_equal(box[0][rank]["residual"][name], residual) for name, residual in own.items())
    with raises(ConfigError, f"allowed: 0 to {last}"):
        state.consolidate_state_dict(to=last + 1)


@check
def a_state_can_be_loaded_in_the_middle_and_is_kept_until_it_is_used():
    net = module()
    model, state = wrap(net, TOPK)
    optimizer = sgd(net)
    steps(net, model, optimizer, batches(3))
    saved = stored({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "state": state.state_dict()})
    steps(net, model, optimizer, batches(4, start=20))
    net.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    state.load_state_dict(saved["state"])
    again = state.state_dict()
    rank = dist.get_rank()
    assert again["step"] == 3
    for name, residual in saved["state"]["memories"][rank]["residual"].items():
        assert torch.equal(again["memories"][rank]["residual"][name], residual)
    steps(net, model, optimizer, batches(3, start=3))
    assert torch.equal(flat(net), train(TOPK, steps=6)[0])


@check
def the_memory_of_another_rank_is_not_taken():
    box = [half(TOPK)]
    dist.broadcast_object_list(box)  # as if only rank 0 had saved
    with Log() as log:
        after = unchanged_memory(box[0])
        if dist.get_rank() == 0:
            assert any(f"1 of {dist.get_world_size()} ranks loaded their memory" in line for line in log.lines), log.lines
            own = box[0]["state"]["memories"][0]["residual"]
            assert all(np.array_equal(after["residual"][name], own[name].numpy()) for name in own)
        else:
            assert not any(residual.any() for residual in after.get("residual", {}).values())
    assert after["step"] == 4
    box = [half(EACH, memory="ef21")]
    dist.broadcast_object_list(box)
    after = unchanged_memory(box[0], EACH, memory="ef21")  # of which one rank's alone is worth nothing
    assert not any(array.any() for field in ("estimate", "aggregate") for array in after.get(field, {}).values())
    same_on_all_ranks(resumed(box[0], EACH, memory="ef21")[0])


@check
def only_rank_0_may_load_before_the_first_step():
    saved = half(EACH)
    net = module()
    model, state = wrap(net, EACH)
    if dist.get_rank() == 0:
        state.load_state_dict(saved["state"])
    optimizer = sgd(net)
    steps(net, model, optimizer, batches(3))
    assert state.state_dict()["step"] == 6
    assert state.state_dict()["layout"] == saved["state"]["layout"]
    same_on_all_ranks(flat(net))


@check
def another_number_of_ranks():
    saved = half(TOPK, consolidated)
    ranks, memories = dist.get_world_size(), saved["state"]["memories"]
    memories[ranks] = {field: {name: array * 3 for name, array in arrays.items()} for field, arrays in memories[0].items()}
    saved["state"]["ranks"] = ranks + 1
    with Log() as log:
        after = unchanged_memory(saved)
        if dist.get_rank() == 0:
            assert any("memories were redistributed" in line for line in log.lines), log.lines
    for name in memories[0]["residual"]:
        own = torch.from_numpy(after["residual"][name])
        same_on_all_ranks(own)
        expected = sum(memory["residual"][name].double() for memory in memories.values())
        assert torch.allclose(own.double() * ranks, expected, rtol=1e-5, atol=1e-9), name
    after = unchanged_memory(saved, on_resize="reset")
    assert not any(array.any() for array in after.get("residual", {}).values())
    del memories[0]
    with raises(ConfigError, "needs the memories of all"):
        unchanged_memory(saved, on_resize="redistribute")
    with raises(ConfigError, "allowed: None, 'reset', 'redistribute'"):
        wrap(module(), TOPK, on_resize="resett")
    with raises(ConfigError, "version 7"):
        wrap(module(), TOPK)[1].load_state_dict({"version": 7})
