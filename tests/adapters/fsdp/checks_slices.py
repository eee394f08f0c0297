"""What is checked inside the ranks of one job: the reduce-scatter of fully_shard in containers."""

import dataclasses

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import GROUPS, Net, adamw, assert_same, loss_of, own, sharded, train
from support.checking import check, check_under_every_launcher, covering, raises
from support.framework_jobs import shared_folder
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import grace_ext
from grace_ext import ConfigError, ExchangeError
from grace_ext.adapters.fsdp import CompressedReduceScatter
from grace_ext.pipeline.decoder import decompress
from grace_ext.rng import Stream

SPEC = "dense/qsgd:4"


def compressed(spec=SPEC, net=None, memory="residual:bits=8", **options):
    net = sharded() if net is None else net
    return net, CompressedReduceScatter(net, spec, memory=memory, **options)


def residuals(compression):
    return compression.state_dict()[f"rank{compression.rank}"]["residual"]


@check_under_every_launcher
def exact_slices_train_as_torch_does():
    expected, (net, compression) = sharded(), compressed("dense/raw")
    train(expected, 4)
    train(net, 4)
    for name, p in own(net).items():  # with more than two ranks, Gloo adds in another order
        torch.testing.assert_close(p, own(expected)[name], rtol=1e-4, atol=1e-5)
    assert compression.compression_stats()["steps"] == 4


def _sliced(gradient, ranks):
    """The slices of one parameter's gradient that fully_shard makes, padded with zeros, as [ranks, size]."""
    rows = -(-gradient.shape[0] // ranks)
    padded = torch.zeros(rows * ranks, *gradient.shape[1:])
    padded[: len(gradient)] = gradient
    return padded.view(ranks, -1)


def _one_process(spec, steps, ranks):
    """The parameters after some steps of all ranks in this process, with residuals of 32 bits."""
    net = Net()
    optimizer, residual, compressor = adamw(net), {}, grace_ext.compressor(spec)
    groups = {group: [] for group in GROUPS}
    for name, p in net.named_parameters():
        groups[next((group for group in GROUPS[1:] if name.startswith(f"{group}.")), "model")].append(p)
    for step in range(steps):
        slices = {}  # by group and sender: float32[ranks, size]
        for sender in range(ranks):
            loss_of(net, sender, step).backward()
            for group, parameters in groups.items():
                slices[group, sender] = torch.cat([_sliced(p.grad, ranks) for p in parameters], dim=1).numpy()
            optimizer.zero_grad()
        for group, parameters in groups.items():
            means = []
            for owner in range(ranks):
                summed = slices[group, owner][owner].copy()
                for sender in (rank for rank in range(ranks) if rank != owner):
                    stream = dataclasses.replace(Stream(0, f"{group}@0", step, sender), name=f"{group}@0[{owner}]")
                    array = slices[group, sender][owner] + residual.get((group, sender, owner), np.float32(0))
                    used = compressor if array.size > 1024 else grace_ext.compressor("dense/raw")
                    arrived = decompress(used.encode(array, stream).blob, array.size)
                    residual[group, sender, owner] = array - arrived
                    summed += arrived
                means.append(torch.from_numpy(summed) * (1 / ranks))
            parts = torch.stack(means).split([_sliced(p, ranks).shape[1] for p in parameters], dim=1)
            for p, part in zip(parameters, parts, strict=True):
                p.grad = part.reshape(-1, *p.shape[1:])[: len(p)].clone()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in net.named_parameters()}


@check_under_every_launcher
def it_equals_one_process_to_the_bit():
    for spec in (SPEC, "topk:0.05/rice/qsgd:7"):
        net, _ = compressed(spec, memory="residual")
        train(net, 4)
        expected = _one_process(spec, 4, dist.get_world_size())
        for name, p in net.named_parameters():
            assert torch.equal(p.full_tensor(), expected[name]), (spec, name)


