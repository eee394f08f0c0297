"""What is checked inside the ranks of one job: 1-bit Adam."""

import copy
import io

import checks_training
import horovod.torch as hvd
import numpy as np
import torch
from harness import batches, flat, horovod, model, same_on_all_ranks
from support.checking import check, check_under_every_launcher, raises
from support.exchanges import arrays_of
from support.reference_kernels.onebit import Reference, Twin, one_bit

from grace_ext import ConfigError
from grace_ext.adapters.onebit_adam import OneBitAdam

LOSSLESS = {"compression": "dense/deflate", "memory": "none"}  # through containers, unlike dense/raw


def onebit(net, *, kind=torch.optim.Adam, warmup_steps=3, lr=1e-3, options=(), **more):
    optimizer = kind(net.parameters(), lr=lr, **dict(options))
    return OneBitAdam(optimizer, net.named_parameters(), warmup_steps=warmup_steps, **more)


def linear(seed=1):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))


def backward(optimizer, net, data, passes=1):
    optimizer.zero_grad()
    for _ in range(passes):
        x, y = next(data)
        torch.nn.functional.cross_entropy(net(x), y).backward()


def run(optimizer, net, steps, data=None, passes=1):
    data = data or batches(steps * passes)
    for _ in range(steps):
        backward(optimizer, net, data, passes)
        optimizer.step()
    return flat(net)


@check
def the_warmup_of_one_bit_adam_is_horovods_adam():
    for kind, options in (
        (torch.optim.Adam, {"weight_decay": 0.1, "amsgrad": True}),
        (torch.optim.AdamW, {"maximize": True}),
    ):
        for warmup, tolerance in (("raw", 1e-6), ("fp16", 2e-3)):
            net, other = linear(), linear()
            optimizer = onebit(net, kind=kind, options={**options, "eps": 1e-5}, warmup_steps=5, warmup=warmup)
            assert isinstance(optimizer, kind)
            theirs = horovod()(kind(other.parameters(), lr=1e-3, eps=1e-5, **options), other.named_parameters())
            ours, expected = run(optimizer, net, 5), run(theirs, other, 5)
            assert torch.allclose(ours, expected, rtol=0, atol=tolerance), (ours - expected).abs().max()
            same_on_all_ranks(ours)
            ratio = optimizer.compression_stats()["compressed"]["ratio"]
            assert optimizer.is_frozen and ratio == (2 if warmup == "fp16" else 1)


