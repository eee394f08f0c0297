"""What is checked inside the ranks of one job: methods of compression, and capture."""

import copy
import tempfile
import warnings
from contextlib import nullcontext
from pathlib import Path

import horovod.torch as hvd
import numpy as np
import torch
from harness import batches, compressed, flat, horovod, model, same_on_all_ranks, train
from support.checking import check, raises
from support.exchanges import arrays_of

from grace_ext import ConfigError
from grace_ext.adapters.horovod_torch import DistributedOptimizer
from grace_ext.observe.capture import Capture
from grace_ext.pipeline.presets import PRESETS
from grace_ext.policy.allocation import DENSITIES
from grace_ext.policy.kimad import DensityController


@check
def every_preset_trains_alike_on_all_ranks():
    for spec in (*PRESETS, "topk:0.01/auto/lloyd:0.05", "dgc:0.05/elias_fano/natural", "topk:0.1:per=tensor/varint/bf16"):
        weights, optimizer, _ = train(compressed(spec, rules={"*.bias": "dense/raw"}), steps=2)
        same_on_all_ranks(weights)
        assert torch.isfinite(weights).all(), spec
        stats = optimizer.compression_stats()["compressed"]
        assert stats["ratio"] > 2 and stats["bytes_out"], (spec, stats)


@check
def kimad_sends_what_there_is_time_for():
    """Next to nothing if a step's time is over before it begins, everything if it may take an hour."""
    for schedule, selection in (("kimad", "auto"), ("kimad+", "auto"), ("kimad+", "device")):
        for seconds, density in ((1e-6, DENSITIES[0]), (3600, 1.0)):
            weights, optimizer, _ = train(
                compressed("topk:0.04/rice/raw", schedule={"density": f"{schedule}:{seconds}"}, selection=selection)
            )
            same_on_all_ranks(weights)
            stats = optimizer.compression_stats()
            assert stats["bandwidth"] > 0 and set(stats["densities"].values()) == {density}, (schedule, stats)
            (controller,) = (one for one in optimizer._grace.exchange.listeners if isinstance(one, DensityController))
            curves = controller._curves
            assert bool(curves) == (schedule == "kimad+"), (selection, "it did not look at the gradients")


@check
def guarded_lowers_the_density_while_little_waits():
    for selection in ("auto", "device"):
        weights, optimizer, _ = train(
            compressed("topk:0.04/rice/raw", schedule={"density": "guarded:2"}, selection=selection), steps=34
        )
        same_on_all_ranks(weights)
        stats = optimizer.compression_stats()
        (density,) = set(stats["densities"].values())
        assert stats["lag"] >= 0 and 0.001 <= density < 0.2, (selection, stats["lag"], density)


@check
def random_positions_go_by_allreduce_and_by_allgather():
    results = {}
    for communicator in ("allgather", "allreduce"):
        ours, optimizer, net = train(compressed("randomk:0.05", communicator=communicator), steps=6)
        same_on_all_ranks(ours)
        results[communicator] = ours
        buckets = [b for b in optimizer._grace.exchange.buckets if str(b.compressor).startswith("randomk")]
        assert buckets and all(b.communicator.name == communicator and b.memory.stateful for b in buckets)
        state = arrays_of(optimizer._grace.exchange)
        assert any(np.count_nonzero(residual) for residual in state.values()), "error feedback keeps nothing"
        stats = optimizer.compression_stats()["compressed"]
        assert 19 < stats["ratio"] <= 20.5, stats
    assert torch.allclose(results["allgather"], results["allreduce"], rtol=0, atol=1e-5)
    before = arrays_of(optimizer._grace.exchange)

    def poison(gradient):
        gradient = gradient.clone()
        gradient.view(-1)[7] = float("nan")  # most likely at a position that is not sent
        return gradient

    if hvd.rank() == hvd.size() - 1:
        net[5].weight.register_hook(poison)
    for x, y in batches(1):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.synchronize()
    assert torch.isnan(net[5].weight.grad).all()
    after = arrays_of(optimizer._grace.exchange)
    assert all(np.array_equal(before[name], after[name]) for name in before), "a memory changed"
    with raises(ConfigError, "memory 'none'"):
        train(compressed("randomk:0.05:unbiased=true"), steps=1)


