"""signum: GRACE's momentum of signs."""

import numpy as np
import pytest
from support.exchanges import arrays_of
from support.in_process_ranks import on_all_ranks
from support.memory_exchanges import RANKS, SIZE, gradient, make, step

import grace_ext
from grace_ext import ConfigError


def test_the_majority_of_the_signs_of_the_momenta():
    def work(transport):
        exchange = make(transport, "signum:0.8", "dense/sign:one", communicator="majority")
        return [step(exchange, gradient(transport.rank, i))[0] for i in range(5)], arrays_of(exchange)

    momenta = np.stack([gradient(rank, 0) for rank in range(RANKS)]).astype(float)
    expected = []
    for i in range(5):
        if i:
            momenta = 0.8 * momenta + 0.2 * np.stack([gradient(rank, i) for rank in range(RANKS)])
        expected.append(np.where(np.where(momenta >= 0, 1, -1).sum(axis=0) >= 0, 1, -1))
    for rank, (outs, state) in enumerate(on_all_ranks(work, RANKS)):
        assert [out.tolist() for out in outs] == [votes.tolist() for votes in expected]
        kept = np.concatenate([state["velocity:a"], state["velocity:b"]])
        np.testing.assert_allclose(kept, momenta[rank], atol=1e-5)


def test_exact_tensors_have_the_momentum_as_well():
    memory = grace_ext.memory("signum")
    assert memory.for_compressor(grace_ext.compressor("dense/raw")) is memory
    assert SIZE and memory.applies_momentum


def test_options_out_of_range():
    with pytest.raises(ConfigError, match="signum: momentum=1"):
        grace_ext.memory("signum:1")