@check_under_every_launcher
def one_bit_adam_is_algorithm_1_step_by_step():
    for floor in (0.0, 0.3):
        net = torch.nn.Linear(60, 40)
        hvd.broadcast_parameters(net.state_dict(), root_rank=0)
        optimizer = onebit(net, lr=0.01, variance_floor=floor)
        twins = {name: Twin(p.detach().numpy().ravel(), 0.01, floor=floor) for name, p in net.named_parameters()}
        generator = torch.Generator().manual_seed(hvd.rank())
        for step in range(9):
            optimizer.zero_grad()
            x = torch.randn(16, 60, generator=generator)
            (net(x) - x[:, :40].sin()).square().sum().backward()
            gradients = {
                name: hvd.allgather(p.grad.clone().flatten()[None], name=f"gradient.{name}").numpy()
                for name, p in net.named_parameters()
            }
            optimizer.step()
            for name, p in net.named_parameters():
                twin = twins[name]
                if step < 3:
                    twin.warm_up(gradients[name])
                    if step == 2:
                        twin.freeze()
                else:  # the bias is sent as it is
                    twin.compressed(gradients[name], one_bit if name == "weight" else lambda values: values)
                assert np.allclose(p.detach().numpy().ravel(), twin.p, rtol=0, atol=1e-5), (step, name)
                momentum = optimizer.state[p]["exp_avg"].numpy().ravel()
                assert np.allclose(momentum, twin.m, rtol=1e-4, atol=1e-4 * np.abs(twin.m).max()), (step, name)
        residual = optimizer._grace.exchange.state_dict()["residual"]["weight"]
        expected = twins["weight"].errors[hvd.rank()]
        assert np.allclose(residual, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
        same_on_all_ranks(flat(net))


@check
def bytes_fall_after_the_warmup_and_ranks_stay_identical():
    net = model()
    optimizer = onebit(net, warmup_steps=2)
    data = batches(20)
    ratios = []
    for _ in range(20):
        backward(optimizer, net, data)
        optimizer.step()
        ratios.append(optimizer.compression_stats()["last_step"]["compressed"]["ratio"])
        same_on_all_ranks(flat(net))
        for p in net.parameters():
            same_on_all_ranks(optimizer.state[p]["exp_avg"])
    assert ratios[:2] == [1, 1] and all(28 < ratio < 32 for ratio in ratios[2:]), ratios
    assert torch.isfinite(flat(net)).all()


def groups_of(net):
    weights = [p for p in net.parameters() if p.dim() > 1]
    rest = [p for p in net.parameters() if p.dim() < 2]
    return [{"params": weights, "betas": (0.8, 0.99)}, {"params": rest, "lr": 3e-3, "weight_decay": 0.02, "eps": 1e-6}]


@check
def without_loss_it_is_adam_with_a_frozen_variance():
    adam, adamw = torch.optim.Adam, torch.optim.AdamW
    for kind, options, wrapping, passes in (
        (adam, {}, LOSSLESS, 1),
        (adam, {"weight_decay": 0.1}, {"compression": "dense/raw"}, 1),
        (adamw, {"weight_decay": 0.5}, LOSSLESS, 1),
        (adam, {"amsgrad": True, "maximize": True, "weight_decay": 0.1}, LOSSLESS, 1),
        (adam, {"foreach": True}, {**LOSSLESS, "backward_passes_per_step": 2}, 2),
        (adam, {"weight_decay": 0.1}, {**LOSSLESS, "op": hvd.Sum}, 1),
        (adam, {"weight_decay": 0.1}, {**LOSSLESS, "gradient_predivide_factor": 2.0}, 1),
    ):
        net, other = linear(), linear()
        ours = OneBitAdam(
            kind(groups_of(net), lr=1e-3, **options), net.named_parameters(), warmup_steps=3, variance_floor=0.0, **wrapping
        )
        plain = kind(groups_of(other), lr=1e-3, **options)
        theirs = Reference(plain, 3, op=wrapping.get("op", hvd.Average))
        schedules = [torch.optim.lr_scheduler.StepLR(one, 2, 0.5) for one in (ours, plain)]
        data = batches(8 * passes), batches(8 * passes)
        for _ in range(8):
            for optimizer, one, source, schedule in zip((ours, theirs), (net, other), data, schedules, strict=True):
                backward(optimizer, one, source, passes)
                optimizer.step()
                schedule.optimizer._opt_called = True
                schedule.step()
        # Where g passes through zero in the warm-up, its rounding is a large part of the step: single elements differ.
        difference = (flat(net) - flat(other)).abs()
        assert difference.mean() < 1e-6 and difference.max() < 1e-4, (kind, options, wrapping, difference.max())
        assert (flat(net) - flat(linear())).abs().max() > 1e-3
        same_on_all_ranks(flat(net))


@check
def one_rank_alone_freezes_its_variance_too():
    alone = checks_training.PROCESS_SETS[hvd.rank() % 2]
    if alone.size() > 1:
        return  # of four ranks each set has two
    net, other = linear(), linear()
    ours, theirs = onebit(net, process_set=alone, variance_floor=0), torch.optim.Adam(other.parameters(), lr=1e-3)
    assert ours.compression_stats() == {"steps": 0}
    data = batches(7), batches(7)
    for step in range(7):
        kept = {p: state["exp_avg_sq"].clone() for p, state in theirs.state.items()}
        for optimizer, one, source in zip((ours, theirs), (net, other), data, strict=True):
            backward(optimizer, one, source)
        if step < 3:
            theirs.step()
        else:
            with torch.no_grad():
                for p, variance in kept.items():
                    m = theirs.state[p]["exp_avg"].lerp_(p.grad, 0.1)
                    p -= 1e-3 / (1 - 0.9 ** (step + 1)) * m / ((variance / (1 - 0.999**3)).sqrt() + 1e-8)
        ours.step()
    difference = (flat(net) - flat(other)).abs()
    assert difference.mean() < 1e-6, (difference.mean(), difference.max())


@check
def a_non_finite_gradient_leaves_one_bit_adam_as_it_was():
    for warmup_steps in (9, 2):
        net = model()
        optimizer = onebit(net, warmup_steps=warmup_steps)
        run(optimizer, net, 4)

        def all_there_is(optimizer=optimizer, net=net):
            state = {
                f"{i}:{field}": np.array(value)
                for i, p in enumerate(net.parameters())
                for field, value in optimizer.state[p].items()
            }
            return {
                **state,
                **arrays_of(optimizer._grace.exchange),
                "left": optimizer.param_groups[0]["warmup_left"],
                "p": flat(net).numpy(),
            }

        before = all_there_is()
        optimizer.zero_grad()
        x, y = next(batches(1))
        loss = torch.nn.functional.cross_entropy(net(x), y)
        if hvd.rank() == hvd.size() - 1:
            loss = loss + (net[5].weight * 0).sum() * float("inf")
        loss.backward()
        optimizer.synchronize()
        assert not torch.isfinite(net[5].weight.grad).all(), "the non-finite gradient did not reach this rank"
        after = all_there_is()  # as GradScaler does, the step is left out
        optimizer.zero_grad()
        assert before.keys() == after.keys() and all(np.array_equal(before[key], after[key]) for key in before)
        run(optimizer, net, 1)
        assert torch.isfinite(flat(net)).all()
        same_on_all_ranks(flat(net))


@check
def what_is_clipped_after_the_warmup_is_the_momentum():
    net = model()
    optimizer = onebit(net, warmup_steps=2)
    data = batches(5)
    for _ in range(5):
        backward(optimizer, net, data)
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01)
        with optimizer.skip_synchronize():
            optimizer.step()
    momentum = torch.cat([optimizer.state[p]["exp_avg"].flatten() for p in net.parameters()])
    assert torch.isclose(momentum.norm(), torch.tensor(0.01), rtol=1e-3), momentum.norm()
    same_on_all_ranks(flat(net))


