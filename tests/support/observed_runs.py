"""Steps of an exchange with observers."""

import csv

import numpy as np

from support.exchanges import make, step
from support.in_process_ranks import gradient, on_all_ranks

STEPS = 6


def run(observe=None, poison=None, **options):
    """Some steps on all ranks: the results, and the residual before each step, of each rank; and rank 0's statistics."""

    def work(transport):
        exchange = make(transport, observe=observe, **options)
        received, states = [], []
        for i in range(STEPS):
            given = gradient(10 * transport.rank + i)
            if i == poison and transport.rank == 1:
                given[3] = np.nan
            states.append(exchange.state_dict().get("residual", {"a": np.zeros(3000), "b": np.zeros(2000)}))
            received.append(step(exchange, given)[0])
        return received, states, exchange.stats()

    return on_all_ranks(work)


def ratios(states, i, rank=0):
    given = dict(zip("ab", np.split(gradient(10 * rank + i), [3000]), strict=True))
    return {name: np.linalg.norm(states[i][name]) / np.linalg.norm(given[name]) for name in given}


def table(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))
