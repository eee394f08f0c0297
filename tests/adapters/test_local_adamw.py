"""AdamW for local steps, in one process: it exchanges nothing."""

import copy
import math

import pytest

from grace_ext import ConfigError

torch = pytest.importorskip("torch")

from grace_ext.adapters import local_adamw  # noqa: E402
from grace_ext.adapters.local_adamw import LocalAdamW  # noqa: E402

BETAS, EPS = (0.9, 0.99), 1e-8


def parameters(shape=(10, 5)):
    """A parameter of this shape and a vector."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator).requires_grad_() for size in (shape, (25,))]


def run(optimizer, ps, steps, first=0, scale=1.0):
    """Make steps with random gradients, the same for each call."""
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        for p in ps:
            p.grad = scale * torch.randn(p.shape, generator=generator)
        optimizer.step()


def groups(ps):
    return [{"params": ps[:1], "weight_decay": 0.1}, {"params": ps[1:], "lr": 3e-2, "weight_decay": 0.0}]


def test_with_one_worker_and_numbers_it_is_adamw():
    """The second moment of a number is its own."""
    ours, theirs = ([torch.full((), value, requires_grad=True) for value in (1.0, -2.0)] for _ in range(2))
    run(LocalAdamW(groups(ours), 1e-2, BETAS, EPS, workers=1), ours, 20)
    run(torch.optim.AdamW(groups(theirs), 1e-2, BETAS, EPS), theirs, 20)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.fixture(params=["kernel", "torch"])
def made_by(request, monkeypatch):
    """What makes the steps."""
    monkeypatch.setattr(local_adamw, "kernels_are_faster", lambda: request.param == "kernel")


@pytest.mark.usefixtures("made_by")
@pytest.mark.parametrize("workers, warmup", [(1, 0), (2, 0), (4, 0), (64, 0), (4, 1), (4, 20), (64, 100)])
@pytest.mark.parametrize("shape", [(10, 5), (5, 1), (1, 5), (4, 3, 2, 2), (7,), (), (0, 3), (3, 0), (0,)])
def test_it_is_its_formula(workers, warmup, shape):
    (ours, _), (slow, _) = parameters(shape), parameters(shape)
    optimizer = LocalAdamW([ours], 1e-2, BETAS, EPS, 0.1, workers=workers, warmup_steps=warmup)
    p, started = slow.detach().double(), 1.0
    a, m, moment = torch.zeros_like(p), torch.zeros_like(p), torch.zeros_like(p)
    for t in range(1, 31):
        run(optimizer, [ours], 1, first=t)
        g = ours.grad.double()
        n = workers if t >= warmup else 1 + (workers - 1) * t / warmup
        c = (n - 1) / (n + 1)
        started *= c
        a = c * a + (1 - c) * g
        m = BETAS[0] * m + (1 - BETAS[0]) * g
        moment = BETAS[1] * moment + (1 - BETAS[1]) * (a / (1 - started)) ** 2
        if p.ndim < 2:
            v = moment.mean().expand(p.shape)
        else:
            matrix = moment.flatten(1)
            v = torch.outer(matrix.mean(1), matrix.mean(0)).div(matrix.mean()).view(p.shape)
        root = (v / (1 - BETAS[1] ** t)).sqrt() + EPS
        p = p - 1e-2 * 0.1 * p - 1e-2 * m / (1 - BETAS[0] ** t) / root
    torch.testing.assert_close(ours.detach().double(), p, rtol=1e-4, atol=1e-5)


def moved(make, rare, workers=4, steps=300, rows=200):
    """How far the mean of workers moves that step by themselves, and how far one moves that has the mean of their gradients: the root
    mean square over elements. rare: how often a row of a worker's gradient is not 0."""
    ps = [torch.zeros(rows, 10, requires_grad=True) for _ in range(workers + 1)]
    optimizers = [make(p) for p in ps[:-1]] + [torch.optim.AdamW([ps[-1]], 1e-3, BETAS, EPS, 0.0)]
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        gradients = torch.randn(workers, rows, 10, generator=generator)
        gradients *= torch.rand(workers, rows, 1, generator=generator) < rare
        for p, gradient in zip(ps, [*gradients, gradients.mean(0)], strict=True):
            p.grad = gradient
        for optimizer in optimizers:
            optimizer.step()
    total = torch.stack([p.detach() for p in ps[:-1]]).mean(0)
    return float(total.square().mean().sqrt() / ps[-1].detach().square().mean().sqrt())


@pytest.mark.parametrize("rare", [1.0, 0.1])
def test_workers_move_as_far_as_one_adamw_with_the_mean_of_their_gradients(rare):
    alone = moved(lambda p: torch.optim.AdamW([p], 1e-3, BETAS, EPS, 0.0), rare)
    ours = moved(lambda p: LocalAdamW([p], 1e-3, BETAS, EPS, 0.0, workers=4, warmup_steps=0), rare)
    assert alone < 0.7, alone  # 1/2, the root of the number of workers, or less where elements are rare
    assert abs(ours - 1) < 0.25 and abs(ours - 1) < 0.5 * abs(alone - 1), (ours, alone)


