"""What is checked inside the ranks of one job: the exchange."""

import copy
import json
import operator
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from harness import EACH, batches, close, flat, loss_of, module, same_on_all_ranks, sgd, train, wrap
from support.checking import check, check_under_every_launcher, raises
from torch.nn.parallel import DistributedDataParallel

import grace_ext
from grace_ext import ConfigError
from grace_ext.adapters._torch.ddp_transport import GroupTransport
from grace_ext.adapters.torch_ddp import CompressionState, comm_hook
from grace_ext.exchange.buckets import Bucket
from grace_ext.exchange.engine import Exchange
from grace_ext.observe import Timeline
from grace_ext.observe.capture import Capture
from grace_ext.transport.equal_lengths import capacity_for


@check_under_every_launcher
def ranks_are_bit_identical_after_30_steps():
    weights, state = train("topk:0.01/rice/qsgd:7", steps=30)
    same_on_all_ranks(weights)
    assert torch.isfinite(weights).all()
    assert len(state._buckets.bucket_names) == 2, "DDP's buckets were not rebuilt"
    stats = state.compression_stats()
    assert stats["steps"] == 30, stats
    assert stats["compressed"]["ratio"] > 150, stats
    assert stats["bytes_out"] < stats["bytes_in"] / 20, stats


@check_under_every_launcher
def dense_raw_is_what_plain_ddp_gives():
    ours, _ = train("dense/raw", steps=10)
    theirs, _ = train(steps=10)
    close(ours, theirs)
    if dist.get_world_size() == 2:  # among more, the order of a sum depends on its place in the buffer
        assert torch.equal(ours, theirs)


@check
def dense_containers_by_allgather_are_what_plain_ddp_gives():
    # deflate is lossless but not linear, so the gradients really go through containers
    close(train("dense/deflate", steps=6, memory="none")[0], train(steps=6)[0])


@check_under_every_launcher
def results_are_written_where_ddp_takes_them_from():
    """In the bucket of DDP, to the bits that they have where an array of our own holds them before."""
    seen = []
    start = Exchange.start

    def note(self, bucket, pack, out=None):
        seen.append(isinstance(out, list))
        start(self, bucket, pack, out)

    def run(memory, view, scale, communicator):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        net = module()
        options = {"memory": memory, "communicator": communicator, "grad_scaler": scaler}
        model, _ = wrap(net, "topk:0.01/rice/qsgd:7", {"gradient_as_bucket_view": view}, **options)
        optimizer = sgd(net)
        for number, (x, y) in enumerate(batches(6)):
            optimizer.zero_grad(set_to_none=number % 2)
            scaler.scale(loss_of(model, x * (float("inf") if number == 3 else 1), y)).backward()
            scaler.step(optimizer)
            scaler.update()
        return flat(net)

    for memory, communicator in (
        ("residual", "allgather"),
        ("residual", "sharded"),
        ("none", "allgather"),
        ("ef21:0.5", "allgather"),
    ):
        for view, scale in ((False, 1.0), (True, 1024.0)):
            given = memory, view, scale, communicator
            seen.clear()
            with mock.patch.object(Exchange, "start", note):
                found = run(*given)
            assert any(seen) == (memory != "ef21:0.5"), (given, seen)
            with mock.patch.object(Bucket, "writes_parts", False):
                assert torch.equal(found, run(*given)), given
            same_on_all_ranks(found)


@check
def an_optimizer_leaves_its_first_moment_to_the_memory():
    """With the optimizer's own beta1 it is what it is with beta1 = 0, wherever the memory keeps the first moment."""
    results = []
    for given in (True, False):
        net = module()
        weights = [p for p in net.parameters() if p.numel() > 1024]
        others = [p for p in net.parameters() if p.numel() <= 1024]
        betas = (0.8, 0.95)
        groups = [{"params": weights, "betas": betas if given else (0.0, 0.95)}, {"params": others, "betas": betas}]
        optimizer = torch.optim.AdamW(groups, lr=1e-3)
        model, _ = wrap(net, EACH, memory="momentum:0.8", optimizer=optimizer if given else None)
        for x, y in batches(6):
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
        results.append(flat(net))
        assert optimizer.param_groups[0]["betas"] == (betas if given else (0.0, 0.95))
    assert torch.equal(*results)
    same_on_all_ranks(results[0])


