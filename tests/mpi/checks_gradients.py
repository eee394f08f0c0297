"""What is checked inside the ranks of one job: the gradients that users and optimizers find in p.grad."""

import horovod.torch as hvd
import torch
from checking import check
from harness import batches, compressed, flat, horovod, model, same_on_all_ranks

LOSSLESS = "topk:0.05/rice/raw"


def close(ours, theirs, atol=1e-6):
    assert torch.allclose(ours, theirs, rtol=0, atol=atol), (ours - theirs).abs().max()


# Layout in memory

def images(turned=True):
    """A convolution and a matrix; turned: in channels_last, and transposed in memory."""
    torch.manual_seed(4)
    net = torch.nn.Sequential(torch.nn.Conv2d(8, 16, 3), torch.nn.Flatten(), torch.nn.Linear(256, 10))
    if turned:
        net.to(memory_format=torch.channels_last)
        net[2].weight = torch.nn.Parameter(net[2].weight.detach().T.contiguous().T)
        assert not net[0].weight.is_contiguous() and not net[2].weight.is_contiguous()
    return net


def train_images(net, wrap, kind, freeze=(), **options):
    """Trains 4 steps, the first without the layers `freeze`; returns the flat parameters."""
    optimizer = wrap(kind(net.parameters(), lr=0.05, **options), net.named_parameters())
    generator = torch.Generator().manual_seed(hvd.rank())
    for step in range(4):
        for layer in freeze:
            net[layer].requires_grad_(step > 0)
        x = torch.randn(4, 8, 6, 6, generator=generator).to(memory_format=torch.channels_last)
        net.zero_grad(set_to_none=step % 2 == 0)
        torch.nn.functional.cross_entropy(net(x), torch.arange(4)).backward()
        optimizer.step()
        for p in net.parameters():
            assert p.grad is None or p.grad.stride() == p.stride(), (step, p.grad.stride(), p.stride())
    return flat(net)


@check
def fused_optimizers_find_gradients_laid_out_like_the_parameters():
    sgd, adam = (torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adam, {})
    for (kind, options), freeze, spec, wrapping in (
            (adam, (), "dense/raw", {}), (sgd, (), "dense/raw", {}), (sgd, (), LOSSLESS, {}), (adam, (0,), LOSSLESS, {}),
            (sgd, (), LOSSLESS, {"selection": "device"}), (sgd, (), "powersgd:2", {"bucket_bytes": 1})):
        wrap = compressed(spec, memory="none", **wrapping)
        apart, fused = (train_images(images(), wrap, kind, freeze, fused=fused, **options) for fused in (False, True))
        close(fused, apart, 1e-5)
        same_on_all_ranks(fused)
        if spec == "dense/raw":  # Horovod's own takes contiguous gradients only
            close(fused, train_images(images(turned=False), horovod(), kind, fused=True, **options), 1e-5)


# Whose they are

@check
def gradients_that_the_user_keeps_stay_as_they_are():
    for spec, options in (("dense/raw", {}), (LOSSLESS, {}), (LOSSLESS, {"bucket_bytes": 1}), ("powersgd:2", {}),
                          (LOSSLESS, {"selection": "device"})):
        for keep in (lambda gradient: gradient, torch.Tensor.detach, torch.Tensor.numpy):
            net, kept = model(), []
            optimizer = compressed(spec, **options)(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
            for x, y in batches(4):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(net(x), y).backward()
                optimizer.step()
                kept += [(keep(p.grad), p.grad.clone()) for p in net.parameters()]
            assert all(torch.equal(torch.as_tensor(mine), then) for mine, then in kept), (spec, options)
            same_on_all_ranks(flat(net))


@check
def where_nobody_keeps_them_gradients_stay_in_one_place():
    for to_none in (True, False):
        net = model()
        optimizer = compressed(LOSSLESS)(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
        places = []
        for x, y in batches(5):
            optimizer.zero_grad(set_to_none=to_none)
            torch.nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
            places.append([p.grad.data_ptr() for p in net.parameters()])
        assert places[1:] == places[1:2] * 4, places  # the first step's buckets are others
