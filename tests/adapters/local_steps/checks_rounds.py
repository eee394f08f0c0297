"""What is checked inside the ranks of one job: rounds of local steps, and what a user may wrap."""

import copy
import datetime
import json
import os
import tempfile
from pathlib import Path
from unittest import mock

import torch
from harness import OVER_TORCH, adamw, batch, flat, gather, net, rank, ranks, same_on_all_ranks, train, train_step
from support.checking import check, check_under_every_launcher, raises

from grace_ext import ConfigError, ExchangeError
from grace_ext.adapters.local_steps import LocalSteps
from grace_ext.means import WeightedMean
from grace_ext.rounds import AutoSteps


@check_under_every_launcher
def parameters_and_buffers_have_the_same_bits_after_each_round():
    model = net(seed=rank())  # LocalSteps gives all ranks those of rank 0
    optimizer = adamw(model)
    local = LocalSteps(model, optimizer, steps=3, rules={"inner.*.weight": "topk:0.05/rice_adaptive/lloyd:0.25"})
    same_on_all_ranks(flat(model))
    for number in range(4):
        assert train(model, optimizer, local, 2, first=3 * number) == 0
        rows = gather(flat(model))
        assert not torch.equal(rows[0], rows[1])
        assert train(model, optimizer, local, 1, first=3 * number + 2) == 1
        same_on_all_ranks(flat(model))
        same_on_all_ranks(torch.cat([model.inner[1].running_mean, model.inner[1].running_var]))
    stats = local.compression_stats()
    assert (stats["local_steps"], stats["rounds"], stats["steps"], stats["lost_rounds"]) == (12, 4, 4, 0)
    assert stats["compressed"]["ratio"] > 10 and stats["bytes_out"] > 0 and stats["other_bytes_out"] > 4 * 4 * 128


@check_under_every_launcher
def a_rank_that_is_not_finite_takes_over_what_the_others_share():
    model = net()
    optimizer = adamw(model)
    local = LocalSteps(model, optimizer, steps=2, outer="nesterov", compression="topk:0.1/rice/qsgd:7")
    train(model, optimizer, local, 2)
    train_step(model, optimizer, 2)
    local.step()
    train_step(model, optimizer, 3)
    if rank() == ranks() - 1:
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(float("nan"))
            model.inner[1].running_mean.fill_(float("inf"))
            for state in optimizer.state.values():
                state["exp_avg"].fill_(float("nan"))
    local.step()
    same_on_all_ranks(flat(model))
    assert torch.isfinite(flat(model)).all() and torch.isfinite(model.inner[1].running_mean).all()
    train(model, optimizer, local, 4, first=4)
    same_on_all_ranks(flat(model))
    assert torch.isfinite(flat(model)).all()
    lost = gather(torch.tensor([local.compression_stats()["lost_rounds"]])).flatten().tolist()
    assert lost == [0] * (ranks() - 1) + [1], lost


@check
def over_gloo_the_bits_are_the_same():
    found = []
    for backend in (None, "gloo"):  # over torch.distributed, None is the backend of its group, Gloo
        model = net()
        optimizer = adamw(model)
        local = LocalSteps(model, optimizer, steps=4, fragments=2, delay=1, backend=backend)
        train(model, optimizer, local, 10)
        local.synchronize()
        same_on_all_ranks(flat(model))
        found.append(flat(model))
    assert torch.equal(*found)


@check
def diloco_is_what_torchs_sgd_makes_of_the_mean_of_the_moves():
    model, reference = net(), net()
    optimizer, theirs = (torch.optim.SGD(one.parameters(), lr=0.05, momentum=0.9) for one in (model, reference))
    local = LocalSteps(model, optimizer, "diloco", steps=4, rules={"*": "dense/raw"}, buffers="local")
    shared = [p.detach().clone().requires_grad_() for p in reference.parameters()]
    outer = torch.optim.SGD(shared, 0.7, momentum=0.9, nesterov=True)
    for step in range(12):
        train_step(model, optimizer, step)
        local.step()
        train_step(reference, theirs, step)
        if step % 4 == 3:
            for ours, p in zip(shared, reference.parameters(), strict=True):
                ours.grad = gather(ours.detach() - p.detach()).mean(0).view(p.shape)
            outer.step()
            with torch.no_grad():
                for ours, p in zip(shared, reference.parameters(), strict=True):
                    p.copy_(ours)
    assert torch.allclose(flat(model), flat(reference), atol=1e-5), (flat(model) - flat(reference)).abs().max()
    assert not torch.equal(*gather(model.inner[1].running_mean)[:2]), "buffers='local'"