@check
def an_optimizer_steps_with_the_moments_of_the_memory():
    """All tensors in one state: what is in the memory of an uninterrupted training is there after a checkpoint, too."""
    results = []
    for stop in (None, 3):
        net = module()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        model, state = wrap(net, EACH, memory="adam", optimizer=optimizer)
        for step, (x, y) in enumerate(batches(6)):
            if step == stop:
                saved = copy.deepcopy((net.state_dict(), optimizer.state_dict(), state.state_dict()))
                net = module(seed=9)
                optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
                model, state = wrap(net, EACH, memory="adam", optimizer=optimizer)
                for one, kept in zip((net, optimizer, state), saved, strict=True):
                    one.load_state_dict(kept)
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            before = flat(net)
            optimizer.step()
            # Updates of every tensor are of the size of the learning rate at most.
            assert 1e-5 < (flat(net) - before).square().mean().sqrt() < 1e-3
        results.append(flat(net))
        same_on_all_ranks(results[-1])
    assert torch.equal(*results)
    with raises(ConfigError, "pass the optimizer"):
        wrap(module(), EACH, memory="adam")
    for kind, given, memory in (
        (torch.optim.AdamW, True, "adam"),
        (torch.optim.AdamW, False, "residual"),
        (sgd, True, "residual"),
    ):
        net = module()
        optimizer = kind(net) if kind is sgd else kind(net.parameters())
        model, state = wrap(net, None)[0], CompressionState(net.named_parameters(), optimizer=optimizer if given else None)
        model.register_comm_hook(state, comm_hook)
        for x, y in batches(2):
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
        same_on_all_ranks(flat(net))
        found = {bucket.memory.name for bucket in state._buckets.exchange.buckets if bucket.compressor.has_density}
        assert found == {memory}, (kind, given, found)


def _halves(net):
    """A Muon for the matrices of a model, and an AdamW for the rest."""
    matrices, others = ([p for p in net.parameters() if (p.ndim == 2) is wanted] for wanted in (True, False))
    return torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1, momentum=0.9), torch.optim.AdamW(others, lr=1e-3)


def _train_halves(steps=4, spec=None, rank=None, batch=8, given=lambda both: both, **options):
    """Returns the flat parameters and the memory of each parameter, {} for plain DDP."""
    net = module()
    both, model = _halves(net), DistributedDataParallel(net)
    state = None
    if options.pop("compressed", True):
        state = CompressionState(net.named_parameters(), spec, optimizer=given(both), **options)
        model.register_comm_hook(state, comm_hook)
    for x, y in batches(steps, rank=rank, batch=batch):
        net.zero_grad()
        loss_of(model, x, y).backward()
        for one in both:
            one.step()
    same_on_all_ranks(flat(net))
    buckets = state._buckets.exchange.buckets if state else []
    return flat(net), {tensor.name: bucket.memory.name for bucket in buckets for tensor in bucket.tensors}


def _resumed_halves(stop):
    """The flat parameters after 5 steps; at one of them, all goes on from a checkpoint."""
    net, parts = None, []
    for step, (x, y) in enumerate(batches(5)):
        if step in (0, stop):
            saved = copy.deepcopy([one.state_dict() for one in parts])
            net = module(seed=1 + step)
            model, both = DistributedDataParallel(net), _halves(net)
            state = CompressionState(net.named_parameters(), EACH, optimizer=both, memory={"*.weight": "muon:0.9"})
            model.register_comm_hook(state, comm_hook)
            parts = [net, *both, state]
            for one, kept in zip(parts, saved, strict=bool(saved)):
                one.load_state_dict(kept)
        net.zero_grad()
        loss_of(model, x, y).backward()
        for one in both:
            for group in one.param_groups:
                group["lr"] *= 0.8
            one.step()
    return flat(net)


@check
def a_muon_and_an_adamw_share_an_exchange():
    """Each parameter has the memory of its optimizer. With the same data on all ranks and no loss, Muon is as without us."""
    _, found = _train_halves()
    assert found == {name: "muon" if name.endswith("weight") else "residual" for name in found} and len(found) == 6, found
    alone, _ = _train_halves(2, rank=0, batch=1024, compressed=False)
    memory = {"*.weight": "muon:0.9", "*": "residual"}
    weights, _ = _train_halves(2, "dense/deflate", 0, 1024, memory=memory)
    start = flat(module())
    different = ((weights - alone).norm() / (alone - start).norm()).item()
    assert 0 < different < 0.05, different
    assert torch.equal(_resumed_halves(None), _resumed_halves(2))
    # A memory that changes steps has to know the optimizer of each of its parameters.
    for number, memory in ((1, "adam"), (0, {"*.weight": "muon:0.9", "*": "momentum"})):
        with raises(ConfigError, "is not among the parameters of the optimizer: pass all optimizers"):
            given = operator.itemgetter(number)
            _train_halves(1, EACH, given=given, memory=memory, rules={"*": EACH})
    with raises(ConfigError, "several optimizers need named_parameters"):
        CompressionState(optimizer=_halves(module()))
    with raises(ConfigError, "pass the optimizer"):
        wrap(module(), EACH, memory="muon")


