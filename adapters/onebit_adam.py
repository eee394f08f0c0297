"""1-bit Adam for PyTorch on Horovod.

    optimizer = OneBitAdam(torch.optim.Adam(model.parameters()), model.named_parameters(), warmup_steps=500)

Tang, Gan, Awan, Rajbhandari, Li, Lian, Liu, Zhang and He, 1-bit Adam: communication efficient large-scale training with
Adam's convergence speed, ICML 2021, algorithm 1.
"""

import functools
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import horovod.torch as hvd
import torch

from grace_ext import ConfigError
from grace_ext._util.numerics import power_of_two
from grace_ext.memory import Memory
from grace_ext.pipeline.compressor import Compressor

from ._torch.onebit_buckets import OneBitBuckets
from ._torch.wrapped_optimizer import TorchOptions, wrap

_EXACT = {"raw": "dense/raw", "fp16": "dense/fp16"}
_REFUSED = ("fused", "capturable", "differentiable")


def OneBitAdam(
    optimizer: torch.optim.Adam | torch.optim.AdamW,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: str | dict | Compressor = "dense/onebit",
    *,
    warmup_steps: int,
    warmup: str = "raw",
    variance_floor: float = 0.1,
    memory: str | dict | Memory = "residual",
    **options: Any,
) -> Any:
    """Wrap a torch.optim.Adam or AdamW: exact gradients at first, then a frozen variance and compressed momentum.

    With m and v Adam's exp_avg and exp_avg_sq and T the number of v's updates, a step t after the warm-up is, on rank i,

        m_i = beta1 * m + (1 - beta1) * g_i;   m = the mean over ranks of compressed m_i;
        p = p - lr / (1 - beta1**t) * m / d,   d = sqrt(v / (1 - beta2**T)) + eps

    so d stays as it is when the warm-up ends, and the correction of the momentum goes on. Every rank gets the mean of all
    ranks' compressed momenta from this library's exchange (containers by allgather), where the paper compresses that mean
    once more on its way back from a server.

    After the warm-up `synchronize()` leaves the new momentum in p.grad, the same on all ranks, and `step()` takes it from
    there as exp_avg. What is clipped in between is the momentum, permanently. With one rank p.grad stays the gradient until
    step(). exp_avg is up to date at all times, so Adam itself can go on from a checkpoint of this optimizer, and this
    optimizer from one of Adam's. weight_decay: Adam's is part of the gradient, so of the momentum too; AdamW's shrinks the
    parameters in the step, as in torch. lr and betas may differ between groups, and lr may change at any time.

    Args:
        optimizer: The optimizer to wrap.
        named_parameters: See horovod_torch.DistributedOptimizer.
        compression: The spec of the momentum after the warm-up. As in DistributedOptimizer, tensors of at most 1024 elements
            or fewer than two dimensions are sent as they are unless a rule says otherwise.
        warmup_steps: How many of Adam's steps come before, from 1 on; the paper takes 15 to 25 % of all. Steps that are
            behind a checkpoint of plain Adam count. A step that GradScaler skips does not.
        warmup: How gradients travel until then: "raw", or "fp16".
        variance_floor: When the variance is frozen, an element gets at least this share of the mean of its tensor, 0 being the
            paper's algorithm. Without it training can diverge, however little is lost in compression: the gradient of an
            element that was nearly always zero in the warm-up may become much larger than its variance then says, and for all
            elements with a small variance the error of compression, which is that of their neighbors, is divided by it.
        memory: "residual", a mapping of patterns to specs, or another that is error feedback.
        **options: All others of horovod_torch.DistributedOptimizer.

    Returns:
        The wrapped optimizer.

    Raises:
        ConfigError: The optimizer is another one, or fused, capturable or differentiable; join() is called; parameters come
            in after the warm-up; or DistributedOptimizer refuses something.
        TypeError: An option is unknown.
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
    if not 0 <= variance_floor < math.inf:
        raise ConfigError(f"variance_floor={variance_floor}; allowed: finite and not negative")

    def buckets_for(optimizer: torch.optim.Optimizer) -> Callable:
        return functools.partial(OneBitBuckets, optimizer, warmup=_EXACT[warmup])

    plain = type(kind.__name__, (_OneBitStep, kind), {"_warmup_steps": warmup_steps, "_variance_floor": variance_floor})
    shared = TorchOptions.from_keywords(options, compression=compression, memory=memory)
    wrapped = wrap(optimizer, named_parameters, shared, plain, buckets_for)
    wrapped._count()
    return wrapped


if TYPE_CHECKING:
    from torch.optim import Adam as _Adam  # or AdamW: the class beside it in what OneBitAdam makes
else:
    _Adam = object


class _OneBitStep(_Adam):
    """The step of 1-bit Adam, and its counters: a base between torch's class and the wrapped one.

    Each param group has "warmup_left", each parameter's state "variance_step", the number of updates of its variance. Both
    are plain integers, saved and broadcast with the rest.
    """

    @property
    def is_frozen(self) -> bool:
        """Whether the warm-up is over."""
        return self.param_groups[0]["warmup_left"] == 0

    def step(self, closure: Callable | None = None) -> Any:
        loss = None
        if closure is not None:  # here, since the exchange in it follows the stage
            with torch.enable_grad():
                loss = closure()
        if self.is_frozen:
            self._frozen_step()
            return loss
        super().step()
        for group in self.param_groups:
            group["warmup_left"] -= 1
            for p in group["params"]:
                if state := self.state.get(p):
                    state["variance_step"] = int(state["step"])
        if self.is_frozen:
            self._freeze()
        return loss

    @torch.optim.Optimizer.profile_hook_step
    @torch.no_grad()
    def _frozen_step(self) -> None:
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
                if group["weight_decay"] and self._is_decoupled(group):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                rate = float(group["lr"]) / (1 - float(group["betas"][0]) ** int(state["step"]))
                p.addcdiv_(momentum, self.denominator(group, p), value=-rate)

    def known(self, p: torch.nn.Parameter) -> dict:
        """The state of a parameter. Raises ConfigError for one without a variance."""
        state = self.state.get(p)
        if not state:
            raise ConfigError("OneBitAdam: a parameter got its first gradient after the warm-up, so it has no variance")
        return state

    def denominator(self, group: dict, p: torch.nn.Parameter) -> torch.Tensor:
        """What the momentum is divided by, of p's shape."""
        state = self.known(p)
        corrected = (1 - float(group["betas"][1]) ** state["variance_step"]) ** 0.5
        return (self._variance(group, state).sqrt() / corrected).add_(group["eps"])

    def to_momentum(self, group: dict, p: torch.nn.Parameter, gradient: torch.Tensor, scale: float) -> None:
        """Turn this rank's gradient, float32[d], into its new momentum / scale, in place. scale: what the mean over ranks of
        the results is multiplied with."""
        beta = float(group["betas"][0])
        gradient.mul_((beta - 1) if group["maximize"] else (1 - beta))
        gradient.add_(_flat(self.known(p)["exp_avg"], gradient), alpha=beta / scale)
        if group["weight_decay"] and not self._is_decoupled(group):
            gradient.add_(_flat(p, gradient), alpha=(1 - beta) * group["weight_decay"] / scale)

    def _is_decoupled(self, group: dict) -> bool:
        return group.get("decoupled_weight_decay", isinstance(self, torch.optim.AdamW))  # a key of newer torch

    @staticmethod
    def _variance(group: dict, state: dict) -> torch.Tensor:
        return state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]

    @torch.no_grad()
    def _freeze(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if self.state.get(p) and self._variance_floor:
                    variance = self._variance(group, self.state[p])
                    variance.clamp_(min=power_of_two(self._variance_floor * variance.double().mean().item()))

    def _count(self) -> None:
        """Set the counters where there are none: the optimizer, or a checkpoint, is plain Adam's."""
        if all("warmup_left" in group for group in self.param_groups):
            return
        states = [state for state in self.state.values() if "step" in state]
        for state in states:
            state["variance_step"] = int(state["step"])
        steps = max((state["variance_step"] for state in states), default=0)
        for group in self.param_groups:
            group["warmup_left"] = max(0, self._warmup_steps - steps)
        if self.is_frozen:
            self._freeze()

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._count()

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict)
        if isinstance(self._grace, OneBitBuckets):
            self._grace.follow_stage()

    def add_param_group(self, param_group: dict) -> None:
        if self.is_frozen:
            raise ConfigError("OneBitAdam: add_param_group after the warm-up; new parameters would have no variance")
        super().add_param_group({**param_group, "warmup_left": self.param_groups[0]["warmup_left"]})


def _flat(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).to(like.device)
