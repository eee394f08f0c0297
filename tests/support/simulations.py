"""Simulated links and runs."""

import numpy as np

from grace_ext.simulate import traces


def links(workers, low=3e4, high=33e4, period=3.0):
    base = traces.sinusoid(low, high, period)
    return [base.shifted(period * worker / workers) for worker in range(workers)]


def mean(records, name):
    return np.mean([getattr(record, name) for record in records])
