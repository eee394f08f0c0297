"""Ranks as threads of this process, over the in-process transport."""

import threading

import numpy as np

from grace_ext.transport import InProcessGroup

RANKS = 3


def on_all_ranks(function, ranks=RANKS, timeout=600.0, hosts=None):
    """Call function(transport) in one thread a rank; returns the results in rank order, raises what one raised. Even ranks
    are on one host and odd ones on another if hosts does not say where."""
    group = InProcessGroup(ranks, timeout, hosts or [rank % 2 for rank in range(ranks)])
    results, errors = [None] * ranks, []

    def work(rank):
        try:
            results[rank] = function(group.transport(rank))
        except BaseException as error:  # what pytest.raises fails with is no Exception
            errors.append(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def gradient(rank, d=5000):
    return np.random.default_rng(rank).standard_normal(d).astype(np.float32)