@check
def elements_without_a_variance_are_held_in_check():
    net = linear()[1]
    optimizer = onebit(net, lr=1e-3)
    start = net.weight.detach().clone()
    for step, (x, y) in enumerate(batches(8)):
        optimizer.zero_grad()
        x = x.flatten(1)
        if step < 5:
            x[:, 100:300] = 0  # not seen in the warm-up
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
        if step == 2:
            variance = optimizer.state[net.weight]["exp_avg_sq"]
            assert (variance[:, 100:300] == variance.min()).all() and 0.04 < variance.min() / variance.mean() < 0.15
    moved = (net.weight.detach() - start)[:, 100:300].abs().max()
    assert 0 < moved < 0.02, moved


@check
def training_goes_on_bit_identically_from_a_checkpoint():
    for saved_at in (2, 5):  # in the warm-up and after it
        net = linear()
        optimizer = onebit(net, memory="residual:decay=0.9")
        data = batches(9)
        run(optimizer, net, saved_at, data)
        optimizer.consolidate_state_dict()
        own, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(net.state_dict())
        if hvd.rank() == 0:
            assert saved_at == 2 or len(own["grace_ext"]["memories"]) == hvd.size()
        file = io.BytesIO()
        torch.save(own, file)
        file = hvd.broadcast_object(file.getvalue(), root_rank=0, name="checkpoint")
        expected = run(optimizer, net, 9 - saved_at, data)
        again = linear(seed=2)
        other = onebit(again, memory="residual:decay=0.9")
        run(other, again, 1)  # its buckets are those of the warm-up
        again.load_state_dict(weights)
        other.load_state_dict(torch.load(io.BytesIO(file), weights_only=True))
        assert other.is_frozen == (saved_at == 5)
        data = batches(9)
        for _ in range(saved_at):
            next(data)
        assert torch.equal(run(other, again, 9 - saved_at, data), expected), saved_at
        ours, theirs = arrays_of(other._grace.exchange), arrays_of(optimizer._grace.exchange)
        assert ours.keys() == theirs.keys() and all(np.array_equal(ours[key], theirs[key]) for key in ours)
        assert "residual:1.weight" in ours


