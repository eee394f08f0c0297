"""What is checked inside the ranks of one job: DDP's ways of training."""

import contextlib

import torch
import torch.distributed as dist
from harness import EACH, batches, close, flat, loss_of, module, same_on_all_ranks, sgd, train, wrap
from support.checking import check, check_under_every_launcher
from torch.distributed.algorithms.join import Join


@check
def accumulation_in_no_sync_is_compressed_once():
    def accumulate(spec):
        net = module()
        model, state = wrap(net, spec)
        optimizer = sgd(net)
        for number, (x, y) in enumerate(batches(12)):
            last = number % 3 == 2
            with contextlib.nullcontext() if last else model.no_sync():
                loss_of(model, x, y).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
        return flat(net), state

    ours, state = accumulate("dense/raw")
    close(ours, accumulate(None)[0])
    assert state.compression_stats()["steps"] == 4
    same_on_all_ranks(accumulate("topk:0.01/rice/qsgd:7")[0])


class Uneven(torch.nn.Module):
    """A layer that only some ranks use, one that none does, and layers used in another order than registered."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.last = torch.nn.Linear(100, 10)
        self.optional = torch.nn.Linear(100, 100)
        self.never = torch.nn.Linear(100, 100)
        self.first = torch.nn.Linear(100, 100)

    def forward(self, x):
        x = torch.relu(self.first(x))
        return self.last(self.optional(x) if dist.get_rank() == 0 else x)


@check_under_every_launcher
def unused_parameters():
    ddp = {"find_unused_parameters": True}
    net, plain = Uneven(), Uneven()
    close(train("dense/raw", net=net, ddp=ddp)[0], train(net=plain, ddp=ddp)[0])
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
    same_on_all_ranks(train("topk:0.01/rice/qsgd:7", net=Uneven(), ddp=ddp, steps=8)[0])


@check
def static_graph_and_gradients_as_views_of_buckets():
    expected, _ = train(EACH)
    plain, _ = train()
    for ddp in (
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
        {"static_graph": True, "gradient_as_bucket_view": True},
    ):
        close(train(EACH, ddp=ddp)[0], expected)
        close(train("dense/raw", ddp=ddp)[0], plain)


@check
def uneven_inputs_in_join():
    """Ranks with fewer batches take part with gradients of zero, and with what they still owe."""

    def run(spec, how):
        net = module()
        model, state = wrap(net, spec)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        with how(model):
            for x, y in batches(3 + 2 * dist.get_rank()):
                optimizer.zero_grad()
                loss_of(model, x, y).backward()
                optimizer.step()
        same_on_all_ranks(flat(net))
        return flat(net), state

    for how in (lambda model: model.join(), lambda model: Join([model])):
        ours, state = run("dense/raw", how)
        close(ours, run(None, how)[0])
        steps = 3 + 2 * (dist.get_world_size() - 1)
        assert state.compression_stats()["steps"] == steps, state.compression_stats()["steps"]
        run("topk:0.01/rice/qsgd:7", how)


@check
def parameters_of_other_dtypes():
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        net = module().to(dtype)
        model, _ = wrap(net, "topk:0.01/rice/qsgd:7")
        optimizer = sgd(net)
        for x, y in batches(4):
            optimizer.zero_grad()
            loss_of(model, x.to(dtype), y).backward()
            optimizer.step()
        assert all(p.grad.dtype == dtype for p in net.parameters())
        assert torch.isfinite(flat(net)).all()
        same_on_all_ranks(flat(net))
    mixed = [module() for _ in range(2)]
    for net in mixed:
        net[2].to(torch.bfloat16)
        net[1] = torch.nn.Sequential(torch.nn.ReLU(), Cast(torch.bfloat16))
        net[3] = torch.nn.Sequential(torch.nn.ReLU(), Cast(torch.float32))
    close(train("dense/raw", net=mixed[0])[0], train(net=mixed[1])[0], atol=2e-3)


class Cast(torch.nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, x):
        return x.to(self.dtype)


class Images(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.conv = torch.nn.Conv2d(4, 32, 5)
        self.norm = torch.nn.BatchNorm2d(32)
        self.out = torch.nn.Linear(32, 10)

    def forward(self, x):
        x = self.conv(x.view(-1, 4, 5, 5).to(memory_format=torch.channels_last))
        return self.out(torch.relu(self.norm(x)).flatten(1))


@check
def channels_last_is_another_order_in_memory_only():
    """A matrix of a convolution is the one of its shape, and buffers are broadcast between our collectives."""
    for spec in ("dense/raw", EACH, "powersgd:2"):
        plain, last = Images(), Images().to(memory_format=torch.channels_last)
        assert not last.conv.weight.is_contiguous()
        close(train(spec, net=last)[0], train(spec, net=plain)[0], atol=1e-5)
        assert all(p.grad.stride() == p.stride() for p in last.parameters())  # torch's fused optimizers rely on it


@check
def a_loss_scale_does_not_reach_the_memory():
    def scaled(scaler, **options):
        net = module()
        model, state = wrap(net, EACH, grad_scaler=scaler, **options)
        optimizer = sgd(net)
        for number, (x, y) in enumerate(batches(8)):
            optimizer.zero_grad()
            loss = scaler.scale(loss_of(model, x, y))
            if number == 5 and dist.get_rank() == 1:
                loss = loss * float("inf")
            loss.backward()
            scaler.step(optimizer)
            scaler.update()
        same_on_all_ranks(flat(net))
        return flat(net), state

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    changing, state = scaled(scaler)
    assert scaler.get_scale() == 2.0**12, scaler.get_scale()  # grown twice, halved once, grown once
    constant, expected = scaled(torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=100, backoff_factor=1.0 - 1e-9))
    close(changing, constant)
    ours, theirs = (one._buckets.exchange.state_dict()["residual"] for one in (state, expected))
    for name in ours:
        close(torch.from_numpy(ours[name]), torch.from_numpy(theirs[name]))


@check
def collectives_of_the_user_do_not_interfere():
    net = module()
    model, _ = wrap(net, EACH)
    optimizer = sgd(net)
    net[2].weight.register_hook(lambda gradient: dist.all_reduce(torch.ones(1000 + dist.get_rank() * 0)))
    for x, y in batches(6):
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        dist.all_reduce(loss.detach())
        optimizer.step()
    close(flat(net), train(EACH, steps=6)[0])


class Words(torch.nn.Module):
    """A table whose gradient is sparse. Every rank and step has other rows, some of them twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.table = torch.nn.Embedding(500, 40, sparse=True)
        self.out = torch.nn.Linear(40, 10)

    def forward(self, x):
        return self.out(self.table((x[:, :6].abs() * 100).long() % 500).mean(1))