@check
def powersgd_is_the_low_rank_average_with_feedback():
    net = model()
    optimizer = compressed("powersgd:2")(torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9), net.named_parameters())
    weight, state = net[5].weight, {}
    for x, y in batches(6):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        own = weight.grad.double().numpy().copy()
        if state:
            own += state["residual:5.weight"].reshape(weight.shape)
        optimizer.synchronize()
        sent = weight.grad.double().numpy()
        if state:  # from here on it is known what the step began with
            mean = hvd.allgather(torch.from_numpy(own)[None], name="powersgd").numpy().mean(axis=0)
            basis = np.linalg.qr(mean @ state["lowrank:5.weight"].reshape(2, -1).T)[0]
            expected = basis @ (basis.T @ mean)
            assert np.abs(sent - expected).max() < 1e-5 * np.abs(mean).max() + 1e-7, np.abs(sent - expected).max()
        state = arrays_of(optimizer._grace.exchange)
        residual = state["residual:5.weight"].reshape(weight.shape)
        error = hvd.allgather(torch.from_numpy(own - sent - residual)[None], name="errors").numpy().mean(axis=0)
        assert np.abs(error).max() < 1e-6 * np.abs(own).max(), "residual"
        directions = np.linalg.svd(sent)[0][:, :2]
        assert np.abs(directions.T @ residual).max() < 1e-5 * np.abs(own).max(), "sent, and kept as well"
        assert np.linalg.matrix_rank(sent, tol=1e-5 * np.linalg.norm(sent, 2)) == 2
        with optimizer.skip_synchronize():
            optimizer.step()
    same_on_all_ranks(flat(net))
    same_on_all_ranks(torch.from_numpy(state["lowrank:5.weight"]))
    stats = optimizer.compression_stats()
    assert stats["compressed"]["ratio"] == weight.numel() / (2 * sum(weight.shape)), stats
    warm, _, _ = train(compressed("powersgd:2", communicator="allreduce", bucket_bytes=1), steps=3)
    late = {"5.*": "powersgd:2:start=3", "*": "dense/raw"}
    alone, _, _ = train(compressed("powersgd:2", memory="none", rules=late), steps=3)
    plain, _, _ = train(horovod(), steps=3)
    same_on_all_ranks(warm)
    assert torch.allclose(alone, plain, rtol=0, atol=1e-6) and not torch.allclose(warm, plain, rtol=0, atol=1e-4)


@check
def adams_first_moment_is_compressed_in_place_of_the_gradient():
    net, reference = model(), model()
    kind, options = torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.1}
    optimizer = compressed("topk:0.1/rice/raw", memory="momentum:0.8")(
        kind(net.parameters(), betas=(0.8, 0.95), **options), net.named_parameters()
    )
    weight = reference[5].weight
    others = [p for p in reference.parameters() if p is not weight]
    theirs = [kind([weight], betas=(0.0, 0.95), **options), kind(others, betas=(0.8, 0.95), **options)]
    start, moment, residual = flat(net), torch.zeros(weight.numel()), torch.zeros(weight.numel())
    for step, (x, y) in enumerate(batches(6)):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
        assert optimizer.param_groups[0]["betas"] == (0.8, 0.95) and len(optimizer.param_groups) == 1
        reference.zero_grad()
        torch.nn.functional.cross_entropy(reference(x), y).backward()
        for number, p in enumerate(others):
            p.grad = hvd.allreduce(p.grad, name=f"other{number}")
        moment = 0.8 * moment + 0.2 * weight.grad.flatten()
        residual = residual + moment
        sent = torch.zeros_like(residual)
        largest = residual.abs().topk(round(0.1 * residual.numel())).indices
        sent[largest] = residual[largest]
        residual = residual - sent
        weight.grad = hvd.allreduce(sent, name="sent").view(weight.shape)
        for one in theirs:
            one.step()
        # Where ranks nearly cancel each other, Adam makes a step of rounding errors.
        assert (flat(net) - flat(reference)).norm() < 1e-2 * (flat(net) - start).norm(), step
    same_on_all_ranks(flat(net))
    # Without compression, before and after, it is Adam with a first moment of its own.
    state = optimizer.state_dict()
    alone = kind(net.parameters(), betas=(0.8, 0.95), **options)
    alone.load_state_dict({key: state[key] for key in ("state", "param_groups")})
    assert alone.param_groups[0]["betas"] == (0.8, 0.95)


