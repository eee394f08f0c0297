"""Defaults by optimizer: what they are made of can be made."""

import dataclasses

import pytest
from support.in_process_ranks import on_all_ranks
from support.memory_exchanges import gradient, make, step

import grace_ext
from grace_ext.policy import Rules, default_for
from grace_ext.policy.defaults import ADAM, MUON, PLAIN


def test_optimizers_whose_steps_a_memory_makes_have_defaults_of_their_own():
    assert default_for("adam") == ADAM and default_for("muon") == MUON and default_for(None) is PLAIN
    memory = "muon:0.9:nesterov=false"
    assert default_for(memory) == dataclasses.replace(MUON, memory=memory)


def test_several_optimizers_have_a_memory_each_and_all_else_in_common():
    shared = default_for({"a": "muon", "b": "adam"})
    assert shared == dataclasses.replace(ADAM, memory={"a": "muon", "b": "adam"}, why=f"{ADAM.why}; {MUON.why}")


@pytest.mark.parametrize("default", [PLAIN, ADAM, MUON])
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
