"""Adam with a compressed first moment that all ranks share, slow and readable."""

import numpy as np


class CompressedAdam:
    """What the memories onebit_adam and zeroone_adam do for one tensor, on all ranks, in float64.

    exact: the numbers of the steps, from 0 on, in which gradients are exchanged exactly. quantize: what is left of a vector.
    """

    def __init__(self, size, ranks, exact, quantize, beta1=0.9, beta2=0.999, floor=0.0):
        self.exact, self.quantize, self.beta1, self.beta2, self.floor = exact, quantize, beta1, beta2, floor
        self.m, self.v, self.least = np.zeros(size), np.zeros(size), 0.0
        self.residuals = np.zeros((ranks, size))
        self.steps = self.updates = 0

    def step(self, gradients, changed=lambda result: result, penalty=0.0):
        """gradients: [ranks, size] -> the first moment and the root of the second one, corrected. changed: what becomes of
        the exchange's result before the optimizer sees it."""
        if self.steps in self.exact:
            g = changed(np.mean(gradients, axis=0)) + penalty
            self.m = self.beta1 * self.m + (1 - self.beta1) * g
            self.v = self.beta2 * self.v + (1 - self.beta2) * g * g
            self.updates += 1
        else:
            if self.steps - 1 in self.exact and self.floor:
                self.least = 2.0 ** np.floor(np.log2(self.floor * self.v.mean()))
            momenta = self.beta1 * self.m + (1 - self.beta1) * np.asarray(gradients)
            sent = np.array([self.quantize(row) for row in momenta + self.residuals])
            self.residuals = momenta + self.residuals - sent
            self.m = changed(sent.mean(axis=0)) + (1 - self.beta1) * penalty
        self.steps += 1
        root = np.sqrt(np.maximum(self.v, self.least) / (1 - self.beta2**self.updates))
        return self.m / (1 - self.beta1**self.steps), root
