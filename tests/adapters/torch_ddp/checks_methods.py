"""What is checked inside the ranks of one job: methods of compression behind DistributedDataParallel."""

import torch
from harness import EACH, batches, close, flat, loss_of, module, same_on_all_ranks, sgd, train, wrap
from support.checking import check
from support.recomputing import Recomputing

from grace_ext.pipeline.presets import PRESETS
from grace_ext.policy.allocation import DENSITIES
from grace_ext.policy.kimad import DensityController


@check
def every_preset_trains_alike_on_all_ranks():
    for spec in PRESETS:
        weights, state = train(spec, steps=2, rules={"*.bias": "dense/raw"})
        same_on_all_ranks(weights)
        assert torch.isfinite(weights).all(), spec
        stats = state.compression_stats()["compressed"]
        assert stats["ratio"] > 2 and stats["bytes_out"], (spec, stats)


@check
def kimad_sends_what_there_is_time_for():
    """Next to nothing if a step's time is over before it begins, everything if it may take an hour."""
    for schedule in ("kimad", "kimad+"):
        for seconds, density in ((1e-6, DENSITIES[0]), (3600, 1.0)):
            weights, state = train("topk:0.04/rice/raw", schedule={"density": f"{schedule}:{seconds}"})
            same_on_all_ranks(weights)
            stats = state.compression_stats()
            assert stats["bandwidth"] > 0 and set(stats["densities"].values()) == {density}, (schedule, stats)
            (controller,) = (one for one in state._buckets.exchange.listeners if isinstance(one, DensityController))
            assert bool(controller._curves) == (schedule == "kimad+"), "it did not look at the gradients"


@check
def clipping_between_backward_and_step():
    """What is clipped is the mean over ranks, the same on all of them."""

    def run(spec):
        net = module()
        model, _ = wrap(net, spec)
        optimizer, norms = sgd(net), []
        for x, y in batches(4):
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            norms.append(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1))
            optimizer.step()
        same_on_all_ranks(torch.stack(norms))
        same_on_all_ranks(flat(net))
        assert min(norms) > 0.1, "nothing was clipped"
        return flat(net)

    close(run("dense/raw"), run(None))
    run("topk:0.01/rice/qsgd:7")


@check
def recomputed_activations():
    for spec in ("dense/raw", EACH):
        close(train(spec, net=Recomputing(module(), 2))[0], train(spec)[0], atol=0)
