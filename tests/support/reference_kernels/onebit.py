"""1-bit Adam, slow and readable, and Adam with a variance that freezes."""

import horovod.torch as hvd
import numpy as np
import torch


class Twin:
    """Algorithm 1 for one tensor and all ranks, on numpy arrays."""

    def __init__(self, p, lr, beta1=0.9, beta2=0.999, eps=1e-8, floor=0.0):
        self.p, self.lr, self.beta1, self.beta2, self.eps = p.astype(np.float64), lr, beta1, beta2, eps
        self.floor = floor
        self.m, self.v, self.t = np.zeros(p.size), np.zeros(p.size), 0
        self.frozen_at = None

    def warm_up(self, gradients):
        self.t += 1
        g = np.mean(gradients, axis=0, dtype=np.float64)
        self.m = self.beta1 * self.m + (1 - self.beta1) * g
        self.v = self.beta2 * self.v + (1 - self.beta2) * g * g
        self.errors = [np.zeros(self.p.size) for _ in gradients]
        self._step()

    def freeze(self):
        if self.floor:
            self.v = np.maximum(self.v, 2 ** np.floor(np.log2(self.floor * self.v.mean())))
        self.frozen_at = self.t

    def compressed(self, gradients, quantize):
        self.t += 1
        sent = []
        for rank, g in enumerate(gradients):
            wanted = self.beta1 * self.m + (1 - self.beta1) * g + self.errors[rank]
            sent.append(quantize(wanted))
            self.errors[rank] = wanted - sent[rank]
        self.m = np.mean(sent, axis=0)
        self._step()

    def _step(self):
        d = np.sqrt(self.v / (1 - self.beta2 ** (self.frozen_at or self.t))) + self.eps
        self.p -= self.lr * self.m / (1 - self.beta1**self.t) / d


def one_bit(values, bucket=512):
    """Each value becomes the mean of those of its bucket that have its sign."""
    parts = [
        np.where(
            part < 0, part[part < 0].mean() if (part < 0).any() else 0, part[part >= 0].mean() if (part >= 0).any() else 0
        )
        for part in np.split(values, range(bucket, values.size, bucket))
    ]
    return np.concatenate(parts)


class Reference:
    """Adam with a variance that freezes, of gradients that Horovod has reduced. Single-tensor formulas in float64."""

    def __init__(self, optimizer, warmup_steps, passes=1, op=hvd.Average):
        self.groups, self.warmup_steps, self.op, self.t = optimizer.param_groups, warmup_steps, op, 0
        self.state = {
            p: [torch.zeros_like(p, dtype=torch.float64) for _ in range(3)] for group in self.groups for p in group["params"]
        }

    def zero_grad(self):
        for p in self.state:
            p.grad = None

    @torch.no_grad()
    def step(self):
        self.t += 1
        for group in self.groups:
            (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
            for p in group["params"]:
                g = hvd.allreduce(p.grad.double(), op=self.op, name="reference") * (-1 if group["maximize"] else 1)
                m, v, largest = self.state[p]
                new = p.double()
                if group["decoupled_weight_decay"]:
                    new *= 1 - lr * decay
                else:
                    g += decay * new
                m.mul_(beta1).add_(g, alpha=1 - beta1)
                if self.t <= self.warmup_steps:
                    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
                    torch.maximum(largest, v, out=largest)
                v = largest if group["amsgrad"] else v
                d = (v / (1 - beta2 ** min(self.t, self.warmup_steps))).sqrt() + group["eps"]
                p.copy_(new - lr / (1 - beta1**self.t) * m / d)
