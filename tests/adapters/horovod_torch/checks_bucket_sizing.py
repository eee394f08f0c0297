"""What is checked inside the ranks of one job: the size of buckets that the ranks choose after the first steps."""

from unittest import mock

import horovod.torch as hvd
import numpy as np
import torch
from checks_state import through_a_file
from harness import compressed, flat, same_on_all_ranks
from support.checking import check, check_under_every_launcher

from grace_ext.policy import bucket_size

SMALLEST, *_, LARGEST = sorted(bucket_size.SIZES)
STEPS = 12  # more than are measured


def choose(size):
    """What choose_size gives on each rank. size(rank) -> bytes."""
    return mock.patch.object(bucket_size, "choose_size", lambda layouts, *_: size(hvd.rank()))


def large(seed=0):
    """A model of 12 MiB and three layers."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(3)))


def make(spec="topk:0.01/rice/qsgd:7", seed=0, **options):
    net = large(seed)
    return net, compressed(spec, **options)(torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9), net.named_parameters())


def train(net, optimizer, steps, first=0):
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(1000 * step + hvd.rank())
        optimizer.zero_grad()
        net(torch.randn(2, 1024, generator=generator)).square().mean().backward()
        optimizer.step()


def buckets_of(optimizer):
    """The tensors of each bucket that is compressed."""
    buckets = optimizer._grace.exchange.buckets
    return [[tensor.name for tensor in bucket.tensors] for bucket in buckets if not bucket.compressor.exact]


@check_under_every_launcher
def ranks_choose_a_size_of_buckets_together():
    whole, layers = [["2.weight", "1.weight", "0.weight"]], [["2.weight"], ["1.weight"], ["0.weight"]]
    for size, expected in (
        (lambda rank: SMALLEST, layers),
        (lambda rank: LARGEST, whole),
        (lambda rank: LARGEST if rank < hvd.size() // 2 else SMALLEST, whole),  # the middle one of those that they want
    ):
        with choose(size):
            net, optimizer = make()
            train(net, optimizer, 7)
            assert buckets_of(optimizer) == whole and "bucket_bytes" not in optimizer.state_dict()["grace_ext"]
            train(net, optimizer, 5, 7)
            assert buckets_of(optimizer) == expected, buckets_of(optimizer)
            same_on_all_ranks(flat(net))
            assert optimizer.state_dict()["grace_ext"]["bucket_bytes"] == (SMALLEST if expected == layers else LARGEST)


@check
def what_the_ranks_measure_leads_to_one_choice():
    net, optimizer = make()
    train(net, optimizer, STEPS)
    chosen = optimizer.state_dict()["grace_ext"]["bucket_bytes"]
    assert chosen in bucket_size.SIZES
    same_on_all_ranks(torch.tensor([chosen]))
    same_on_all_ranks(flat(net))


@check
def specs_without_a_density_have_a_choice_as_well():
    for spec in ("dense/qsgd:7", "threshold:0.1/rice/raw"):
        net, optimizer = make(spec)
        train(net, optimizer, STEPS)
        assert optimizer.state_dict()["grace_ext"]["bucket_bytes"] in bucket_size.SIZES


@check
def residuals_follow_their_tensors_into_smaller_buckets():
    with choose(lambda rank: SMALLEST):
        net, optimizer = make("topk:0.01/rice/raw")
        train(net, optimizer, 7)
        buckets, seen = optimizer._grace, []
        build = buckets._build

        def look(*args):
            seen.append(buckets.exchange.state_dict()["residual"])
            build(*args)
            seen.append(buckets.exchange.state_dict()["residual"])

        with mock.patch.object(buckets, "_build", look):
            train(net, optimizer, 1, 7)
        before, after = seen
        assert len(buckets_of(optimizer)) == 3 and before.keys() == after.keys() == {"0.weight", "1.weight", "2.weight"}
        for name, residual in before.items():
            assert residual.any()
            np.testing.assert_array_equal(after[name], residual)


@check
def a_checkpoint_keeps_the_size_that_was_chosen():
    with choose(lambda rank: SMALLEST):
        net, optimizer = make()
        train(net, optimizer, STEPS)
        saved = through_a_file([net.state_dict(), optimizer.state_dict()])
        train(net, optimizer, 3, STEPS)
        expected = flat(net)
    other, resumed = make(seed=1)  # which would choose for itself
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    train(other, resumed, 3, STEPS)
    assert torch.equal(flat(other), expected)
    assert len(buckets_of(resumed)) == 3


@check
def a_size_that_the_user_gives_stays():
    for options in ({"bucket_bytes": LARGEST}, {"groups": 1}, {"communicator": "sharded"}, {"spec": "dense/raw"}):
        with choose(lambda rank: SMALLEST):
            net, optimizer = make(**options)
            train(net, optimizer, STEPS)
            assert len(optimizer._grace.exchange.buckets) <= 2, options
            assert "bucket_bytes" not in optimizer.state_dict()["grace_ext"]


@check
def parameters_that_are_frozen_later_leave_the_size_as_it_is():
    with choose(lambda rank: SMALLEST):
        net, optimizer = make()
        train(net, optimizer, STEPS)
    net[1].requires_grad_(False)
    train(net, optimizer, 2, STEPS)
    assert buckets_of(optimizer) == [["2.weight"], ["0.weight"]]
    same_on_all_ranks(flat(net))


@check
def ranks_that_have_joined_choose_with_the_others():
    with choose(lambda rank: SMALLEST):
        net, optimizer = make()
        train(net, optimizer, 5 if hvd.rank() else STEPS)
        optimizer.join()
        assert len(buckets_of(optimizer)) == 3
