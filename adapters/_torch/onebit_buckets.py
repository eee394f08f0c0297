"""Buckets of 1-bit Adam: gradients as they are during the warm-up, then compressed momenta."""

import numpy as np
import torch

from grace_ext import ConfigError
from grace_ext.communicators.allreduce import Allreduce
from grace_ext.policy import Rules
from grace_ext.policy.memories import Memories
from grace_ext.policy.schedules import Schedules

from .buckets import TorchBuckets


class OneBitBuckets(TorchBuckets):
    """Buckets that follow the optimizer's stage, which is the same on all ranks, from the first gradient on.

    They are built for the compressed stage first, so that what does not fit is refused at once. optimizer: see onebit_adam.
    warmup: the spec of the stage before it.
    """

    sends_gradients = False

    def __init__(self, optimizer, parameters, exchange, options, *, warmup: str, **others):
        self._optimizer, self._compressed = optimizer, True
        super().__init__(parameters, exchange, options, **others)
        self._stages = {
            True: (self._rules, self._communicator, exchange.state.memories, exchange.schedules),
            False: (Rules(warmup, {"*": warmup}), Allreduce(), Memories("none"), Schedules()),
        }
        for bucket in exchange.buckets:
            if bucket.memory.applies_momentum:
                name = bucket.memory.name
                raise ConfigError(f"OneBitAdam: memory {name!r} has a momentum of its own; use residual, ef21 or none")

    def follow_stage(self) -> None:
        """Between steps: the buckets become those of the stage."""
        if self._optimizer.is_frozen != self._compressed:
            self._compressed = not self._compressed
            self._rules, self._communicator, *policies = self._stages[self._compressed]
            self.exchange.replace_policies(*policies)
            self._build(*self._built_with)

    def on_gradient_ready(self, name):
        self.follow_stage()
        super().on_gradient_ready(name)

    def synchronize(self):
        self.follow_stage()
        super().synchronize()

    def shadow_step(self):
        raise ConfigError(
            "OneBitAdam: join() is not supported; a rank without data would have to know the momentum of each "
            "step, and when the warm-up ends: give all ranks as many batches"
        )

    def _unit(self, bucket):
        # The momentum is kept in unscaled units, whether or not there is a residual as well.
        return self._loss_scale if self._compressed else super()._unit(bucket)

    def _pack(self, bucket, gradients, factor, *out):
        if not out:
            raise ConfigError(
                f"the gradient of {bucket.tensors[0].name!r} is sparse, and Adam's momentum is not: pass "
                f"sparse_as_dense=True"
            )
        borrowed = super()._pack(bucket, gradients, factor, *out)
        if borrowed is not None:
            np.concatenate(borrowed if isinstance(borrowed, list) else [borrowed], out=out[0])
        if self._compressed:
            groups = {id(p): group for group in self._optimizer.param_groups for p in group["params"]}
            for tensor, part in zip(bucket.tensors, torch.as_tensor(out[0]).split(bucket.sizes), strict=True):
                p = self.parameters[tensor.name]
                self._optimizer.to_momentum(groups[id(p)], p, part, self.exchange.weight * self.exchange.transport.size)

    def _follow_requires_grad(self):
        before = self.parameters.keys()
        super()._follow_requires_grad()
        if self._compressed and (new := self.parameters.keys() - before):
            raise ConfigError(f"OneBitAdam: {', '.join(sorted(new))} came in after the warm-up")