@check
def sparse_gradients_are_exchanged_as_rows():
    net, plain = Words(), Words()
    ours, _ = train("dense/raw", net=net)
    close(ours, train(net=plain)[0])
    assert net.table.weight.grad.is_sparse and plain.table.weight.grad.is_sparse
    close(net.table.weight.grad.to_dense(), plain.table.weight.grad.to_dense())
    weights, state = train("topk:0.1/rice/raw", net=Words(), rules={"table*": "topk:0.2/raw"})
    same_on_all_ranks(weights)
    assert state._buckets.exchange.state_dict()["residual"]["table.weight"].any()
    sent = state.compression_stats()["last_step"]
    assert sent["bytes_out"] < 500 * 40, sent


@check
def several_models_and_frozen_parameters():
    def both(spec):
        nets = module(1), module(2)
        nets[0][0].weight.requires_grad_(False)
        models = [wrap(net, spec) for net in nets]
        optimizers = [sgd(net) for net in nets]
        for x, y in batches(4):
            for (model, _), optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                loss_of(model, x, y).backward()
                optimizer.step()
        return torch.cat([flat(net) for net in nets]), models[0][1]

    close(both("dense/raw")[0], both(None)[0])
    weights, state = both(EACH)
    same_on_all_ranks(weights)
    residuals = state._buckets.exchange.state_dict()["residual"]
    assert "2.weight" in residuals and "0.weight" not in residuals, residuals.keys()


@check
def what_a_rank_does_in_another_group_does_not_concern_the_others():
    alone = dist.new_group([0])
    if dist.get_rank() == 0:
        train(EACH, ddp={"process_group": alone}, process_group=alone, steps=2)
    same_on_all_ranks(train(EACH, steps=2)[0])


@check_under_every_launcher
def process_groups_train_apart():
    if dist.get_rank() == 0:
        dist.new_group([0], use_local_synchronization=True)  # by the numbers of their groups torch would name the next ones
    halves = [dist.new_group(list(range(odd, dist.get_world_size(), 2))) for odd in (0, 1)]
    own = halves[dist.get_rank() % 2]
    weights, state = train(EACH, ddp={"process_group": own}, process_group=own, steps=4)
    same_on_all_ranks(weights, own)
    rows = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, weights)
    assert not torch.equal(rows[0], rows[1])
    assert state.ranks == dist.get_world_size() // 2
    assert state.compression_stats()["steps"] == state.state_dict()["step"] == 4
    state.consolidate_state_dict()
    memories = state.state_dict()["memories"]
    assert sorted(memories) == ([*range(state.ranks)] if state.rank == 0 else [state.rank]), memories.keys()


@check
def one_rank_alone_is_plain_ddp():
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    ours, state = train(EACH, ddp={"process_group": alone}, process_group=alone, steps=4)
    assert torch.equal(ours, train(ddp={"process_group": alone}, steps=4)[0])
    assert state.state_dict()["step"] == 4
    state.load_state_dict(state.state_dict() | {"step": 10})
    assert state.state_dict()["step"] == 10
