"""What is checked inside the ranks of one job: ranks that run out of data before others."""

import checks_training
import horovod.torch as hvd
import numpy as np
import torch
from checks_loop_features import close, loss_of, small
from checks_rows import Words, sentences
from harness import batches, compressed, flat, horovod, same_on_all_ranks
from support.checking import check, check_under_every_launcher, raises
from support.exchanges import arrays_of
from support.summing_reference import on_two_hosts

from grace_ext import ConfigError, ExchangeError


def run(optimizer, net, steps):
    for x, y in batches(steps):
        optimizer.zero_grad()
        loss_of(net, x, y).backward()
        optimizer.step()


def uneven(wrap, steps, join=None):
    """Train for another number of steps on every rank, join, and take over what the last rank has."""
    net = small()
    optimizer = wrap(torch.optim.SGD(net.parameters(), lr=0.05), net.named_parameters())
    run(optimizer, net, steps)
    before = arrays_of(optimizer._grace.exchange) if join is None else None
    last = join() if join else optimizer.join()
    kept = arrays_of(optimizer._grace.exchange) if join is None else None
    hvd.broadcast_parameters(net.state_dict(), root_rank=last)
    return net, optimizer, last, (before, kept)


@check_under_every_launcher
def joining_is_what_horovod_gives():
    for spec in ("dense/raw", "dense/deflate"):  # by allreduce, and in containers
        ours, optimizer, last, _ = uneven(compressed(spec, memory="none"), 2 + 2 * hvd.rank())
        theirs, _, their_last, _ = uneven(horovod(), 2 + 2 * hvd.rank(), join=hvd.join)
        assert last == their_last == hvd.size() - 1
        close(flat(ours), flat(theirs))
        assert optimizer.compression_stats()["steps"] == 2 * hvd.size()


@check
def a_rank_that_joins_before_its_first_step_is_no_match_for_closures():
    net = small()
    optimizer = compressed()(torch.optim.SGD(net.parameters(), lr=0.05), net.named_parameters())
    x, y = next(batches(1))

    def backward():
        loss = loss_of(net, x, y)
        loss.backward()
        return loss

    with raises(ConfigError, "join() and step(closure)"):
        optimizer.join() if hvd.rank() == 0 else optimizer.step(backward)


@check_under_every_launcher
def ranks_that_join_stay_in_step():
    """All kinds of ways; the first rank joins before its first step."""
    topk = "topk:0.05/rice/qsgd:7"
    for spec, options in (
        (topk, {}),
        (topk, {"memory": "ef21"}),
        (topk, {"memory": "dgc"}),
        (topk, {"selection": "device"}),
        (topk, {"schedule": {"density": lambda step: 0.1 / (1 + step)}}),
        ("powersgd:2", {}),
        ("powersgd:2", {"rules": {"1.*": topk}}),
        ("randomk:0.1", {"communicator": "allreduce"}),
        (topk, {"communicator": "sharded"}),
        (topk, {"communicator": "tree"}),
        (topk, {"communicator": "hierarchical"}),
        ("dense/fp16", {"communicator": "allreduce", "memory": "none"}),
    ):
        wrap = compressed(spec, **options)
        with on_two_hosts(hvd.rank()):
            net, optimizer, last, (before, kept) = uneven(wrap, hvd.rank())
        assert last == hvd.size() - 1
        assert optimizer._grace.exchange.step == hvd.size() - 1, (spec, options)
        for name in before:
            own = name.startswith(("residual", "estimate", "velocity"))
            assert not own or np.array_equal(before[name], kept[name]), f"{spec} {options}: {name} changed meanwhile"
        run(optimizer, net, 2)  # all together again
        same_on_all_ranks(flat(net))
        assert torch.isfinite(flat(net)).all()
        for name, array in arrays_of(optimizer._grace.exchange).items():
            if name.startswith(("lowrank", "aggregate")):
                same_on_all_ranks(torch.from_numpy(array))


@check
def ranks_that_join_with_tables():
    net = Words()
    tables = compressed("topk:0.1/rice/qsgd:7")(
        torch.optim.SparseAdam(net.table.parameters(), lr=0.1), net.named_parameters()
    )
    layers = compressed()(torch.optim.SGD(net.layer.parameters(), lr=0.1), net.named_parameters())
    for words, labels in sentences(3 * (hvd.size() - 1 - hvd.rank())):  # the last rank has none
        tables.zero_grad()
        layers.zero_grad()
        loss_of(net, words, labels).backward()
        layers.step()
        tables.step()
    assert tables.join(layers) == 0  # in whatever order
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(tables, root_rank=0)
    for words, labels in sentences(2):
        tables.zero_grad()
        layers.zero_grad()
        loss_of(net, words, labels).backward()
        tables.step()
        layers.step()
    same_on_all_ranks(flat(net))
    assert [b.compressor.index.name for b in tables._grace.exchange.buckets] == ["rows"]


@check_under_every_launcher
def joining_together_or_apart():
    net = small()
    optimizer = compressed()(torch.optim.SGD(net.parameters(), lr=0.05), net.named_parameters())
    assert optimizer.join() == optimizer.join() == hvd.size() - 1  # before any step
    run(optimizer, net, 1)
    assert optimizer.join() == hvd.size() - 1
    same_on_all_ranks(flat(net))
    loss_of(net, *next(batches(1))).backward()
    with raises(ExchangeError, "between backward() and step()"):
        optimizer.join()
    optimizer.step()
    assert optimizer.compression_stats()["steps"] == 2
    own = checks_training.PROCESS_SETS[hvd.rank() % 2]
    net = small()
    optimizer = compressed(process_set=own)(torch.optim.SGD(net.parameters(), lr=0.05), net.named_parameters())
    run(optimizer, net, hvd.rank())
    assert optimizer.join() == max(own.ranks), (optimizer.join(), own.ranks)


@check
def an_overflow_while_some_have_joined():
    net = small()
    optimizer = compressed("powersgd:2")(torch.optim.SGD(net.parameters(), lr=0.0), net.named_parameters())
    for step, (x, y) in enumerate(batches(1 if hvd.rank() == 0 else 4)):
        optimizer.zero_grad()
        (loss_of(net, x, y) * (float("inf") if step == 2 else 1.0)).backward()
        optimizer.step()
    optimizer.join()
    factors = {name: array for name, array in arrays_of(optimizer._grace.exchange).items() if name.startswith("lowrank")}
    assert factors and all(np.isfinite(array).all() for array in factors.values())
    for array in factors.values():
        same_on_all_ranks(torch.from_numpy(array))