def test_a_saved_state_goes_on_bit_for_bit():
    ours, resumed = parameters(), parameters()
    optimizer = LocalAdamW(groups(ours), 1e-2, BETAS, workers=4)
    run(optimizer, ours, 5)
    with torch.no_grad():
        for p, q in zip(ours, resumed, strict=True):
            q.copy_(p)
    second = LocalAdamW(groups(resumed), 1e-2, BETAS, workers=4)
    second.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch would share the tensors
    run(optimizer, ours, 5, first=5)
    run(second, resumed, 5, first=5)
    assert all(torch.equal(p, q) for p, q in zip(ours, resumed, strict=True))


def test_a_state_leaves_the_number_of_workers_as_it_is():
    optimizer = LocalAdamW(groups(parameters()), 1e-2, BETAS, workers=4)
    fewer = LocalAdamW(groups(parameters()), 1e-3, BETAS, workers=3)
    fewer.load_state_dict(optimizer.state_dict())
    assert [(group["workers"], group["lr"]) for group in fewer.param_groups] == [(3, 1e-2), (3, 3e-2)]
    with pytest.raises(ConfigError, match="that of another optimizer"):
        fewer.load_state_dict(torch.optim.AdamW(groups(parameters())).state_dict())


def test_a_state_that_is_older_than_warmup_goes_on_without():
    ours, resumed = parameters(), parameters()
    optimizer = LocalAdamW(groups(ours), 1e-2, BETAS, workers=4, warmup_steps=0)
    second = LocalAdamW(groups(resumed), 1e-2, BETAS, workers=4)
    state = copy.deepcopy(optimizer.state_dict())
    for group in state["param_groups"]:
        del group["warmup_steps"]
    second.load_state_dict(state)
    run(optimizer, ours, 5)
    run(second, resumed, 5)
    assert all(torch.equal(p, q) for p, q in zip(ours, resumed, strict=True))


def test_arrays_as_large_as_the_parameter_are_two():
    p, _ = parameters((30, 20))
    optimizer = LocalAdamW([p], 1e-2, workers=4)
    run(optimizer, [p], 1)
    assert sum(value.numel() for value in optimizer.state[p].values()) == 2 * 600 + 30 + 20 + 1


def test_a_kernel_or_torch_may_make_each_step(monkeypatch):
    """The number of threads may change, and a checkpoint may be loaded elsewhere."""
    ours, mixed = parameters((30, 70)), parameters((30, 70))
    optimizers = [LocalAdamW(groups(ps), 1e-2, workers=4) for ps in (ours, mixed)]
    for t in range(20):
        for number, (optimizer, ps) in enumerate(zip(optimizers, (ours, mixed), strict=True)):
            monkeypatch.setattr(local_adamw, "kernels_are_faster", lambda number=number, t=t: number == 0 or t % 3 == 0)
            run(optimizer, ps, 1, first=t)
    for p, q in zip(ours, mixed, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        for field, value in optimizers[0].state[p].items():
            torch.testing.assert_close(value, optimizers[1].state[q][field], rtol=1e-5, atol=1e-6)


def test_autograd_sees_that_a_kernel_changed_a_parameter():
    p = torch.ones(3, requires_grad=True)
    optimizer = LocalAdamW([p], 1e-2, workers=4)
    square = (p * p).sum()
    p.grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.backward()


def test_channels_last_changes_nothing():
    (p, _), (q, _) = parameters((4, 3, 5, 5)), parameters((4, 3, 5, 5))
    q = q.detach().to(memory_format=torch.channels_last).requires_grad_()
    for one in (p, q):
        run(LocalAdamW([one], 1e-2, workers=4), [one], 5)
    torch.testing.assert_close(p.detach(), q.detach().contiguous())


def test_a_step_of_zeros_and_parameters_without_a_gradient_change_nothing():
    (p, q), before = parameters(), parameters()
    optimizer = LocalAdamW([p, q], 1e-2, weight_decay=0.0, workers=4)
    p.grad = torch.zeros_like(p)
    assert optimizer.step(lambda: 3.5) == 3.5
    assert torch.equal(p, before[0]) and torch.equal(q, before[1]) and q not in optimizer.state


@pytest.mark.parametrize(
    "wrong, says",
    [
        ({"workers": 0}, "workers=0"),
        ({"workers": 2.0}, "workers=2.0"),
        ({"workers": True}, "workers=True"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
        ({"warmup_steps": 0.5}, "warmup_steps=0.5"),
        ({"lr": -1.0}, "lr=-1.0"),
        ({"lr": math.inf}, "lr=inf"),
        ({"betas": (0.9, 1.0)}, "betas="),
        ({"eps": 0.0}, "eps=0.0"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
    ],
)
def test_what_is_out_of_range_is_refused(wrong, says):
    with pytest.raises(ConfigError, match=f"LocalAdamW: {says}"):
        LocalAdamW(parameters(), **{"workers": 4, **wrong})
    with pytest.raises(ConfigError, match=f"LocalAdamW: {says}"):
        LocalAdamW([{"params": parameters(), **wrong}], workers=4)


def test_a_gradient_that_is_sparse_or_complex_is_refused():
    table = torch.nn.Embedding(10, 3, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="sparse or complex"):
        LocalAdamW(table.parameters(), workers=2).step()
    complex_ = torch.zeros(3, dtype=torch.complex64, requires_grad=True)
    complex_.grad = torch.ones_like(complex_)
    with pytest.raises(ConfigError, match="sparse or complex"):
        LocalAdamW([complex_], workers=2).step()
