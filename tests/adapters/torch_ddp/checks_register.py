"""What is checked inside the ranks of one job: states that are made before the model, and hooks that nobody calls."""

import copy

import torch
import torch.distributed as dist
from harness import EACH, WIDTH, batches, flat, loss_of, module, same_on_all_ranks, sgd, wrap
from support.checking import check, check_under_every_launcher, raises
from torch.nn.parallel import DistributedDataParallel

from grace_ext import ConfigError
from grace_ext.adapters.torch_ddp import CompressionState, comm_hook

NEVER_CALLED = "the hook of a CompressionState was never called"


def adamw(net):
    return torch.optim.AdamW(net.parameters(), lr=1e-3)


def run(model, optimizer, steps=4, start=0, in_closure=False, clip=None):
    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], clip)
        return loss

    for x, y in batches(steps, start=start):  # noqa: B007  (the function above reads both)
        if in_closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    return flat(model.module)


def train(how, make=adamw, **steps):
    """how(net, optimizer, model) registers a state, and returns it. Returns the flat parameters and the state."""
    net = module()
    model, optimizer = DistributedDataParallel(net), make(net)
    state = how(net, optimizer, model)
    weights = run(model, optimizer, **steps)
    same_on_all_ranks(weights)
    return weights, state


def at_once(net, optimizer, model):
    state = CompressionState(net.named_parameters(), optimizer=optimizer)
    model.register_comm_hook(state, comm_hook)
    return state


def late(net, optimizer, model):
    """The optimizer becomes known when the first backward() or, with a closure, the first step begins."""
    return register(CompressionState(), model, lambda: optimizer)


def memories(state):
    return {bucket.memory.name for bucket in state._buckets.exchange.buckets if bucket.compressor.has_density}


@check_under_every_launcher
def a_state_may_be_made_before_the_model():
    """What registration fills in is what CompressionState would have been given, and so are the bits."""

    def registered(optimizer):
        early = CompressionState()
        return lambda net, made, model: early.register(model, optimizer(made)) or early

    for make, memory in ((adamw, "adam"), (sgd, "residual")):
        expected, state = train(at_once, make)
        assert memories(state) == {memory}
        for optimizer in (lambda made: made, lambda made: [made], lambda made: lambda: made):
            weights, state = train(registered(optimizer), make)
            assert torch.equal(weights, expected), (make, optimizer)
            assert memories(state) == {memory}
            assert "2.weight" in state.state_dict()["layout"][0] + state.state_dict()["layout"][-1]


@check
def a_state_that_nobody_tells_of_the_model_numbers_its_parameters():
    early = CompressionState(compression=EACH)
    assert early.state_dict()["step"] == 0
    with raises(ConfigError, "before the first backward()"):
        early.compression_stats()
    weights, state = train(lambda net, _, model: model.register_comm_hook(early, comm_hook) or early)
    assert sorted(name for part in state.state_dict()["layout"] for name in part) == [f"parameter{i}" for i in range(6)]
    assert torch.equal(weights, train(lambda net, _, model: register(CompressionState(compression=EACH), model))[0])


def register(state, *given):
    state.register(*given)
    return state


@check
def a_state_that_was_loaded_before_the_model_goes_on():
    expected, _ = train(at_once, steps=6)
    net = module()
    model, optimizer = DistributedDataParallel(net), adamw(net)
    state = at_once(net, optimizer, model)
    run(model, optimizer, 3)
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict(), state.state_dict()))
    early = CompressionState()
    early.load_state_dict(saved[2])
    early.consolidate_state_dict()
    assert early.state_dict()["step"] == 3
    net = module(seed=9)
    model, optimizer = DistributedDataParallel(net), adamw(net)
    net.load_state_dict(saved[0])
    early.register(model, lambda: optimizer)
    optimizer.load_state_dict(saved[1])
    assert torch.equal(run(model, optimizer, 3, start=3), expected)
    with raises(ConfigError, "version 7"):
        CompressionState().load_state_dict({"version": 7})


