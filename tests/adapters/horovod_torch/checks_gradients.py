"""What is checked inside the ranks of one job: the gradients that users and optimizers find in p.grad."""

import contextlib
import functools

import horovod.torch as hvd
import torch
from harness import batches, compressed, flat, horovod, model, same_on_all_ranks
from support.checking import check, raises

from grace_ext import ConfigError, ExchangeError
from grace_ext.adapters._torch import parameter_buckets
from grace_ext.adapters.onebit_adam import OneBitAdam

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
        (adam, (), "dense/raw", {}),
        (sgd, (), "dense/raw", {}),
        (sgd, (), LOSSLESS, {}),
        (adam, (0,), LOSSLESS, {}),
        (sgd, (), LOSSLESS, {"selection": "device"}),
        (sgd, (), "powersgd:2", {"bucket_bytes": 1}),
    ):
        wrap = compressed(spec, memory="none", **wrapping)
        apart, fused = (train_images(images(), wrap, kind, freeze, fused=fused, **options) for fused in (False, True))
        close(fused, apart, 1e-5)
        same_on_all_ranks(fused)
        if spec == "dense/raw":  # Horovod's own takes contiguous gradients only
            close(fused, train_images(images(turned=False), horovod(), kind, fused=True, **options), 1e-5)


# Whose they are


@check
def gradients_that_the_user_keeps_stay_as_they_are():
    for spec, options in (
        ("dense/raw", {}),
        (LOSSLESS, {}),
        (LOSSLESS, {"bucket_bytes": 1}),
        (LOSSLESS, {"bucket_bytes": 1, "release_gradients": True}),
        ("powersgd:2", {}),
        (LOSSLESS, {"selection": "device"}),
    ):
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


@check
def a_gradient_that_was_released_is_not_used():
    for kind, spec, options, is_taken in (
        (torch.optim.SGD, LOSSLESS, {}, True),
        (torch.optim.AdamW, None, {}, True),
        (torch.optim.SGD, LOSSLESS, {"memory": "none"}, False),
        (torch.optim.SGD, LOSSLESS, {"communicator": "sharded"}, False),
        (torch.optim.SGD, LOSSLESS, {"release_gradients": False}, False),
    ):
        options = {"release_gradients": True, **options}
        net = model()
        uses = [
            functools.partial(torch.nn.utils.clip_grad_norm_, list(net.parameters()), 0.1),
            functools.partial(lambda p: p.grad.zero_(), net[5].weight),
            functools.partial(lambda p: float(p.grad[0, 0]), net[5].weight),
        ]
        optimizer = compressed(spec, **options)(kind(net.parameters(), lr=0.01), net.named_parameters())
        for number, (x, y) in enumerate(batches(4)):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(x), y).backward()
            # The first step's gradients wait for the ranks to agree on buckets.
            for use in uses if number else ():
                with raises(ExchangeError, "optimizer.synchronize") if is_taken else contextlib.nullcontext():
                    use()
            assert net[5].weight.grad.shape == net[5].weight.shape
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            with optimizer.skip_synchronize():
                optimizer.step()
        same_on_all_ranks(flat(net))


@check
def releasing_gradients_changes_no_bit():
    for kind, spec, options in (
        (torch.optim.SGD, LOSSLESS, {"bucket_bytes": 2**16}),
        (torch.optim.SGD, LOSSLESS, {"bucket_bytes": 1}),
        (torch.optim.SGD, "topk:0.01:per=tensor/rice/qsgd:7", {"bucket_bytes": 1}),
        (torch.optim.SGD, LOSSLESS, {"memory": "residual:bits=8"}),
        (torch.optim.SGD, LOSSLESS, {"memory": "residual:bits=8", "bucket_bytes": 1}),
        (torch.optim.AdamW, None, {}),
        (torch.optim.AdamW, None, {"bucket_bytes": 1}),
        (torch.optim.SGD, LOSSLESS, {"backward_passes_per_step": 2, "gradient_predivide_factor": 2.0}),
    ):
        results = []
        for releases in (False, True):
            net = model()
            wrap = compressed(spec, release_gradients=releases, **options)
            optimizer = wrap(kind(net.parameters(), lr=0.01), net.named_parameters())
            for x, y in batches(6):
                optimizer.zero_grad()
                for part in (slice(0, 4), slice(4, 8))[: options.get("backward_passes_per_step", 1)]:
                    torch.nn.functional.cross_entropy(net(x[part]), y[part]).backward()
                optimizer.step()
            results.append(flat(net))
        same_on_all_ranks(results[1])
        assert torch.equal(*results), (kind, options)