@check
def the_momentum_is_kept_in_unscaled_units():
    results = []
    for scale in (1.0, 1024.0):
        net = linear()
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
        optimizer = onebit(net, grad_scaler=scaler, warmup_steps=3)
        for step, (x, y) in enumerate(batches(10)):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(net(x), y)
            if step in (1, 6) and hvd.rank() == 0:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            before = flat(net)
            scaler.step(optimizer)
            scaler.update()
            assert torch.equal(before, flat(net)) == (step in (1, 6)), "all ranks skip the step, or none"
        assert optimizer.state[net[1].weight]["variance_step"] == 3 and optimizer.state[net[1].weight]["step"] == 8
        same_on_all_ranks(flat(net))
        results.append(flat(net))
    assert torch.equal(*results), "scales that are powers of two change no bit"


@check
def a_checkpoint_of_plain_adam_counts_for_the_warmup():
    net = model()
    plain = torch.optim.Adam(net.parameters(), lr=1e-3)
    for x, y in batches(4):
        plain.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        for p in net.parameters():
            hvd.allreduce_(p.grad, name="plain")
        plain.step()
    for left in (3, 0):
        again = model()
        again.load_state_dict(net.state_dict())
        optimizer = onebit(again, warmup_steps=4 + left)
        optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
        assert optimizer.param_groups[0]["warmup_left"] == left
        run(optimizer, again, 2)
        assert (optimizer.compression_stats()["last_step"]["compressed"]["ratio"] > 28) == (left == 0)
        same_on_all_ranks(flat(again))
        back = torch.optim.Adam(again.parameters(), lr=1e-3)
        state = {key: value for key, value in optimizer.state_dict().items() if key in ("state", "param_groups")}
        back.load_state_dict(state)
        backward(back, again, batches(1))
        back.step()
        assert back.state[again[5].weight]["step"] == 7


@check
def a_stage_is_broadcast_with_the_optimizers_state():
    net = model()
    optimizer = onebit(net, warmup_steps=2)
    run(optimizer, net, 4)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    again = model()
    again.load_state_dict(net.state_dict())
    other = onebit(again, warmup_steps=2)
    if hvd.rank() == 0:
        other.load_state_dict(torch.load(file, weights_only=True))
    hvd.broadcast_optimizer_state(other, root_rank=0)
    assert other.is_frozen and other.state[again[5].weight]["variance_step"] == 2
    run(other, again, 2)
    assert other.compression_stats()["last_step"]["compressed"]["ratio"] > 28
    same_on_all_ranks(flat(again))
    for p in again.parameters():
        same_on_all_ranks(other.state[p]["exp_avg"])


@check
def one_bit_adam_refuses_what_it_cannot_do():
    for kind, options, wrapping, text in (
        (torch.optim.SGD, {}, {}, "torch.optim.Adam and AdamW, not SGD"),
        (torch.optim.Adam, {"fused": True}, {}, "fused=True"),
        (torch.optim.Adam, {"capturable": True}, {}, "capturable=True"),
        (torch.optim.Adam, {}, {"warmup_steps": 0}, "warmup_steps=0"),
        (torch.optim.Adam, {}, {"warmup": "half"}, "raw, fp16"),
        (torch.optim.Adam, {}, {"compression": "dense/onebt"}, "onebit"),
        (torch.optim.Adam, {}, {"communicator": "allreduce"}, "sums values as they are"),
        (torch.optim.Adam, {}, {"memory": "dgc"}, "momentum"),
        (torch.optim.Adam, {}, {"compression": hvd.Compression.fp16}, "is a spec"),
    ):
        with raises(ConfigError, text):
            onebit(model(), kind=kind, options=options, **wrapping)
    net = model()
    optimizer = onebit(net, warmup_steps=1)
    backward(optimizer, net, batches(1))
    optimizer.step()
    net[0].bias.requires_grad_(False)
    run(optimizer, net, 1)
    net[0].bias.requires_grad_(True)
    with raises(ConfigError, "0.bias came in after the warm-up"):
        run(optimizer, net, 1)
    with raises(ConfigError, "after the warm-up"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
    with raises(ConfigError, "join"):
        onebit(linear()).join()
    embedding = torch.nn.Embedding(50, 40, sparse=True)
    optimizer = onebit(embedding)
    embedding(torch.tensor([1])).sum().backward()
    with raises(ConfigError, "sparse_as_dense"):
        optimizer.step()