@check
def adams_step_is_made_with_both_moments_of_the_memory():
    for kind, options, maximize in (
        (torch.optim.AdamW, {"weight_decay": 0.1}, False),
        (torch.optim.Adam, {"weight_decay": 0.1}, True),
    ):
        net = model()
        plain = kind(net.parameters(), lr=1e-3, eps=1e-3, maximize=maximize, **options)
        optimizer = compressed("topk:0.1/rice/raw", memory="adam", rules={"5.weight": "topk:0.1", "*": "dense/raw"})(
            plain, net.named_parameters()
        )
        weight = net[5].weight
        for x, y in batches(5):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(x), y).backward()
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
                bucket, tensor = next(
                    (bucket, tensor)
                    for bucket in optimizer._grace.exchange.buckets
                    for tensor in bucket.tensors
                    if tensor.name == "5.weight"
                )
                gradient, before = weight.grad.clone(), weight.detach().clone()
                rows, columns = copy.deepcopy(bucket.memory).denominator(
                    tensor, lambda at, g=gradient: g.flatten()[at].item(), 1e-3
                )
                optimizer.step()
            gradient = -gradient if maximize else gradient
            decayed = before * (1 - 1e-4) if kind is torch.optim.AdamW else before
            gradient = gradient if kind is torch.optim.AdamW else gradient + 0.1 * before
            expected = decayed - 1e-3 * gradient / (torch.outer(*map(torch.from_numpy, (rows, columns))) + 1e-3)
            torch.testing.assert_close(weight.detach(), expected, rtol=1e-5, atol=1e-7)
            assert (weight.detach() - before).abs().max() > 1e-5
        same_on_all_ranks(flat(net))
        # The other tensors are Adam's, and a training without compression goes on from its state.
        state = optimizer.state_dict()
        alone = kind(net.parameters(), lr=1e-3)
        alone.load_state_dict({key: state[key] for key in ("state", "param_groups")})
        torch.nn.functional.cross_entropy(net(x), y).backward()
        alone.step()
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for kind, options, message in (
        (torch.optim.SGD, {}, "not SGD"),
        (torch.optim.NAdam, {}, "not NAdam"),
        (torch.optim.Adam, {"amsgrad": True}, "amsgrad"),
    ):
        net = model()
        with raises(ConfigError, message):
            compressed(memory="adam")(kind(net.parameters(), lr=0.1, **options), net.named_parameters())


@check
def an_adam_without_further_words_has_its_own_default():
    for kind, options, memory in (
        (torch.optim.AdamW, {}, "adam"),
        (torch.optim.Adam, {"amsgrad": True}, "residual"),
        (torch.optim.SGD, {"lr": 0.1}, "residual"),
    ):
        net = model()
        optimizer = DistributedOptimizer(kind(net.parameters(), **options), net.named_parameters())
        for x, y in batches(3):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
        same_on_all_ranks(flat(net))
        found = {bucket.memory.name for bucket in optimizer._grace.exchange.buckets if bucket.compressor.has_density}
        assert found == {memory}, (kind, found)
        assert (optimizer._grace.exchange.buckets[0].communicator.name != "auto") and bool(
            optimizer._grace.exchange.schedules
        ) == (memory == "adam")


def _halves(net):
    """A Muon for the matrices of a model, and an AdamW for the rest."""
    matrices = [p for p in net.parameters() if p.ndim == 2]
    muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1, momentum=0.9)
    return muon, torch.optim.AdamW([p for p in net.parameters() if p.ndim != 2], lr=1e-3)