@check
def a_gradient_that_is_not_finite_changes_no_memory():
    net, compression = compressed()
    optimizer = train(net, 2)
    before = residuals(compression)
    loss = loss_of(net, dist.get_rank(), 2)
    (loss * (torch.inf if dist.get_rank() == 1 else 1)).backward()
    for name, p in net.named_parameters():
        assert not p.grad.to_local().isfinite().any(), name
    assert_same(before, residuals(compression))
    optimizer.zero_grad()
    train(net, 1, optimizer, 3)
    assert any(not torch.equal(before[name], now) for name, now in residuals(compression).items())


@check
def accumulated_gradients_are_sent_once():
    net, compression = compressed("dense/raw")
    for number in range(3):
        net.set_requires_gradient_sync(number == 2)
        (loss_of(net, dist.get_rank(), number) / 3).backward()
    assert compression.compression_stats()["steps"] == 1
    expected = sharded()
    for number in range(3):
        (loss_of(expected, dist.get_rank(), number) / 3).backward()
    for (name, p), q in zip(net.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p.grad.to_local(), q.grad.to_local(), msg=name)


@check
def gradients_of_other_dtypes_and_offloaded_ones():
    for reduce_dtype, offload in covering([(torch.float32, False), (torch.bfloat16, True), (torch.bfloat16, False)]):
        options = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)}
        if offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        expected, (net, _) = sharded(**options), compressed("dense/raw", sharded(**options))
        for one in (expected, net):
            loss_of(one, dist.get_rank(), 0).backward()
        for (name, p), q in zip(net.named_parameters(), expected.parameters(), strict=True):
            assert p.grad.dtype == q.grad.dtype
            torch.testing.assert_close(p.grad.to_local(), q.grad.to_local(), rtol=0.02, atol=1e-4, msg=name)


@check
def a_scaled_loss_leaves_the_memory_in_the_units_of_gradients():
    (plain, kept), scaler = compressed(), torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    train(plain, 5)
    net, compression = compressed(grad_scaler=scaler)
    train(net, 5, scaler=scaler)
    assert scaler.get_scale() > 2.0**10
    assert_same(own(plain), own(net))
    assert_same(residuals(kept), residuals(compression))


@check_under_every_launcher
def a_checkpoint_of_torch_goes_on_bit_for_bit():
    folder = shared_folder("checkpoint")
    net, compression = compressed()
    optimizer = train(net, 3)
    parts = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "compression": compression}
    dcp.save(parts, checkpoint_id=folder)
    train(net, 3, optimizer, 3)
    other, loaded = compressed()
    state = {"model": other.state_dict(), "compression": loaded}
    resumed = adamw(other)
    train(other, 1, resumed, 50)  # so that there are states to load into
    state["optimizer"] = resumed.state_dict()
    dcp.load(state, checkpoint_id=folder)
    other.load_state_dict(state["model"])
    resumed.load_state_dict(state["optimizer"])
    assert sum(tensor.abs().sum() for tensor in residuals(loaded).values()) > 0
    train(other, 3, resumed, 3)
    assert_same(own(net), own(other))
    assert_same(residuals(compression), residuals(loaded))


@check
def states_that_do_not_fit_are_refused():
    _, compression = compressed()
    with raises(ConfigError, "load_state_dict takes what state_dict gave on this rank"):
        compression.load_state_dict({"rank7": {}})
    with raises(ConfigError, "'other@0', which is no slice of this model"):
        compression.load_state_dict({f"rank{compression.rank}": {"step": 1, "residual": {"other@0": torch.zeros(3)}}})
    with raises(ConfigError, "the ranks have loaded states of different steps"):
        compression.load_state_dict({f"rank{compression.rank}": {"step": compression.rank, "residual": {}}})


@check
def a_backward_that_raised_changes_no_memory():
    net, compression = compressed()
    train(net, 1)
    before = residuals(compression)

    def give_up(*_):
        raise RuntimeError("backward gives up")

    # Both blocks have sent their gradients by then.
    handle = net.embedding.register_forward_hook(lambda *args: args[-1].register_hook(give_up) and None)
    with raises(RuntimeError, "backward gives up"):
        loss_of(net, dist.get_rank(), 1).backward()
    handle.remove()
    assert_same(before, residuals(compression))