@check
def what_cannot_be_registered_is_refused():
    net = module()
    model, state = wrap(net, EACH)
    with raises(ConfigError, "register takes a DistributedDataParallel, not Sequential"):
        CompressionState().register(net)
    with raises(ConfigError, "the model takes no hook"):
        CompressionState().register(model)
    state = CompressionState()
    state.register(DistributedDataParallel(module()))
    with raises(ConfigError, "one CompressionState for each model"):
        state.register(DistributedDataParallel(module()))
    with raises(ConfigError, "give the optimizer to CompressionState"):
        CompressionState(net.named_parameters()).register(DistributedDataParallel(net), sgd(net))
    ranks = [list(range(dist.get_world_size() - 1)), [dist.get_world_size() - 1]]
    groups = [dist.new_group(part) for part in ranks]
    group = groups[dist.get_rank() in ranks[1]]
    with raises(ConfigError, "pass the same process_group to both"):
        CompressionState().register(DistributedDataParallel(module(), process_group=group))
    for options, text in (({"compression": "topk:0.01/rise"}, "rice"), ({"communicator": "allgater"}, "known: allgather")):
        with raises(ConfigError, text):
            CompressionState(**options)


@check_under_every_launcher
def a_hook_that_is_never_called_is_noticed():
    """In the optimizer's first step, whatever the state knows of the model."""

    def forgotten(net, optimizer, model):
        return CompressionState()

    def named(net, optimizer, model):
        return CompressionState(net.named_parameters(), EACH)

    def with_optimizer(net, optimizer, model):
        return CompressionState(net.named_parameters(), optimizer=optimizer)

    for how in (forgotten, named, with_optimizer):
        for in_closure in (False, True):
            with raises(ConfigError, NEVER_CALLED):
                train(how, in_closure=in_closure)
    with raises(ConfigError, NEVER_CALLED):  # on DDP, but without a synchronized backward()
        net = module()
        model, _ = wrap(net, EACH)
        with model.no_sync():
            run(model, sgd(net))


@check
def what_a_hook_need_not_be_called_for():
    """A step without gradients, or with zeros, and the steps of another model."""
    net, other = module(1), module(2)
    state = CompressionState(net.named_parameters(), EACH)
    optimizer = adamw(net)
    optimizer.step()
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    run(DistributedDataParallel(other), adamw(other), 1)
    model = DistributedDataParallel(net)
    state.register(model)
    run(model, optimizer)
    same_on_all_ranks(flat(net))
    later = CompressionState(compression=EACH)
    train(at_once)  # while a state waits for a model that is still to come
    train(lambda net, optimizer, model: register(CompressionState(), model))
    train(lambda net, optimizer, model: register(later, model))


@check
def a_closure_leaves_moments_to_the_memory():
    """Gradients that come inside the step give what those that come before it give; clipping there sees all of them."""
    for clip in (None, 0.05):
        expected, state = train(at_once, clip=clip)
        weights, again = train(at_once, in_closure=True, clip=clip)
        assert memories(state) == memories(again) == {"adam"}
        assert torch.equal(weights, expected)
        weights, _ = train(late, in_closure=True, clip=clip)
        assert torch.equal(weights, expected)
    assert not torch.equal(expected, train(at_once)[0])  # the gradients were clipped


@check
def an_error_in_a_closure_leaves_the_optimizer_as_it_was():
    net = module()
    model, optimizer = DistributedDataParallel(net), adamw(net)
    at_once(net, optimizer, model)
    run(model, optimizer, 2)
    groups = [list(group["params"]) for group in optimizer.param_groups]
    with raises(ZeroDivisionError, ""):
        optimizer.step(lambda: 1 / 0)
    assert [list(group["params"]) for group in optimizer.param_groups] == groups
    loss_of(model, torch.ones(1, WIDTH), torch.zeros(1, dtype=torch.long)).backward()
    optimizer.step()
    same_on_all_ranks(flat(net))
