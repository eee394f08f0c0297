"""What is checked inside the ranks of one job: means that bear a rank that lies."""

import torch
from harness import adamw, flat, gather, net, rank, ranks, same_on_all_ranks, train, train_step
from support.checking import check, check_under_every_launcher, raises

from grace_ext import ConfigError
from grace_ext.adapters.local_steps import LocalSteps
from grace_ext.means import ClippedMean, Median, TrimmedMean

DENSE = {"rules": {"*": "dense/raw"}, "memory": "none"}


def lie(model, local, start, factor):
    """The last rank's parameters become those of a pseudo-gradient `factor` times as long, and it says that they are finite."""
    with torch.no_grad():
        moved = factor * (flat(model) - start)
        torch.nn.utils.vector_to_parameters((start + moved).float(), model.parameters())
        model.inner[1].running_var.mul_(factor)
    fragment = local._rounds.fragments[0]
    measure = fragment.measure
    fragment.measure = lambda: measure() or True


@check_under_every_launcher
def a_rank_that_lies_does_not_move_a_robust_mean():
    for mean in (Median(), TrimmedMean(0.25)):
        for factor in (1e6, -1.0, float("nan")):
            model = net()
            optimizer = adamw(model)
            local = LocalSteps(model, optimizer, "fedavg", steps=2, mean=mean, **DENSE)
            for number in range(2):
                start = flat(model)
                train(model, optimizer, local, 1, first=2 * number)
                train_step(model, optimizer, 2 * number + 1)
                honest = gather(flat(model))[:-1]
                variances = gather(model.inner[1].running_var)[:-1]
                if rank() == ranks() - 1:
                    lie(model, local, start, factor)
                local.step()
                same_on_all_ranks(flat(model))
                same_on_all_ranks(model.inner[1].running_var)
                for found, of_honest in ((flat(model), honest), (model.inner[1].running_var, variances)):
                    assert torch.isfinite(found).all()
                    if ranks() > 2 or factor != factor:  # of two ranks, nobody knows who lies
                        low, high = of_honest.amin(0) - 1e-5, of_honest.amax(0) + 1e-5
                        assert ((found >= low) & (found <= high)).all(), (mean, factor, number)


@check
def with_ef21_a_robust_mean_goes_with_sparse_updates_and_from_a_checkpoint_on():
    def made():
        model = net()
        optimizer = adamw(model)
        options = {"compression": "topk:0.2/rice/qsgd:7", "memory": "ef21", "mean": Median()}
        return model, optimizer, LocalSteps(model, optimizer, steps=3, **options)

    model, optimizer, local = made()
    train(model, optimizer, local, 7)
    saved = [model.state_dict(), optimizer.state_dict(), local.state_dict()]
    saved = [
        torch.utils._pytree.tree_map(lambda one: one.clone() if torch.is_tensor(one) else one, state) for state in saved
    ]
    train(model, optimizer, local, 5, first=7)
    same_on_all_ranks(flat(model))
    again = made()
    for one, state in zip(again, saved, strict=True):
        one.load_state_dict(state)
    train(*again, 5, first=7)
    assert torch.equal(flat(again[0]), flat(model))


@check
def what_a_mean_cannot_be_is_refused():
    model = net()
    optimizer = adamw(model)
    for options, said in (
        ({"mean": "median"}, "mean='median'; allowed: an instance of"),
        ({"mean": Median()}, "is sent sparsely; allowed: a dense compression"),
        ({"mean": Median(), "weights": "samples"}, "takes no weights"),
        ({"mean": ClippedMean(), "communicator": "sharded"}, "allowed with it: 'allgather'"),
        (
            {"communicator": "sharded"},
            "mean SenderMean() needs one by one; allowed with it: 'allgather'; with this communicator: mean=",
        ),
    ):
        with raises(ConfigError, said):
            LocalSteps(model, optimizer, **options)