def _train_halves(wrap, rank=None, steps=4, batch=8):
    net = model()
    optimizers = [wrap(one, net.named_parameters()) for one in _halves(net)]
    for x, y in batches(steps, batch, rank):
        for one in optimizers:
            one.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        for one in optimizers:
            one.step()
    return flat(net), optimizers, net


def _memories(optimizer):
    """By name of a parameter."""
    return {tensor.name: bucket.memory.name for bucket in optimizer._grace.exchange.buckets for tensor in bucket.tensors}


@check
def a_muon_makes_its_own_step_where_nothing_is_lost():
    """With the same data on all ranks, what the memory sends is Muon's update, which torch computes in bfloat16. So many samples,
    because rounding decides on directions that no sample has."""
    alone, plain, _ = _train_halves(lambda one, named: one, 0, 2, 512)
    results = []
    for memory in ("muon:0.9", "none"):
        memories = {"*.weight": memory, "*": "none"}

        def wrap(one, named, memories=memories):
            kept = memories if isinstance(one, torch.optim.Muon) else "none"
            return DistributedOptimizer(one, named, "dense/deflate", memory=kept)

        weights, (muon, _), _ = _train_halves(wrap, 0, 2, 512)
        same_on_all_ranks(weights)
        results.append(weights)
        if memory != "none":
            assert _memories(muon) == {"5.weight": "muon", "7.weight": "none"}, "small tensors are sent exactly"
    start = flat(model())
    found = [((weights - alone).norm() / (alone - start).norm()).item() for weights in results]
    assert max(found) < 0.1, found
    assert not torch.equal(*results)


@check
def a_muon_and_an_adamw_have_a_default_each():
    weights, optimizers, net = _train_halves(DistributedOptimizer)
    same_on_all_ranks(weights)
    assert (weights - flat(model())).abs().max() > 1e-3
    muon, adamw = map(_memories, optimizers)
    assert muon == {"5.weight": "muon", "7.weight": "muon"}, muon
    assert set(adamw.values()) == {"residual"}, "small tensors are sent in fewer bits"
    assert muon.keys() | adamw.keys() == {name for name, _ in net.named_parameters()}
    assert all(one._grace.exchange.schedules for one in optimizers)
    # A training without compression goes on from Muon's state, and a scheduler finds its groups.
    muon = optimizers[0]
    (group,) = muon.param_groups
    assert group["momentum"] == 0.9 and len(group["params"]) == 2
    hvd.broadcast_optimizer_state(muon, root_rank=0)
    state = muon.state_dict()
    alone, _ = _halves(net)
    alone.load_state_dict({key: state[key] for key in ("state", "param_groups")})
    # The sum and the mean are the same step.
    nets = []
    for op in (hvd.Average, hvd.Sum):
        net = model()
        muon, _ = _halves(net)
        wrapped = DistributedOptimizer(muon, net.named_parameters(), "topk:0.05/rice/raw", op=op, memory="muon:0.9")
        for x, y in batches(2):
            wrapped.zero_grad()
            torch.nn.functional.cross_entropy(net(x), y).backward()
            wrapped.step()
        nets.append(flat(net))
        same_on_all_ranks(nets[-1])
    torch.testing.assert_close(*nets, rtol=1e-4, atol=1e-6)


@check
def a_scaled_loss_makes_the_same_step_of_a_muon_whose_wrapper_knows_it():
    nets = []
    for scaled, told in ((False, False), (True, True), (True, False)):
        net = model()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        given = {"grad_scaler": scaler} if told else {}
        optimizer = compressed("topk:0.05/rice/raw", memory="muon:0.9", **given)(_halves(net)[0], net.named_parameters())
        refused = scaled and not told
        with warnings.catch_warnings(), raises(ConfigError, "tell the wrapper") if refused else nullcontext():
            warnings.simplefilter("ignore")
            for x, y in batches(2):
                optimizer.zero_grad()
                scaler.scale(torch.nn.functional.cross_entropy(net(x), y)).backward()
                scaler.step(optimizer)
                scaler.update()
        nets.append(net[5].weight.detach())
    torch.testing.assert_close(nets[0], nets[1], rtol=1e-4, atol=1e-6)
    assert torch.equal(nets[2], model()[5].weight)


