"""Defaults by optimizer: what they are made of can be made."""

import pytest
from support.in_process_ranks import on_all_ranks
from support.memory_exchanges import gradient, make, step

import grace_ext
from grace_ext.policy import Rules, default_for
from grace_ext.policy.defaults import ADAM, PLAIN


def test_an_adam_that_leaves_its_moments_has_a_default_of_its_own():
    assert default_for(True) is ADAM and default_for(False) is PLAIN


@pytest.mark.parametrize("default", [PLAIN, ADAM])
def test_a_default_works(default):
    rules = Rules(default.compression, small=default.small)
    assert rules.choose("bias", 10**5, 1) == grace_ext.compressor(default.small)
    assert rules.choose("weight", 10**5, 2) == grace_ext.compressor(default.compression)

    def work(transport):
        for spec in (default.compression, default.small):
            exchange = make(transport, default.memory, spec, schedule=default.schedule and dict(default.schedule))
            for i in range(2):
                out, finite = step(exchange, gradient(transport.rank, i))
                assert finite
        return out.tobytes()

    assert len(set(on_all_ranks(work, 2))) == 1