@check
def a_step_that_failed_leaves_the_optimizer_as_it_was():
    net = module()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, betas=(0.8, 0.95))
    model, _ = wrap(net, EACH, memory="momentum:0.8", optimizer=optimizer)
    for x, y in batches(2):
        loss_of(model, x, y).backward()
        gradient, net[0].weight.grad = net[0].weight.grad, net[0].weight.grad.to_sparse()
        with raises(RuntimeError, "sparse"):
            optimizer.step()
        net[0].weight.grad = gradient
        optimizer.step()
        assert [group["betas"] for group in optimizer.param_groups] == [(0.8, 0.95)]


@check
def a_first_moment_that_differs_from_the_optimizers_is_refused():
    net = module()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, betas=(0.8, 0.95))
    model, _ = wrap(net, EACH, memory="momentum:0.9", optimizer=optimizer)
    for x, y in batches(1):
        loss_of(model, x, y).backward()
        with raises(ConfigError, "'momentum:0.9' and the optimizer's beta1=0.8 differ: use 'momentum:0.8'"):
            optimizer.step()


@check
def it_is_what_the_parts_give_one_by_one():
    """Every rank computes what all ranks do, with the compressor and the memory alone."""
    steps, ranks = 6, dist.get_world_size()
    _, state = train(EACH, steps=steps, rules={"<=1024": "dense/raw"})
    net = module()
    optimizer = sgd(net)
    compressor = grace_ext.compressor(EACH)
    memories = [grace_ext.memory("residual") for _ in range(ranks)]
    data = [list(batches(steps, rank=rank)) for rank in range(ranks)]
    for step in range(steps):
        sums = {name: np.zeros(p.numel(), np.float32) for name, p in net.named_parameters()}
        for rank, memory in enumerate(memories):
            net.zero_grad()
            loss_of(net, *data[rank][step]).backward()
            for name, p in net.named_parameters():
                gradient = p.grad.numpy().reshape(-1)
                if p.numel() > 1024:
                    compensated = memory.compensate(name, gradient)
                    gradient = grace_ext.decompress(compressor.compress(compensated), size=gradient.size)
                    memory.update(name, compensated, gradient)
                sums[name] += gradient * np.float32(1 / ranks)
        for name, p in net.named_parameters():
            p.grad = torch.from_numpy(sums[name]).view(p.shape)
        optimizer.step()
    weights, state = train(EACH, steps=steps, rules={"<=1024": "dense/raw"})
    close(weights, flat(net))
    mine = memories[dist.get_rank()].state_dict()
    found = state._buckets.exchange.state_dict()["residual"]
    assert found.keys() == mine.keys() and len(found) > 2
    for name, residual in found.items():
        assert np.allclose(residual, mine[name]["residual"], rtol=0, atol=1e-6), name
        assert residual.any(), name


@check
def what_is_remembered_survives_the_rebuild_of_buckets():
    """As in buckets that are never rebuilt."""
    ways = {}, {"find_unused_parameters": True}
    for spec, memory in (
        (EACH, "residual"),
        (EACH, "residual:decay=0.9"),
        (EACH, "ef21"),
        (EACH, "dgc:momentum=0.9:clip=1.0"),
        ("powersgd:2", "residual"),
    ):
        results = [train(spec, memory=memory, steps=6, ddp=ddp) for ddp in ways]
        layouts = [state._buckets.bucket_names for _, state in results]
        assert layouts[0] != layouts[1], layouts
        for weights, state in results:
            same_on_all_ranks(weights)
            assert state._buckets.exchange.state_dict().keys() == results[0][1]._buckets.exchange.state_dict().keys()
            close(weights, results[0][0])


@check
def a_memory_for_some_and_schedules():
    density = {"density": lambda step: 0.1 if step < 4 else 0.01}
    weights, state = train("topk:0.01/rice/raw", steps=4, schedule=density, memory={"2.*": "none"})
    early = state.compression_stats()["last_step"]["compressed"]["ratio"]
    same_on_all_ranks(weights)
    residuals = state._buckets.exchange.state_dict()["residual"]
    assert "0.weight" in residuals and "2.weight" not in residuals, residuals.keys()
    weights, state = train("topk:0.01/rice/raw", steps=14, schedule=density)
    late = state.compression_stats()["last_step"]["compressed"]["ratio"]
    assert late > 5 * early, (early, late)
    with raises(ConfigError, "no part of the specs has a number 'densty'"):
        train(EACH, schedule={"densty": "warmup:10"})