@check
def what_a_muon_cannot_have_is_refused():
    for options, given, message in (
        ({}, {"memory": "muon"}, "differ: use 'muon:0.9:nesterov=true:steps=5:adjust=original'"),
        ({"eps": 1e-5}, {"memory": "muon:0.9"}, "has to have ns_coefficients="),
        ({}, {"memory": "adam"}, "and not Muon"),
        ({}, {"memory": "momentum:0.9"}, "that of Muon, 0.9, would be applied once more"),
    ):
        net = model()
        muon = torch.optim.Muon([p for p in net.parameters() if p.ndim == 2], momentum=0.9, **options)
        with raises(ConfigError, message):
            compressed(**given)(muon, net.named_parameters())
    net = model()
    with raises(ConfigError, "not those of SGD"):
        compressed(memory="muon")(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
    # One that the memory has no options for keeps the default of all others.
    net = model()
    muon = torch.optim.Muon([p for p in net.parameters() if p.ndim == 2], eps=1e-5)
    optimizer = DistributedOptimizer(muon, net.named_parameters())
    assert {bucket.memory.name for bucket in optimizer._grace.exchange.buckets} <= {"residual", "none"}
    # Between the exchange and the step, gradients are updates.
    net = model()
    optimizer = DistributedOptimizer(_halves(net)[0], net.named_parameters())
    for x, y in batches(1):
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.synchronize()
        optimizer.param_groups[0]["params"][-1].grad *= 0.5
        before = flat(net)
        with raises(ConfigError, "was changed between the exchange and the step"), optimizer.skip_synchronize():
            optimizer.step()
        assert torch.equal(before, flat(net)) and len(optimizer.param_groups) == 1


@check
def a_first_moment_is_kept_once():
    for kind, options, memory, message in (
        (torch.optim.Adam, {}, "momentum:0.8", "'momentum:0.8' and the optimizer's beta1=0.9 differ: use 'momentum:0.9'"),
        (torch.optim.NAdam, {}, "momentum", "that of NAdam, 0.9, would be applied once more"),
        (torch.optim.SGD, {"momentum": 0.9}, "momentum", "would be applied once more"),
    ):
        net = model()
        with raises(ConfigError, message):
            compressed(memory=memory)(kind(net.parameters(), lr=0.1, **options), net.named_parameters())
    for kind, options in ((torch.optim.SGD, {}), (torch.optim.Adam, {"betas": (0.0, 0.99)}), (torch.optim.Adagrad, {})):
        net = model()
        compressed(memory="momentum")(kind(net.parameters(), lr=0.1, **options), net.named_parameters())


@check
def capture_saves_what_rank_0_compresses():
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for number, selection in enumerate(("host", "device")):
            capture = Capture(f"{folder}/{number}", [2])
            weights, _, net = train(compressed(selection=selection, capture=capture), steps=4)
            results.append(weights)
            files = sorted(path.name for path in Path(folder).glob(f"{number}/*"))
            assert files == (["2-compensated.npz", "2.npz"] if hvd.rank() == 0 else []), files
            if files:
                plain, compensated = (dict(np.load(f"{folder}/{number}/{name}")) for name in reversed(files))
                sizes = {name: p.numel() for name, p in net.named_parameters()}
                assert {name: array.size for name, array in plain.items()} == sizes, plain.keys()
                assert plain.keys() == compensated.keys()
                assert np.array_equal(plain["5.bias"], compensated["5.bias"]), "sent dense, so there is no residual"
                assert not np.array_equal(plain["5.weight"], compensated["5.weight"])
                results.append([plain, compensated])
    plainly, _, _ = train(compressed(), steps=4)
    assert torch.equal(results[0], plainly)
    if hvd.rank() == 0:
        for ours, theirs in zip(results[1], results[3], strict=True):
            assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
