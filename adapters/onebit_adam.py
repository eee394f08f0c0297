"""1-bit Adam for PyTorch on Horovod.

    optimizer = OneBitAdam(torch.optim.Adam(model.parameters()), model.named_parameters(), warmup_steps=500)

Tang, Gan, Awan, Rajbhandari, Li, Lian, Liu, Zhang and He, 1-bit Adam: communication efficient large-scale training with
Adam's convergence speed, ICML 2021, algorithm 1.
"""

import functools

import horovod.torch as hvd
import torch

from grace_ext import ConfigError

from ._onebit_buckets import OneBitBuckets
from .horovod_torch import DistributedOptimizer

_EXACT = {"raw": "dense/raw", "fp16": "dense/fp16"}
_REFUSED = ("fused", "capturable", "differentiable")


def OneBitAdam(optimizer, named_parameters=None, compression="dense/onebit", *, warmup_steps, warmup="raw",
               precondition=True, memory="residual", **options):
    """Wrap a torch.optim.Adam or AdamW: exact gradients for `warmup_steps` steps, then a frozen variance and compressed
    momentum with error feedback.

    With m and v Adam's exp_avg and exp_avg_sq and T the number of v's updates, a step t after the warm-up is, on rank i,

        m_i = beta1 * m + (1 - beta1) * g_i;   m = the mean over ranks of compressed m_i;
        p = p - lr / (1 - beta1**t) * m / d,   d = sqrt(v / (1 - beta2**T)) + eps

    so d stays as it is when the warm-up ends, and the correction of the momentum goes on. Every rank gets the mean of all
    ranks' compressed momenta from this library's exchange (containers by allgather), where the paper compresses that mean
    once more on its way back from a server.

    compression, rules: of the momentum, after the warm-up; as in DistributedOptimizer, tensors of at most 1024 elements or
        fewer than two dimensions are sent as they are unless a rule says otherwise.
    warmup_steps: how many of Adam's steps come before, from 1 on; the paper takes 15 to 25 % of all. What a checkpoint of
        plain Adam has behind it counts. A step that GradScaler skips does not.
    warmup: how gradients travel until then: "raw", or "fp16".
    precondition: compress m_i / d in the place of m_i, and multiply what is received with d. d is the same on all ranks, so
        without compression nothing changes. With it, the error is of the order of lr for all elements; in the paper's form
        (False) those of small variance get the error of their neighbours, divided by their own small d.
    memory: "residual", a mapping of patterns to specs, or another that is error feedback.
    options: all others of DistributedOptimizer.

    After the warm-up `synchronize()` leaves the new momentum in p.grad, the same on all ranks; `step()` takes it from there
    as exp_avg. What is clipped in between is the momentum, for good. With one rank it stays the gradient until step().
    exp_avg and exp_avg_sq are up to date at all times, so Adam itself can go on from a checkpoint, and this from Adam's.
    An element whose gradient was zero throughout the warm-up has no variance to be divided by: it takes the largest one of
    its tensor (1 if all are zero). weight_decay: Adam's is part of the gradient, so of the momentum too; AdamW's shrinks
    the parameters in the step, as in torch. lr and beta1 may change at any time, and differ between groups.

    Raises ConfigError for another optimizer, for fused, capturable or differentiable ones, for closures, for parameters
    that come in after the warm-up, and for what DistributedOptimizer refuses.
    """
    kind = next((kind for kind in (torch.optim.AdamW, torch.optim.Adam) if isinstance(optimizer, kind)), None)
    if kind is None:
        raise ConfigError(f"OneBitAdam wraps torch.optim.Adam and AdamW, not {type(optimizer).__name__}")
    for name in _REFUSED:
        if any(group[name] for group in optimizer.param_groups):
            raise ConfigError(f"OneBitAdam: {name}=True is not supported")
    if not isinstance(warmup_steps, int) or warmup_steps < 1:
        raise ConfigError(f"warmup_steps={warmup_steps}; allowed: integers from 1: the variance must be known")
    if warmup not in _EXACT:
        raise ConfigError(f"warmup={warmup!r}; allowed: {', '.join(_EXACT)}")
    if compression in (hvd.Compression.none, hvd.Compression.fp16):
        raise ConfigError("OneBitAdam: compression is a spec, such as 'dense/onebit'")
    buckets = functools.partial(OneBitBuckets, warmup=_EXACT[warmup], precondition=precondition)
    plain = type(kind.__name__, (_OneBitStep, kind), {"_warmup_steps": warmup_steps})
    wrapped = DistributedOptimizer(optimizer, named_parameters, compression, memory=memory, **options,
                                   _plain=plain, _buckets=buckets)
    wrapped._count()
    return wrapped