@check
def a_large_model_lends_its_results_memory_and_changes_no_bit():
    for kind, spec, options in ((torch.optim.SGD, LOSSLESS, {"bucket_bytes": 2**16}), (torch.optim.AdamW, None, {})):
        results, before = [], parameter_buckets.LENDS_FROM
        for size in (before, 1):
            net = model()
            parameter_buckets.LENDS_FROM = size
            try:
                optimizer = compressed(spec, **options)(kind(net.parameters(), lr=0.01), net.named_parameters())
                for x, y in batches(6):
                    optimizer.zero_grad()
                    torch.nn.functional.cross_entropy(net(x), y).backward()
                    own = [p.grad.clone() for p in net.parameters()]
                    exchange = optimizer._grace.exchange
                    for bucket in filter(exchange.is_started, exchange.buckets):
                        exchange.pending(bucket)  # encoded, so that the next residual is in what was lent
                    assert all(torch.equal(p.grad, gradient) for p, gradient in zip(net.parameters(), own, strict=True))
                    optimizer.step()
            finally:
                parameter_buckets.LENDS_FROM = before
            assert any(bucket.uses_loan for bucket in optimizer._grace.exchange.buckets) == (size == 1)
            results.append(flat(net))
        same_on_all_ranks(results[1])
        assert torch.equal(*results), (kind, options)


@check
def gradients_that_stay_in_one_place_are_not_the_residuals():
    """After zero_grad(set_to_none=False), as with torch's own, a list of gradients that is made once is good for all steps."""
    for options in ({}, {"bucket_bytes": 1}):
        train_with_a_list_of_gradients(compressed(LOSSLESS, release_gradients=True, **options))


def train_with_a_list_of_gradients(wrap):
    results = []
    for keeps in (False, True):
        net = model()
        optimizer = wrap(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
        kept = []
        for number, (x, y) in enumerate(batches(6)):
            optimizer.zero_grad(set_to_none=False)
            torch.nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
            if number == 1:
                kept = [p.grad for p in net.parameters()]
            if keeps and number > 1:
                for gradient in kept:
                    gradient.zero_()
        results.append(flat(net))
    assert torch.equal(*results)


@check
def a_released_gradient_of_a_bucket_alone_becomes_the_residual():
    """And the result takes the place of the residual, so that nothing else of that size is kept; unless somebody has the gradient."""
    ways = {None: lambda _: None, "object": lambda g: g, "array": torch.Tensor.numpy, "view": lambda g: g.view(-1)}
    for keeps, keep in ways.items():
        net, kept, places = model(), [], []
        net[5].weight.register_post_accumulate_grad_hook(
            lambda p, keep=keep, kept=kept: kept.append((keep(p.grad), p.grad.clone(), p.grad.data_ptr()))
        )
        wrap = compressed(LOSSLESS, release_gradients=True, bucket_bytes=1)
        optimizer = wrap(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
        for number, (x, y) in enumerate(batches(5)):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
            bucket = optimizer._grace._bucket_of["5.weight"]
            assert bucket.uses_loan and len(bucket.tensors) == 1
            if number:  # the first step's buckets are others
                state = bucket.memory.states["residual"].current(bucket.name)
                places.append(state.__array_interface__["data"][0] == kept[-1][2])
        assert places == [keeps is None] * 4, (keeps, places)
        assert all(one is None or torch.equal(torch.as_tensor(one).view(-1), then.view(-1)) for one, then, _ in kept), keeps
        same_on_all_ranks(flat(net))


# Closures


def smooth(seed=2):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(28 * 28, 40), torch.nn.Tanh(), torch.nn.Linear(40, 10))


def train_with_closure(net, optimizer, data, clip=False):
    """Returns the flat parameters and the losses that the steps returned."""
    losses = []
    for x, y in data:

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(net(x), y)
            loss.backward()
            if clip:
                optimizer.synchronize()
                torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            return loss

        losses.append(optimizer.step(closure))
    return flat(net), torch.stack(losses).detach()


def joined_batches(steps):
    """What all ranks have, in one."""
    for step in zip(*(list(batches(steps, rank=rank)) for rank in range(hvd.size())), strict=True):
        yield tuple(torch.cat(parts) for parts in zip(*step, strict=True))


@check
def a_step_with_a_closure_is_that_of_one_process_with_all_data():
    for kind, options, spec in (
        (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}, "dense/raw"),
        (torch.optim.Adam, {"lr": 0.01}, "dense/deflate"),
        (torch.optim.LBFGS, {"lr": 0.1, "max_iter": 5}, "dense/raw"),
        (torch.optim.LBFGS, {"line_search_fn": "strong_wolfe", "max_iter": 3}, "dense/raw"),
    ):
        one, net = smooth(), smooth()
        expected, losses = train_with_closure(one, kind(one.parameters(), **options), joined_batches(3))
        optimizer = compressed(spec, memory="none")(kind(net.parameters(), **options), net.named_parameters())
        ours, returned = train_with_closure(net, optimizer, batches(3))
        close(ours, expected, 1e-3 if kind is torch.optim.LBFGS else 1e-5)
        close(returned, losses, 1e-4)
        same_on_all_ranks(ours)
        same_on_all_ranks(returned)


