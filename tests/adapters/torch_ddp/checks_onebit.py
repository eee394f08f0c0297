"""What is checked inside the ranks of one job: the memories of 1-bit Adam and 0/1 Adam."""

import copy
from contextlib import nullcontext

import torch
from harness import batches, close, flat, loss_of, module, same_on_all_ranks, wrap
from support.checking import check, raises

from grace_ext import ConfigError

ALL = {"rules": {"*": "dense/onebit"}}


def start(memory, seed=1, kind=torch.optim.AdamW, **options):
    """DDP, its module, the optimizer and the state of the hook, or None for plain DDP."""
    net = module(seed)
    optimizer = kind(net.parameters(), lr=1e-3, eps=1e-5, weight_decay=0.1, **options)
    model, state = wrap(net, "dense/onebit" if memory else None, memory=memory, optimizer=optimizer, **ALL)
    return model, net, optimizer, state


def run(model, net, optimizer, steps, begin=0, clip=0.1):
    for x, y in batches(steps, start=begin):
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
    return flat(net)


@check
def exact_steps_are_those_of_plain_ddp_with_adam():
    """DDP rebuilds its buckets after the first of them."""
    for kind in (torch.optim.Adam, torch.optim.AdamW):
        expected = run(*start(None, kind=kind)[:3], 5)
        for memory in ("onebit_adam:5", "zeroone_adam:4"):
            *parts, state = start(memory, kind=kind)
            ours = run(*parts, 5)
            close(ours, expected)
            same_on_all_ranks(ours)
            assert len(state._buckets.bucket_names) == 2, "DDP's buckets were not rebuilt"
            assert state.compression_stats()["last_step"]["compressed"]["ratio"] == 1
            assert set(state.compression_stats()["ways"].values()) == {"allgather"}, "the next step is a compressed one"


@check
def bytes_fall_after_the_exact_steps_and_ranks_stay_identical():
    for memory, exact in (("onebit_adam:3", {0, 1, 2}), ("zeroone_adam:1", {0, 1, 3, 7})):
        *parts, state = start(memory)
        for step in range(10):
            before = flat(parts[1])
            same_on_all_ranks(run(*parts, 1, step))
            ratio = state.compression_stats()["last_step"]["compressed"]["ratio"]
            assert ratio == 1 if step in exact else 25 < ratio < 32, (memory, step, ratio)
            # After so few exact steps the variances are those of noise, and updates larger than the learning rate.
            assert 1e-5 < (flat(parts[1]) - before).square().mean().sqrt() < 5e-2, (memory, step)


@check
def a_checkpoint_goes_on_bit_by_bit():
    for memory in ("onebit_adam:3", "zeroone_adam:1"):
        for stop in (2, 5):
            model, net, optimizer, state = start(memory)
            run(model, net, optimizer, stop)
            saved = copy.deepcopy((net.state_dict(), optimizer.state_dict(), state.state_dict()))
            expected = run(model, net, optimizer, 9 - stop, stop)
            model, net, optimizer, state = start(memory, seed=9)
            for one, kept in zip((net, optimizer, state), saved, strict=True):
                one.load_state_dict(kept)
            assert torch.equal(run(model, net, optimizer, 9 - stop, stop), expected), (memory, stop)


class Branches(torch.nn.Module):
    """With a layer that is not used in some steps, on no rank."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = torch.nn.Linear(100, 10), torch.nn.Linear(100, 10)

    def forward(self, x, both):
        return self.first(x) + self.second(x) if both else self.first(x)


@check
def tensors_without_a_gradient_make_no_step():
    results = []
    for memory in (None, "onebit_adam:6", "onebit_adam:1"):
        net = Branches()
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, eps=1e-5)
        ddp = {"find_unused_parameters": True}
        spec = "dense/onebit" if memory else None
        model, _ = wrap(net, spec, ddp, memory=memory, optimizer=optimizer, **ALL)
        for step, (x, y) in enumerate(batches(6)):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x, step % 3 == 0), y).backward()
            before = net.second.weight.detach().clone()
            assert (net.second.weight.grad is None) == (step % 3 != 0)
            optimizer.step()
            assert torch.equal(before, net.second.weight) == (step % 3 != 0), (memory, step)
        results.append(flat(net))
        same_on_all_ranks(results[-1])
    close(results[1], results[0])


@check
def ranks_have_to_make_the_same_number_of_steps():
    model, net, optimizer, _ = start("onebit_adam:1")
    run(model, net, optimizer, 2)
    for number, (x, y) in enumerate(batches(2)):
        optimizer.zero_grad()
        with raises(RuntimeError, "accumulate gradients in no_sync()") if number else nullcontext():
            loss_of(model, x, y).backward()


@check
def memories_that_make_the_step_need_the_optimizer():
    with raises(ConfigError, "pass the optimizer"):
        wrap(module(), "dense/onebit", memory="onebit_adam:5")
    model, net, optimizer, _ = start("onebit_adam:5", betas=(0.9, 0.99))
    with raises(ConfigError, "beta2=0.999, the optimizer 0.9 and 0.99: give both the same"):
        run(model, net, optimizer, 1)
