"""What is checked inside the ranks of one job: sharded blocks whose activations backward computes once more."""

import torch
import torch.distributed as dist
from models import Net, assert_same, batch, loss_of, own, sharded, train
from support.checking import check, check_under_every_launcher, raises
from torch.utils.checkpoint import checkpoint

from grace_ext import ConfigError
from grace_ext.adapters.fsdp import CompressedReduceScatter


class Recomputing(Net):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = x + torch.relu(checkpoint(block, x, use_reentrant=self.reentrant))
        return self.head(x)


def compressed(net):
    net = sharded(net=net)
    return net, CompressedReduceScatter(net)


def residuals(compression):
    return compression.state_dict()[f"rank{compression.rank}"]["residual"]


@check_under_every_launcher
def recomputed_activations():
    """Reentrant checkpointing makes a backward pass for each block inside that of the model."""
    plain, expected = compressed(Net())
    train(plain, 3)
    for reentrant in (False, True):
        net, compression = compressed(Recomputing(reentrant))
        train(net, 3)
        assert compression.compression_stats()["steps"] == 3, reentrant
        assert_same(own(plain), own(net))
        assert_same(residuals(expected), residuals(compression))


@check
def a_gradient_that_is_not_finite_below_recomputed_blocks_changes_no_memory():
    for reentrant in (False, True):
        net, compression = compressed(Recomputing(reentrant))
        optimizer = train(net, 2)
        before = residuals(compression)

        def spoil(_module, _inputs, output):
            output.register_hook(lambda gradient: gradient * (torch.nan if dist.get_rank() == 0 else 1))

        handle = net.embedding.register_forward_hook(spoil)  # both blocks have sent their gradients by then
        loss_of(net, dist.get_rank(), 2).backward()
        handle.remove()
        assert all(p.grad.to_local().isfinite().all() for p in net.blocks.parameters())
        assert not net.embedding.weight.grad.to_local().isfinite().any()
        assert compression.compression_stats()["steps"] == 3
        assert_same(before, residuals(compression))
        optimizer.zero_grad()
        train(net, 1, optimizer, 3)
        assert any(not torch.equal(before[name], now) for name, now in residuals(compression).items())


@check
def accumulated_gradients_of_recomputed_blocks_are_one_step():
    net, compression = compressed(Recomputing(True))
    for number in range(2):
        net.set_requires_gradient_sync(number == 1)
        (loss_of(net, dist.get_rank(), number) / 2).backward()
    assert compression.compression_stats()["steps"] == 1


@check
def a_model_inside_of_reentrant_checkpointing_is_refused():
    """Nothing shows where the outermost backward pass ends."""
    net, _ = compressed(Net())
    x, _ = batch(dist.get_rank(), 0)
    outputs = checkpoint(lambda one: net(x) * one, torch.ones(1, requires_grad=True), use_reentrant=True)
    with raises(ConfigError, "allowed: use_reentrant=False, or model(...) outside of checkpoint"):
        outputs.sum().backward()
    net, compression = compressed(Net())
    outputs = checkpoint(lambda one: net(x) * one, torch.ones(1, requires_grad=True), use_reentrant=False)
    outputs.sum().backward()
    assert compression.compression_stats()["steps"] == 1