@check
def communicators_and_schedules_are_those_of_gradients():
    found = []
    for options in (
        {},
        *({"communicator": communicator} for communicator in ("sharded", "tree", "hierarchical")),
        {"schedule": {"density": "kimad:1e-06"}},
        {"schedule": {"density": "guarded:2"}},
        {"compression": "powersgd:2"},
    ):
        model = net()
        optimizer = adamw(model)
        options = {"compression": "topk:0.1/rice/qsgd:7", "mean": WeightedMean()} | options
        local = LocalSteps(model, optimizer, steps=2, **options)
        assert train(model, optimizer, local, 8) == 4
        same_on_all_ranks(flat(model))
        assert torch.isfinite(flat(model)).all(), options
        found.append(flat(model))
    assert len({weights.numpy().tobytes() for weights in found}) == len(found)


@check
def training_goes_on_bit_for_bit_from_a_checkpoint():
    def made(saved=None):
        model = net()
        optimizer = adamw(model)
        if saved:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        options = {"memory": "residual:decay=0.9", "outer": "adam", "compression": "topk:0.1/rice/qsgd:4"}
        return model, optimizer, LocalSteps(model, optimizer, steps=6, fragments=2, delay=2, **options)

    model, optimizer, local = made()
    train(model, optimizer, local, 13)  # an exchange is under way
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "checkpoint.pt")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "local": local.state_dict()}, file)
        kept = torch.load(file, weights_only=True)
    train(model, optimizer, local, 14, first=13)
    local.synchronize()
    for already_loaded in (False, True):  # a LocalSteps that is made gives all ranks the model of rank 0
        saved = copy.deepcopy(kept)  # optimizers go on in the tensors that they load
        again, its_optimizer, its_local = made(saved if already_loaded else None)
        if not already_loaded:
            again.load_state_dict(saved["model"])
            its_optimizer.load_state_dict(saved["optimizer"])
        its_local.load_state_dict(saved["local"])
        train(again, its_optimizer, its_local, 14, first=13)
        its_local.synchronize()
        assert torch.equal(flat(again), flat(model))
        for mine, theirs in zip(again.buffers(), model.buffers(), strict=True):
            assert torch.equal(mine, theirs)
    with raises(ConfigError, "takes what state_dict gave"):
        local.load_state_dict(None)


@check
def rank_0_can_save_the_memories_of_all_ranks():
    model = net()
    optimizer = adamw(model)
    local = LocalSteps(model, optimizer, steps=1)
    train(model, optimizer, local, 3)
    own = local.state_dict()["turns"][0]["fragment"]["exchange"]["memories"][rank()]["residual"]["inner.0.weight"]
    local.consolidate_state_dict()
    memories = local.state_dict()["turns"][0]["fragment"]["exchange"]["memories"]
    everybodys = gather(own)
    if rank() == 0:
        assert sorted(memories) == list(range(ranks()))
        for number, row in enumerate(everybodys):
            assert torch.equal(memories[number]["residual"]["inner.0.weight"], row)
    else:
        assert list(memories) == [rank()]
    train(model, optimizer, local, 1, first=3)
    later = local.state_dict()["turns"][0]["fragment"]["exchange"]["memories"]
    assert list(later) == [rank()], "what was gathered before the round is not mixed with what is there after it"
    assert not torch.equal(later[rank()]["residual"]["inner.0.weight"], own)


@check
def fragments_are_exchanged_in_the_background():
    model = net()
    optimizer = adamw(model)
    local = LocalSteps(model, optimizer, steps=6, fragments=[["inner.3.*"], ["*"]], delay=2, outer="nesterov")
    assert train(model, optimizer, local, 19) == 5  # after steps 5, 8, 11, 14 and 17; another one is under way
    own = flat(model)
    with local.shared():
        same_on_all_ranks(flat(model))
        assert not torch.equal(flat(model), own)
    assert torch.equal(flat(model), own)
    assert train(model, optimizer, local, 1, first=19) == 1
    local.synchronize()
    same_on_all_ranks(flat(model))


@check_under_every_launcher
def ranks_with_different_data_count_by_their_samples_and_may_join_early():
    model, options = net(), {"rules": {"*": "dense/raw"}, "memory": "none"}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = LocalSteps(model, optimizer, "fedavg", steps=2, weights="samples", **options)
    train(model, optimizer, local, 1, samples=rank() + 1)
    train_step(model, optimizer, 1)
    before = gather(flat(model))
    local.step(samples=rank() + 1)
    weights = torch.arange(1, ranks() + 1, dtype=torch.float64)
    assert torch.allclose(flat(model), weights @ before / weights.sum(), atol=1e-6)
    train(model, optimizer, local, 2 * rank() + 1, first=2)
    local.join()
    same_on_all_ranks(flat(model))
    assert local.compression_stats()["local_steps"] == 3 + 2 * rank()