@check
def steps_with_and_without_a_closure_are_the_same():
    for wrap in (
        compressed(LOSSLESS),
        compressed(LOSSLESS, op=hvd.Sum),
        lambda plain, named: OneBitAdam(plain, named, warmup_steps=2),
    ):
        results = []
        for with_closure in (True, False):
            net = model()
            optimizer = wrap(torch.optim.Adam(net.parameters()), net.named_parameters())
            if with_closure:
                train_with_closure(net, optimizer, batches(5))
            else:
                for x, y in batches(5):
                    optimizer.zero_grad()
                    torch.nn.functional.cross_entropy(net(x), y).backward()
                    optimizer.step()
            results.append(flat(net))
        assert torch.equal(*results)
        same_on_all_ranks(results[0])


@check
def a_closure_may_synchronize_and_clip():
    results = []
    for skip in (False, True):
        net = smooth()
        optimizer = compressed("dense/raw")(torch.optim.SGD(net.parameters(), lr=1.0), net.named_parameters())
        with optimizer.skip_synchronize() if skip else contextlib.nullcontext():
            results.append(train_with_closure(net, optimizer, batches(3), clip=True)[0])
        assert optimizer.compression_stats()["steps"] == 3
    one, plain = smooth(), smooth()
    for clip, net in ((True, one), (False, plain)):
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        optimizer.synchronize = lambda: None
        results.append(train_with_closure(net, optimizer, joined_batches(3), clip)[0])
    assert torch.equal(results[0], results[1])
    close(results[0], results[2], 1e-5)
    assert (results[0] - results[3]).abs().max() > 1e-2, "clipping made no difference"


@check
def closures_that_cannot_work_are_refused():
    net = smooth()
    optimizer = compressed()(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
    x, y = next(batches(1))

    def backward():
        loss = torch.nn.functional.cross_entropy(net(x), y)
        loss.backward()
        return loss

    backward()
    with raises(ExchangeError, "others are on their way"):
        optimizer.step(backward)
    optimizer.synchronize()
    before = flat(net)
    with raises(ExchangeError, "has to call synchronize()"), optimizer.skip_synchronize():
        optimizer.step(backward)
    optimizer.synchronize()
    with raises(ConfigError, f"a number on ranks {list(range(1, hvd.size()))} only"):
        optimizer.step(lambda: backward() if hvd.rank() else backward() and None)
    assert torch.equal(flat(net), before)
    assert optimizer.step(lambda: backward() and "no number") == "no number"
    assert abs(optimizer.step(lambda: (backward(), 0.25 * hvd.rank())[1]) - 0.125 * (hvd.size() - 1)) < 1e-9
    with raises(ConfigError, "join() and step(closure)"):
        optimizer.join()
