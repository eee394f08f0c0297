"""What is checked inside the ranks of one job: communicator="auto" behind DistributedDataParallel."""

import math
from unittest import mock

import torch
from harness import close, same_on_all_ranks, train
from support.auto_control import always
from support.checking import check

from grace_ext.policy import auto_tuner


@check
def a_dense_way_gives_what_plain_ddp_gives():
    plain = train(steps=4)[0]
    for way, tolerance in (("float32", 1e-6), ("fp16", 1e-3)):
        with always(way):
            ours, state = train("topk:0.01/rice/qsgd:7", steps=4, communicator="auto")
        close(ours, plain, tolerance)
        assert set(state.compression_stats()["ways"].values()) == {way}


@check
def auto_measures_and_chooses_alike_on_all_ranks():
    tuner, chosen = auto_tuner.AutoTuner, []
    choose = tuner._choose
    # However slow the machine becomes, the choice is not made anew.
    with (
        mock.patch.multiple(auto_tuner, _SECONDS=0.01, _ROUNDS=1, _SLOWER=math.inf),
        mock.patch.object(tuner, "_choose", lambda self, tried: (choose(self, tried), chosen.append(self.plan))),
    ):
        weights, state = train("topk:0.01/rice/qsgd:7", steps=130, communicator="auto")
    same_on_all_ranks(weights)
    assert torch.isfinite(weights).all()
    assert chosen and set(state.compression_stats()["ways"].values()) == set(chosen[-1])