@check
def dtypes_strides_and_frozen_parameters():
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 40, 3), torch.nn.Flatten(), torch.nn.Linear(40 * 36, 10), torch.nn.Linear(10, 10)
    )
    model[0].to(memory_format=torch.channels_last)
    model[2].to(torch.bfloat16)
    model[3].weight.requires_grad_(False)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.01 * rank())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    local = LocalSteps(model, optimizer, "fedavg", steps=2, compression="dense/raw")
    same_on_all_ranks(flat(model))
    frozen = model[3].weight.clone()
    for step in range(6):
        generator = torch.Generator().manual_seed(100 * rank() + step)
        optimizer.zero_grad()
        x = model[1](model[0](torch.randn(4, 3, 8, 8, generator=generator)))
        model[3](model[2](x.bfloat16()).float()).square().mean().backward()
        optimizer.step()
        if step % 2:
            before = gather(flat(model)).mean(0)
        local.step()
        if step % 2:
            same_on_all_ranks(flat(model))
            assert torch.allclose(flat(model), before, rtol=1e-2, atol=1e-3), (flat(model) - before).abs().max()
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last) and model[2].weight.dtype == torch.bfloat16
    assert torch.equal(model[3].weight, frozen)


@check
def muloco_takes_muon_and_adamw():
    model = net()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=3e-3)]
    local = LocalSteps(model, optimizers, "muloco", steps=3, rules={"*.weight": "dense/qsgd:4"})
    assert train(model, optimizers, local, 6) == 2
    same_on_all_ranks(flat(model))
    with raises(ConfigError, "none of the optimizers is one"):
        LocalSteps(model, adamw(model), "muloco")


@check
def training_learns():
    """All ranks have parts of one small problem; what they share fits all parts."""
    model = net()
    optimizer = adamw(model)
    local = LocalSteps(model, optimizer, steps=5, outer="sgd")
    parts = [batch(0, of=other) for other in range(ranks())]

    def loss():
        model.eval()
        with torch.no_grad():
            found = sum(torch.nn.functional.cross_entropy(model(x), y).item() for x, y in parts)
        model.train()
        return found / ranks()

    first = loss()
    for _ in range(100):
        train_step(model, optimizer, 0)
        local.step()
    same_on_all_ranks(flat(model))
    assert loss() < 0.5 * first, (first, loss())


@check
def observers_write_a_record_for_each_round():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rounds.jsonl")
        from grace_ext.observe import JsonlWriter

        model = net()
        optimizer = adamw(model)
        local = LocalSteps(model, optimizer, steps=2, observe=JsonlWriter(path, every=1))
        train(model, optimizer, local, 6)
        if rank() == 0:
            records = [json.loads(line) for line in path.read_text().splitlines()]
            assert [record["step"] for record in records] == [0, 1, 2]
            total = sum(record["bytes_out"] for record in records)
            assert total == local.compression_stats()["bytes_out"] > 0


@check
def with_auto_all_ranks_choose_the_same_steps():
    model = net()
    optimizer = adamw(model)
    local = LocalSteps(
        model, optimizer, steps=AutoSteps(share=0.999, least=2, most=6)
    )  # steps are few whatever the machine does
    assert train(model, optimizer, local, 30) >= 5
    local.synchronize()
    same_on_all_ranks(flat(model))
    steps = local.state_dict()["auto_steps"]
    assert 2 <= steps <= 6 and (gather(torch.tensor([steps])) == steps).all()
    assert LocalSteps(model, optimizer, steps="auto").state_dict()["auto_steps"] == 10


@check
def only_some_ranks_make_rounds():
    members = list(range(0, ranks(), 2))
    model = net()
    optimizer = adamw(model)
    if OVER_TORCH:
        import torch.distributed as dist

        group = {"process_group": dist.new_group(members)}
    else:
        import horovod.torch as hvd

        group = {"process_set": hvd.add_process_set(members)}
    if rank() in members:
        local = LocalSteps(model, optimizer, steps=2, **group)
        assert local.ranks == len(members)
        train(model, optimizer, local, 4)
    elif not OVER_TORCH:  # torch gives the others no group to name
        with raises(ConfigError, "does not belong"):
            LocalSteps(model, optimizer, steps=2, **group)
    rows = gather(flat(model))
    assert all(torch.equal(rows[0], rows[member]) for member in members)
    if not OVER_TORCH:
        hvd.remove_process_set(group["process_set"])