class _OneBitStep:
    """Between a class of torch and the wrapped one: the step, and what it counts.

    Each param group has "warmup_left", each parameter's state "variance_step", the number of updates of its variance. Both
    are plain integers, saved and broadcast with the rest.
    """

    @property
    def is_frozen(self) -> bool:
        """Whether the warm-up is over."""
        return self.param_groups[0]["warmup_left"] == 0

    def step(self, closure=None):
        if closure is not None:
            raise ConfigError("OneBitAdam.step takes no closure: its gradients would come after the exchange")
        if self.is_frozen:
            return self._frozen_step()
        super().step()
        for group in self.param_groups:
            group["warmup_left"] -= 1
            for p in group["params"]:
                if state := self.state.get(p):
                    state["variance_step"] = int(state["step"])
        if self.is_frozen:
            self._fill_variances()
        return None

    @torch.optim.Optimizer.profile_hook_step
    @torch.no_grad()
    def _frozen_step(self):
        exchanged = isinstance(self._grace, OneBitBuckets)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, gradient = self.known(p), p.grad
                if not exchanged:
                    gradient = gradient.float().reshape(-1)
                    self.to_momentum(group, p, gradient, 1.0)
                    gradient = gradient.view(p.shape)
                state["step"] += 1
                momentum = state["exp_avg"].copy_(gradient)
                if group["decoupled_weight_decay"] and group["weight_decay"]:
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                rate = float(group["lr"]) / (1 - float(group["betas"][0]) ** int(state["step"]))
                p.addcdiv_(momentum, self.denominator(group, p), value=-rate)

    def known(self, p) -> dict:
        """The state of a parameter with a variance."""
        state = self.state.get(p)
        if not state:
            raise ConfigError("OneBitAdam: a parameter got its first gradient after the warm-up, so it has no variance")
        return state

    def denominator(self, group, p) -> torch.Tensor:
        """What the momentum is divided by, of p's shape."""
        state = self.known(p)
        corrected = (1 - float(group["betas"][1]) ** state["variance_step"]) ** 0.5
        return (self._variance(group, state).sqrt() / corrected).add_(group["eps"])

    def to_momentum(self, group, p, gradient: torch.Tensor, scale: float) -> None:
        """In place, float32[d]: this rank's gradient becomes its new momentum / scale. The gradient is of what p.grad will
        be; scale: what the mean over ranks of the results is multiplied with."""
        beta = float(group["betas"][0])
        gradient.mul_((beta - 1) if group["maximize"] else (1 - beta))
        gradient.add_(_flat(self.known(p)["exp_avg"], gradient), alpha=beta / scale)
        if group["weight_decay"] and not group["decoupled_weight_decay"]:
            gradient.add_(_flat(p, gradient), alpha=(1 - beta) * group["weight_decay"] / scale)

    @staticmethod
    def _variance(group, state) -> torch.Tensor:
        return state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]

    @torch.no_grad()
    def _fill_variances(self) -> None:
        """Where the variance is zero, it becomes the largest one of the tensor. A maximum is the same on all machines."""
        for group in self.param_groups:
            for p in group["params"]:
                if self.state.get(p) and p.numel():
                    variance = self._variance(group, self.state[p])
                    largest = variance.max()
                    variance.masked_fill_(variance == 0, largest if largest > 0 else 1.0)

    def _count(self) -> None:
        """Set the counters where there are none: the optimizer, or a checkpoint, is plain Adam's."""
        states = [state for state in self.state.values() if "step" in state]
        for state in states:
            state.setdefault("variance_step", int(state["step"]))
        left = max(0, self._warmup_steps - max((state["variance_step"] for state in states), default=0))
        for group in self.param_groups:
            group.setdefault("warmup_left", left)
        if self.is_frozen:
            self._fill_variances()

    def __setstate__(self, state):
        super().__setstate__(state)
        self._count()

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        if isinstance(self._grace, OneBitBuckets):
            self._grace.follow_stage()

    def add_param_group(self, param_group):
        if self.is_frozen:
            raise ConfigError("OneBitAdam: add_param_group after the warm-up; new parameters would have no variance")
        super().add_param_group({**param_group, "warmup_left": self.param_groups[0]["warmup_left"]})


def _flat(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).to(like.device)
