"""AdamW for local steps, whose second moment is that of the mean gradient of all workers.

    optimizer = LocalAdamW(model.parameters(), lr=1e-3, workers=4)
    local = LocalSteps(model, optimizer, steps=5)

AdamW: Loshchilov and Hutter, Decoupled weight decay regularization, ICLR 2019, algorithm 2. The second moment by rows and columns:
Shazeer and Stern, Adafactor, ICML 2018, section 3. What it has to do with the size of batches: Wang and Aitchison, Batch size
invariant Adam, arXiv 2402.18824, which goes the other way.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from grace_ext import ConfigError
from grace_ext.kernels.local_adamw import local_adamw_step

from ._torch.host_arrays import flat, kernels_are_faster, suit_kernels

__all__ = ["LocalAdamW"]


@functools.lru_cache(maxsize=16)
def _averaging(step: int, workers: int, warmup_steps: int) -> tuple[float, float]:
    """The factor c of the average of gradients in a step, and what the new average is multiplied by, since it began with 0."""
    c = _factor(step, workers, warmup_steps)
    left, number = c ** max(step - warmup_steps, 0), 0  # of the 0
    while number < min(step, warmup_steps) and left > 1e-12:  # less is below float32's precision
        number += 1
        left *= _factor(number, workers, warmup_steps)
    return c, 1 / (1 - left)


def _factor(step: int, workers: int, warmup_steps: int) -> float:
    n = workers if step >= warmup_steps else 1 + (workers - 1) * (step / warmup_steps)
    return (n - 1) / (n + 1)


class LocalAdamW(torch.optim.Optimizer):
    """AdamW that makes as large steps on a worker's small batches as it would make on the batches of all workers together.

    A gradient is a mean over a batch, so that the square of its noise is as many times larger on one of n workers as there are
    workers. Adam divides by the root of the second moment, which has this noise in it: n workers that make local steps, each with
    an AdamW of its own, move by less, up to n times where few of them meet an element at all, than one AdamW does with the mean
    of their gradients. Here the second moment is that of a moving average a of a worker's own gradients g, over so many steps that
    its noise is that of the mean of n gradients. A worker sees few samples, so that it would know the second moment of an element
    badly: it keeps the mean over each row, r, and over each column, q, of a matrix, and their product stands for the element's. A
    parameter with more dimensions is a matrix of its first one and all others; one with fewer, a vector of biases or gains, has one
    second moment, the mean over its elements. With c = (n - 1) / (n + 1) and the step t, from 1 on,

        a = c a + (1 - c) g;   s = (a / (1 - c^t))^2;   m = beta1 m + (1 - beta1) g
        r_i = beta2 r_i + (1 - beta2) mean over j of s_ij;   q_j = beta2 q_j + (1 - beta2) mean over i of s_ij
        v_ij = r_i q_j / (mean of r) / (1 - beta2^t)
        p = p - lr weight_decay p - lr (m / (1 - beta1^t)) / (sqrt(v) + eps)

    Steps that are too large at the start of a training do lasting harm, and the moving average smooths away gradients that change their
    sign from step to step as it does noise. So the first second moments are those of a worker's own gradients, which make its steps
    small: up to step warmup_steps, n is replaced by 1 + (n - 1) t / warmup_steps, and c^t always by the product of the c so far.

    With one worker it is AdamW with such a second moment. Its steps are larger than those of an AdamW of a worker's own, so that
    workers move further apart between two exchanges, the more so the longer rounds are. It has nothing to do with the exchange, and
    sends nothing. It keeps two arrays as large as the parameters and of their type, m and a, as AdamW does. With up to two threads of
    torch, a kernel makes the step of contiguous float32 parameters on the host; it rounds otherwise than torch's operations.

    Args:
        params: Parameters, or groups of them, as in torch.optim.AdamW.
        lr: Learning rate: the one that AdamW would need with the mean gradient of all workers.
        betas: Factors of both moments, from 0 to below 1. A longer memory of the first than 0.8 takes a worker's own noise into later
            rounds; a shorter one of the second than 0.99 makes a worker's too noisy.
        eps: Is added to the root of the second moment, above 0.
        weight_decay: The share of a parameter, times lr, by which it shrinks in a step, from 0 on.
        workers: The number n of workers, whose batches are alike in size.
        warmup_steps: The number of first steps in which the number of workers that is allowed for rises, from 0 on; 0: not at all.

    Raises:
        ConfigError: An argument is out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.8, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        workers: int,
        warmup_steps: int = 1000,
    ):
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "workers": workers, "warmup_steps": warmup_steps})

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("warmup_steps", 0)  # in states that were saved before there were any

    def load_state_dict(self, state_dict: dict) -> None:
        """Load what `state_dict` gave, as in torch.optim.Optimizer, but for `workers`, which stay those that there are now.

        Args:
            state_dict: The state.

        Raises:
            ConfigError: It is another optimizer's.
        """
        if not all("workers" in group for group in state_dict["param_groups"]):
            raise ConfigError("LocalAdamW: the state is that of another optimizer; allowed: one of LocalAdamW")
        workers = [group["workers"] for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, own in zip(self.param_groups, workers, strict=True):
            group["workers"] = own

    def add_param_group(self, param_group: dict) -> None:
        """Add a group of parameters, as in torch.optim.Optimizer.

        Args:
            param_group: The parameters, under "params", and their options.

        Raises:
            ConfigError: An option is out of range.
        """
        options = {**self.defaults, **param_group}
        workers = options["workers"]
        if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
            raise ConfigError(f"LocalAdamW: workers={workers}; allowed: integers from 1")
        warmup = options["warmup_steps"]
        if isinstance(warmup, bool) or not isinstance(warmup, int) or warmup < 0:
            raise ConfigError(f"LocalAdamW: warmup_steps={warmup}; allowed: integers from 0")
        if not 0 <= options["lr"] < math.inf:
            raise ConfigError(f"LocalAdamW: lr={options['lr']}; allowed: from 0 and finite")
        if not all(0 <= beta < 1 for beta in options["betas"]):
            raise ConfigError(f"LocalAdamW: betas={options['betas']}; allowed: from 0 to below 1")
        if not 0 < options["eps"] < math.inf:
            raise ConfigError(f"LocalAdamW: eps={options['eps']}; allowed: above 0 and finite")
        if not 0 <= options["weight_decay"] < math.inf:
            raise ConfigError(f"LocalAdamW: weight_decay={options['weight_decay']}; allowed: from 0 and finite")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step.

        Args:
            closure: Computes the loss once more and returns it; None for nothing.

        Returns:
            What the closure returned.

        Raises:
            ConfigError: A gradient is sparse or complex.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._step(p, p.grad, group)
        return loss

    def _step(self, p: torch.Tensor, gradient: torch.Tensor, group: dict) -> None:
        if gradient.is_sparse or torch.is_complex(p):
            raise ConfigError("LocalAdamW: a gradient is sparse or complex; allowed: dense and real ones")
        if not p.numel():
            return
        state, (beta1, beta2) = self.state[p], group["betas"]
        columns = math.prod(p.shape[1:]) if p.ndim >= 2 else 1  # of the second moment
        if not state:
            state["step"] = torch.zeros(())  # as torch's optimizers have it
            for field in ("exp_avg", "exp_avg_grad"):
                state[field] = torch.zeros_like(p, memory_format=torch.preserve_format)
            state["exp_avg_sq_row"] = p.new_zeros(len(p) if p.ndim >= 2 else 1, 1)
            state["exp_avg_sq_column"] = p.new_zeros(1, columns)
        state["step"] += 1
        t = int(state["step"])
        c, unbias = _averaging(t, group["workers"], group["warmup_steps"])
        shrink, value = 1 - group["lr"] * group["weight_decay"], -group["lr"] / (1 - beta1**t)
        average, first = state["exp_avg_grad"], state["exp_avg"]
        row, column = state["exp_avg_sq_row"], state["exp_avg_sq_column"]
        arrays = (p, gradient, first, average, row, column)
        if kernels_are_faster() and suit_kernels(*arrays):
            numbers = (1 - beta1, 1 - c, 1 - beta2, unbias**2, 1 / (1 - beta2**t), group["eps"], value, shrink)
            local_adamw_step(*map(flat, arrays), *map(float, numbers))
            torch.autograd.graph.increment_version(p)
            return
        squares = (average.lerp_(gradient, 1 - c) * unbias).square_().reshape(len(row), -1)
        row.lerp_(squares.mean(1, keepdim=True), 1 - beta2)
        column.lerp_(squares.mean(0 if columns > 1 else (0, 1), keepdim=True), 1 - beta2)
        root = (
            (row / row.mean().clamp_(min=torch.finfo(row.dtype).tiny) * column).div_(1 - beta2**t).sqrt_().add_(group["eps"])
        )
        first.lerp_(gradient, 1 - beta1)
        p.mul_(shrink).addcdiv_(first, root.expand_as(squares).reshape(p.shape), value=value)