@check
def guarded_lowers_the_density_while_little_waits():
    weights, state = train("topk:0.04/rice/raw", steps=34, schedule={"density": "guarded:2"})
    same_on_all_ranks(weights)
    stats = state.compression_stats()
    (density,) = set(stats["densities"].values())
    assert stats["lag"] >= 0 and 0.001 <= density < 0.2, (stats["lag"], density)


@check
def powersgd_starts_when_told_to():
    late, _ = train("powersgd:2:start=3", memory="none", steps=3)
    plain, _ = train(steps=3)
    close(late, plain)
    weights, state = train("powersgd:2", steps=8)
    same_on_all_ranks(weights)
    assert not torch.allclose(weights, train(steps=8)[0], rtol=0, atol=1e-4)
    assert state.compression_stats()["compressed"]["ratio"] > 20


@check_under_every_launcher
def a_non_finite_gradient_reaches_all_ranks_and_no_memory():
    for spec, memory in (("topk:0.01/rice/qsgd:7", "residual"), ("powersgd:2", "residual"), (EACH, "ef21")):
        net = module()
        model, state = wrap(net, spec, memory=memory)
        optimizer = sgd(net)
        for x, y in batches(4):
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
        before = state._buckets.exchange.state_dict()
        for poison in (float("nan"), float("inf")):
            optimizer.zero_grad()
            loss = loss_of(model, x, y)
            if dist.get_rank() == dist.get_world_size() - 1:
                loss = loss + (net[2].weight * 0).sum() * poison
            loss.backward()
            assert not torch.isfinite(net[2].weight.grad).all(), "the non-finite gradient did not reach this rank"
        after = state._buckets.exchange.state_dict()
        assert before.keys() == after.keys()
        for field in before.keys() - {"step"}:
            assert all(np.array_equal(before[field][name], after[field][name]) for name in before[field]), field
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
        assert torch.isfinite(flat(net)).all()
        same_on_all_ranks(flat(net))


@check
def selection_on_the_device_gives_the_same_training():
    host, device = (train("topk:0.01/rice/qsgd:7", steps=5, selection=selection)[0] for selection in ("host", "device"))
    assert torch.equal(host, device)


@check
def rules_choose_the_spec_by_name_and_size():
    _, state = train("topk:0.01", steps=3, rules={"4.*": "dense/raw", "<=700": "dense/qsgd:8"})
    chosen = {t.name: str(b.compressor) for b in state._buckets.exchange.buckets for t in b.tensors}
    assert chosen["4.weight"].startswith("dense") and "qsgd" not in chosen["4.weight"], chosen
    assert chosen["0.bias"].endswith("qsgd") and chosen["0.weight"].startswith("topk"), chosen


@check
def capture_saves_what_rank_0_compresses():
    with tempfile.TemporaryDirectory() as folder:
        train(EACH, steps=4, capture=Capture(folder, [1, 3]))
        files = {path.name: dict(np.load(path)) for path in Path(folder).glob("*.npz")}
    if dist.get_rank():
        assert not files
    else:
        assert sorted(files) == ["1-compensated.npz", "1.npz", "3-compensated.npz", "3.npz"], files.keys()
        sizes = {name: p.numel() for name, p in module().named_parameters()}
        assert all({name: array.size for name, array in arrays.items()} == sizes for arrays in files.values())
        assert not np.array_equal(files["3.npz"]["2.weight"], files["3-compensated.npz"]["2.weight"])


@check
def observers_write_and_change_nothing():
    with tempfile.TemporaryDirectory() as folder:
        plainly, _ = train(EACH, steps=22)  # in which the link is probed
        ours, state = train(EACH, steps=22, observe=[f"{folder}/{{rank}}.jsonl", Timeline(f"{folder}/{{rank}}.json")])
        assert torch.equal(ours, plainly)
        records = [json.loads(line) for line in Path(folder, f"{dist.get_rank()}.jsonl").read_text().splitlines()]
        events = json.loads(Path(folder, f"{dist.get_rank()}.json").read_text())
    assert [record["step"] for record in records] == [0, 10, 20]
    assert records[-1]["residual_norm_ratio"] == state.compression_stats()["residual_norm_ratio"]
    assert 0 < records[-1]["residual_norm_ratio"]["2.weight"] < 50, records[-1]
    assert {"encode", "exchange", "decode"} <= {event["name"] for event in events}


