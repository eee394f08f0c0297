"""Outer optimizers beside slow, readable ones, and beside torch's where it has them."""

import math

import numpy as np
import pytest

from grace_ext import ConfigError, registry
from grace_ext.outer import make_outer

SIZE, STEPS = 50, 6


def sgd(lr=1.0, momentum=0.0):
    velocity = 0.0

    def step(value, change):
        nonlocal velocity
        velocity = momentum * velocity + change
        return value - lr * velocity

    return step


def nesterov(lr=0.7, momentum=0.9):
    velocity = 0.0

    def step(value, change):
        nonlocal velocity
        velocity = momentum * velocity + change
        return value - lr * (change + momentum * velocity)

    return step


def adam(lr=0.01, beta1=0.9, beta2=0.99, eps=1e-3):
    first = second = number = 0.0

    def step(value, change):
        nonlocal first, second, number
        number += 1
        first = beta1 * first + (1 - beta1) * change
        second = beta2 * second + (1 - beta2) * change**2
        return value - lr * first / (1 - beta1**number) / (math.sqrt(second / (1 - beta2**number)) + eps)

    return step


def adamw(lr=0.001, weight_decay=0.01, steps=0, beta1=0.9, beta2=0.999, eps=1e-8):
    number = 0
    twin = adam(1.0, beta1, beta2, eps)

    def step(value, change):
        nonlocal number
        rate = lr * (1 + math.cos(math.pi * min(1, number / steps))) / 2 if steps else lr
        number += 1
        return value * (1 - rate * weight_decay) + rate * twin(0.0, change)

    return step


def yogi(lr=0.01, beta1=0.9, beta2=0.99, tau=1e-3):
    first, second = 0.0, tau**2

    def step(value, change):
        nonlocal first, second
        first = beta1 * first + (1 - beta1) * change
        sign = (second > change**2) - (second < change**2)
        second = second - (1 - beta2) * change**2 * sign
        return value - lr * first / (math.sqrt(second) + tau)

    return step


REFERENCES = {"sgd": sgd, "nesterov": nesterov, "adam": adam, "adamw": adamw, "yogi": yogi}
CASES = [
    ("sgd", {}),
    ("sgd", {"lr": 0.5, "momentum": 0.9}),
    ("nesterov", {}),
    ("nesterov", {"lr": 0.1, "momentum": 0.5}),
    ("adam", {}),
    ("adam", {"lr": 0.1, "beta1": 0.8, "beta2": 0.9, "eps": 0.1}),
    ("adamw", {}),
    ("adamw", {"lr": 0.1, "weight_decay": 0.5, "steps": 4, "eps": 0.1}),
    ("yogi", {}),
    ("yogi", {"lr": 0.1, "beta1": 0.5, "beta2": 0.9, "tau": 0.01}),
]


def changes():
    """Of very different sizes, with zeros."""
    random = np.random.default_rng(0)
    found = random.standard_normal((STEPS, SIZE)) * 10.0 ** random.integers(-5, 2, (STEPS, SIZE))
    found[random.random(found.shape) < 0.2] = 0
    return found.astype(np.float32)


def run(name, options, given):
    outer = registry.build("outer", name, options)
    values, state = np.linspace(-1, 1, SIZE, dtype=np.float32), outer.begin(SIZE)
    for number, change in enumerate(given, start=1):
        outer.step(values, change.copy(), state, number)
    assert set(state) == set(outer.fields)
    return values


def test_there_is_a_reference_for_each():
    assert sorted(REFERENCES) == registry.names("outer") == sorted({name for name, _ in CASES})


@pytest.mark.parametrize("name, options", CASES)
def test_each_does_what_its_slow_twin_does(name, options):
    given, found = changes(), run(name, options, changes())
    for i, value in enumerate(np.linspace(-1, 1, SIZE)):
        step = REFERENCES[name](**options)
        for change in given[:, i]:
            value = step(value, float(change))
        assert found[i] == pytest.approx(value, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(
    "name, options, kind, theirs",
    [
        ("sgd", {"lr": 0.5, "momentum": 0.9}, "SGD", {"lr": 0.5, "momentum": 0.9}),
        ("nesterov", {}, "SGD", {"lr": 0.7, "momentum": 0.9, "nesterov": True}),
        ("adam", {"eps": 0.1}, "Adam", {"lr": 0.01, "betas": (0.9, 0.99), "eps": 0.1}),
        ("adamw", {"lr": 0.01, "weight_decay": 0.3}, "AdamW", {"lr": 0.01, "weight_decay": 0.3}),
    ],
)
def test_each_does_what_torchs_does(name, options, kind, theirs):
    torch = pytest.importorskip("torch")
    p = torch.nn.Parameter(torch.linspace(-1, 1, SIZE))
    optimizer = getattr(torch.optim, kind)([p], **theirs)
    for change in changes():
        p.grad = torch.from_numpy(change)
        optimizer.step()
    np.testing.assert_allclose(run(name, options, changes()), p.detach().numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "spec, said",
    [
        ("sgd:0", "lr=0.0"),
        ("sgd:inf", "lr=inf"),
        ("sgd:momentum=1", "momentum=1.0"),
        ("nesterov:lr=-1", "lr=-1.0"),
        ("nesterov:momentum=-0.1", "momentum=-0.1"),
        ("adam:beta1=1", "beta1=1.0"),
        ("adam:beta2=nan", "beta2=nan"),
        ("adam:eps=0", "eps=0.0"),
        ("adamw:weight_decay=-1", "weight_decay=-1.0"),
        ("adamw:steps=-1", "steps=-1"),
        ("adamw:eps=0", "adamw: eps=0.0"),
        ("yogi:tau=inf", "tau=inf"),
        ("yogi:taw=1", "no option 'taw'"),
        ("lion", "lion"),
    ],
)
def test_what_makes_no_sense_is_refused(spec, said):
    with pytest.raises(ConfigError, match=said):
        make_outer(spec)


def test_a_spec_or_an_object():
    outer = make_outer("nesterov:lr=0.7:momentum=0.9")
    assert make_outer(outer) is outer and outer == make_outer("nesterov") and str(outer) == "nesterov"


def test_the_rate_of_adamw_falls_to_zero_as_a_cosine():
    outer = make_outer("adamw:0.1:steps=4")
    np.testing.assert_allclose(
        [outer.rate(number) for number in range(1, 7)], [0.1, 0.0853553, 0.05, 0.0146447, 0, 0], atol=1e-6
    )
    assert make_outer("adamw:0.1").rate(1000) == 0.1
