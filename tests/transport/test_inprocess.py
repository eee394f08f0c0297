"""The in-process transport: collectives match by name, and a rank that is missing is named."""

import numpy as np
import pytest
from support.in_process_ranks import on_all_ranks

from grace_ext import ExchangeError
from grace_ext.transport import InProcessGroup


def test_a_missing_rank_is_named():
    transport = InProcessGroup(2, timeout=0.05).transport(0)
    with pytest.raises(ExchangeError, match=r"ranks \[1\]"):
        transport.allgather("lonely", np.zeros(3, np.uint8)).wait()


def test_in_process_collectives_match_by_name_in_any_order():
    def work(transport):
        names = ["a", "b", "a"] if transport.rank else ["b", "a", "a"]
        handles = [(name, transport.allgather(name, np.full(transport.rank + 1, ord(name), np.uint8))) for name in names]
        return {name: handle.wait().tolist() for name, handle in handles}

    for result in on_all_ranks(work, 2):
        assert result == {"a": [97] * 3, "b": [98] * 3}