@check
def what_makes_no_sense_is_refused():
    model = net()
    optimizer = adamw(model)
    for options, said in (
        ({"preset": "fedavg"}, "give steps= or seconds="),
        ({"preset": "loco"}, "allowed: sparseloco"),
        ({"buffers": "first"}, "buffers='first'"),
        ({"memory": "adam"}, "is for gradients"),
        ({"memory": "dgc"}, "is for gradients"),
        ({"outer": "lion"}, "lion"),
        ({"fragments": 100}, "fragments=100"),
        ({"capture": "folder", "fragments": 2}, "capture"),
        ({"steps": 3, "seconds": 1.0}, "one of them"),
        ({"most_samples": 64}, "most_samples=64 with weights='uniform'"),
        ({"steps": "often"}, "steps='often'; allowed: a number"),
        ({"steps": "auto", "delay": 2}, "allowed: no delay"),
        ({"steps": "auto", "schedule": {"density": "kimad:60"}}, "either the steps or the density can follow the link"),
        ({"most_samples": 0, "weights": "samples"}, "most_samples=0"),
    ):
        with raises(ConfigError, said):
            LocalSteps(model, optimizer, **options)
    with raises(TypeError, "grad_scaler"):
        LocalSteps(model, optimizer, grad_scaler=torch.amp.GradScaler("cpu"))
    with raises(ConfigError, "allowed: a torch.optim.Optimizer"):
        LocalSteps(model, [optimizer, model])
    with raises(ConfigError, "no parameter that requires a gradient"):
        LocalSteps(net().requires_grad_(False), optimizer)
    if OVER_TORCH:
        with raises(ConfigError, "give the plain module"):
            LocalSteps(torch.nn.parallel.DistributedDataParallel(model), optimizer)
        with raises(ConfigError, "Horovod is not initialized"):
            LocalSteps(model, optimizer, process_set=object())
    else:
        import horovod.torch as hvd

        from grace_ext.adapters.horovod_torch import DistributedOptimizer

        for wrapper in (hvd.DistributedOptimizer, DistributedOptimizer):
            wrapped = wrapper(adamw(model), model.named_parameters())
            with raises(ConfigError, "exchanges something in each step"):
                LocalSteps(model, wrapped)
        with raises(ConfigError, "torch.distributed is not initialized"):
            LocalSteps(model, optimizer, timeout=datetime.timedelta(minutes=1))
        with raises(ConfigError, "backend='nccl' with Horovod; allowed: None, 'horovod', or 'gloo'"):
            LocalSteps(model, optimizer, backend="nccl")
        with mock.patch.dict(os.environ, HOROVOD_ELASTIC="1"):
            local = LocalSteps(model, optimizer)
            with raises(ConfigError, "does not know of these rounds"):
                local.step()


@check
def parameters_that_would_become_a_ranks_own_are_refused():
    def unfreeze(model, optimizer):
        model.inner[0].weight.requires_grad_(True)

    def replace(model, optimizer):
        model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)

    def add_to_the_model(model, optimizer):
        model.register_parameter("scale", torch.nn.Parameter(torch.zeros(3)))

    def add_to_the_optimizer(model, optimizer):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})

    changes = {unfreeze: "inner.0.weight were", replace: "inner.0.bias", add_to_the_model: "scale were"}
    for change, says in (changes | {add_to_the_optimizer: "not the model's, the first one of shape (3,)"}).items():
        model = net()
        model.inner[0].weight.requires_grad_(False)
        optimizer = adamw(model)
        local = LocalSteps(model, optimizer, steps=2)
        train(model, optimizer, local, 2)
        change(model, optimizer)
        with raises(ConfigError, says):
            train(model, optimizer, local, 2, first=2)
    with raises(ConfigError, "not the model's"):
        LocalSteps(net(), adamw(net()))
    with raises(ConfigError, "'weight' is of type UninitializedParameter; allowed"):
        LocalSteps(torch.nn.LazyLinear(3), adamw(net()))


@check
def ranks_that_differ_are_refused_by_all():
    model = net()
    optimizer = adamw(model)
    for options in ({"steps": 2 + rank()}, {"outer": f"sgd:{1 + rank()}"}, {"compression": f"topk:0.{1 + rank()}/rice/raw"}):
        with raises(ConfigError, "rank 0"):
            LocalSteps(model, optimizer, **options)
    local = LocalSteps(model, optimizer, steps=1)
    if rank() == 0:
        train_step(model, optimizer, 0)
        local._rounds.fragments[0].step += 1
    with raises(ConfigError, "start from another state than rank 0"):
        local.step()
    with raises(ExchangeError, "an earlier round failed"):
        local.step()