def _reduce_again(net, times=1):
    """Call the reduce-scatter of the outermost group in a backward pass, as fully_shard does."""
    reduce = net._get_fsdp_state()._fsdp_param_groups[0]._reduce_scatter_comm
    size = reduce._compression._groups[reduce._number].size

    class Calls(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            for _ in range(times):
                reduce(torch.empty(size), torch.zeros(dist.get_world_size() * size), None, dist.ReduceOp.AVG)

    Calls.apply(torch.ones(1, requires_grad=True)).backward()


@check
def gradients_that_come_twice_in_a_step_are_refused():
    net, _ = compressed()
    with raises(ExchangeError, "for the second time"):
        _reduce_again(net, times=2)


@check
def parameters_without_gradient():
    net, _ = compressed(net=sharded(net=Net(unused=True)))
    with raises(ConfigError, "some parameters have no gradient"):
        loss_of(net, dist.get_rank(), 0).backward()
    with raises(ExchangeError, "the ranks may be out of step"):
        _reduce_again(net)
    net, compression = compressed(net=sharded(net=Net(unused=True)))
    net.set_reduce_scatter_unused_params(True)
    train(net, 2)
    assert compression.compression_stats()["steps"] == 2


@check
def frozen_parameters_are_left_out():
    net = Net()
    net.head.requires_grad_(False)
    net, compression = compressed(net=sharded(net=net))
    before = own(net)
    train(net, 2)
    assert torch.equal(before["head.weight"], own(net)["head.weight"])
    assert not torch.equal(before["embedding.weight"], own(net)["embedding.weight"])


@check
def a_divide_factor_needs_sums():
    net, _ = compressed()
    for module in net.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(8.0)
    with raises(ConfigError, "set_force_sum_reduction_for_comms"):
        loss_of(net, dist.get_rank(), 0).backward()
    given, expected = compressed("dense/raw")[0], sharded()
    for one in (given, expected):
        for module in one.modules():
            if hasattr(module, "set_gradient_divide_factor"):
                module.set_gradient_divide_factor(8.0)
                module.set_force_sum_reduction_for_comms(True)
        loss_of(one, dist.get_rank(), 0).backward()
    for p, q in zip(given.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p.grad.to_local(), q.grad.to_local())


@check
def what_cannot_work_is_refused():
    with raises(ConfigError, "no parameter of the model is sharded"):
        CompressedReduceScatter(Net())
    for options, text in (
        ({"memory": "adam"}, "allowed with slices: residual, none"),
        ({"compression": "powersgd:2"}, "slices are vectors"),
    ):
        with raises(ConfigError, text):
            CompressedReduceScatter(sharded(), **options)
    with raises(TypeError, "unknown option 'communicator'"):
        CompressedReduceScatter(sharded(), communicator="sharded")
    with raises(ConfigError, "have other parameters, specs or options"):
        CompressedReduceScatter(sharded(), SPEC if dist.get_rank() else "dense/qsgd:8")


@check
def rules_know_groups_by_their_modules():
    net, compression = compressed(rules={"blocks.0": "dense/raw", "model": "dense/fp16"})
    train(net, 1)
    used = {bucket.tensors[0].name.partition("@")[0]: str(bucket.compressor) for bucket in compression._exchange.buckets}
    assert used["blocks.0"].startswith("dense/raw") and used["model"] == "dense/auto/fp16", used


@check
def modules_that_were_sharded_together():
    net = Net()
    fully_shard([net.blocks[0], net.blocks[1]])
    net, compression = compressed(net=fully_shard(net))
    train(net, 2)
    names = {bucket.tensors[0].name.partition("@")[0] for bucket in compression._exchange.buckets}
    assert names == {"model", "blocks.0+blocks.1"}