@check
def parameters_are_numbered_without_names():
    close(train(EACH, steps=5, named_parameters=None)[0], train(EACH, steps=5)[0])


@check
def ranks_that_disagree_are_told():
    for options in ({"compression": f"topk:0.0{1 + dist.get_rank()}/rice/raw"}, {"seed": dist.get_rank()}):
        with raises(ConfigError, "other parameters, specs or options than rank 0"):
            train("topk:0.01/rice/raw", **options)


@check
def what_cannot_be_is_refused():
    for options, text in (
        ({"communicator": "allgater"}, "known: allgather"),
        ({"compression": "topk:0.01/rise"}, "rice"),
        ({"compression": "topk:densty=0.01"}, "density"),
        ({"memory": "resid"}, "residual"),
        ({"selection": "gpu"}, "allowed: auto, host, device"),
        ({"grad_scaler": 2.0}, "allowed: a torch.amp.GradScaler"),
        ({"named_parameters": [1]}, "(name, parameter) tuples"),
        ({"named_parameters": 2 * [*module().named_parameters()]}, "found twice"),
    ):
        with raises(ConfigError, text):
            wrap(module(), "topk:0.01", **options)
    with raises(ConfigError, "sums values as they are"):
        train("topk:0.01", communicator="allreduce")
    with raises(ConfigError, "not in named_parameters"):
        train("topk:0.01", named_parameters=module(2).named_parameters())
    layer = torch.nn.Linear(4, 4, dtype=torch.complex64)
    model, _ = wrap(layer, "topk:0.01")
    with raises(ConfigError, "complex64"):
        model(torch.ones(1, 4, dtype=torch.complex64)).abs().sum().backward()


@check_under_every_launcher
def payloads_of_any_lengths_are_gathered():
    transport = GroupTransport(dist.new_group(), torch.device("cpu"))
    lengths = np.random.default_rng(0).integers(0, 300, (60, transport.size))
    lengths[10], lengths[11], lengths[12] = 0, 1, 5000
    lengths[13, 0] = 20_000
    longest, second_collectives = lengths.max(axis=1), 0
    for step, row in enumerate(lengths):
        parts = [np.random.default_rng([step, rank]).integers(0, 256, n, np.uint8) for rank, n in enumerate(row)]
        handle = transport.allgather("x", parts[transport.rank])
        assert np.array_equal(handle.wait(), np.concatenate(parts)), (step, row)
        capacity = capacity_for(longest[max(0, step - 8) : step].max()) if step else 0
        second_collectives += longest[step] > capacity
        assert handle.padding == 8 + max(capacity, longest[step]) - row[transport.rank], step
    assert transport.second_collectives == second_collectives < 15, (transport.second_collectives, second_collectives)


@check_under_every_launcher
def small_messages_go_to_each_rank_at_once():
    """And others by Gloo's ring, which sends less from host to host where these have several ranks; all say the same."""
    transport = GroupTransport(dist.new_group(), torch.device("cpu"))
    shared = tuple(rank // 2 for rank in range(transport.size)) if transport.size > 2 else None
    for hosts, size, direct in [
        (None, 1000, True),
        (None, 70_000, False),
        ((0,) * transport.size, 70_000, True),
        (tuple(range(transport.size)), 70_000, True),
        (tuple(range(transport.size)), 5 * 2**20, False),
        (shared, 1000, True),
        (shared, 70_000, False),
    ]:
        transport.hosts = hosts
        rows = [np.random.default_rng([size, rank]).integers(0, 256, size, np.uint8) for rank in range(transport.size)]
        with mock.patch.object(transport, "group", mock.Mock(wraps=transport.group)) as group:
            assert np.array_equal(transport.allgather_equal(rows[transport.rank]).wait(), np.stack(rows)), (hosts, size)
        assert (group.alltoall_base.called, group.allgather.called) == (direct, not direct), (hosts, size)


@check
def in_the_steady_state_payloads_go_by_one_collective():
    _, state = train("topk:0.01/rice/qsgd:7", steps=30)
    transport = state._buckets.exchange.transport
    # One for each bucket of two layouts, float32 or not, one for what goes together and one for each layout's check have to be;
    # and few by chance.
    assert transport.second_collectives <= 2 * 3 + 1 + 2 + 4, transport.second_collectives
    stats = state.compression_stats()["last_step"]
    # The containers of both buckets and those of float32 are small, and go together.
    (capacity,) = (8 + capacity_for(max(longest)) for name, longest in transport.longest.items() if name.endswith(".fused"))
    assert 0.8 * capacity < stats["bytes_out"] < 1.05 * capacity, (stats, capacity)
