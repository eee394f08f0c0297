"""What is checked inside the ranks of one job: communicators that sum containers on the way."""

import contextlib

import checks_training
import horovod.torch as hvd
import numpy as np
import torch
from harness import compressed, horovod, same_on_all_ranks, train
from support.checking import check, check_under_every_launcher, raises
from support.exchanges import arrays_of
from support.summing_reference import CASES, check_against_one_process, gradients, on_two_hosts, run

from grace_ext import ContainerError, ExchangeError
from grace_ext.adapters.horovod_torch import HorovodTransport
from grace_ext.transport import CollectiveHandle, TransportWrapper


@check_under_every_launcher
def sums_on_the_way_are_what_one_process_gives():
    check_against_one_process(HorovodTransport(hvd.global_process_set))
    check_against_one_process(HorovodTransport(checks_training.PROCESS_SETS[hvd.rank() % 2]), CASES[:3])


@check
def sums_on_the_way_train_alike_on_all_ranks_and_lose_nothing():
    for communicator in ("sharded", "tree", "hierarchical"):
        with on_two_hosts(hvd.rank()):
            _train(communicator)


def _train(communicator):
    rules = {"*.bias": "dense/raw", "*": "topk:0.01/rice/qsgd:7"}
    weights, optimizer, net = train(compressed(communicator=communicator, bucket_bytes=1, rules=rules), steps=5)
    same_on_all_ranks(weights)
    assert torch.isfinite(weights).all()
    exchange = optimizer._grace.exchange
    with_biases = "allgather" if communicator == "sharded" else "allreduce"
    assert {bucket.communicator.name for bucket in exchange.buckets} == {with_biases, communicator}
    assert {16, 144, 640} < {bucket.size for bucket in exchange.buckets if bucket.communicator.name == communicator}
    stats = optimizer.compression_stats()["compressed"]
    assert stats["ratio"] > 90, stats
    before = arrays_of(exchange)
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(net(torch.ones(4, 1, 28, 28) + hvd.rank()), torch.arange(4)).backward()
    own = {name: p.grad.clone().flatten() for name, p in net.named_parameters()}
    optimizer.synchronize()
    after = arrays_of(exchange)
    for name, p in net.named_parameters():
        if f"residual:{name}" in after:
            given, kept = own[name].numpy() + before[f"residual:{name}"], after[f"residual:{name}"]
            left = hvd.allreduce(torch.from_numpy(given - kept), op=hvd.Sum, name=f"left.{name}")
            lost = (left - hvd.size() * p.grad.flatten()).abs().max()
            assert lost < 1e-5, (name, lost)


class _Damaging(TransportWrapper):
    """A transport that changes a bit of what one rank gets from an alltoall."""

    def alltoall(self, name, payload, splits):
        handle = super().alltoall(name, payload, splits)

        def wait():
            received = handle.wait().copy()
            if self.rank == self.size - 2:
                received[received.size // 4 :][:1] ^= 1
            return received

        return CollectiveHandle(wait)


@check_under_every_launcher
def a_container_that_one_rank_cannot_read_is_told_to_all():
    transport = HorovodTransport(hvd.global_process_set)
    given = gradients(1, hvd.size(), 5000)[:, hvd.rank()]
    hit = hvd.size() - 2
    error, text = (ContainerError, "checksum") if hvd.rank() == hit else (ExchangeError, f"rank {hit} got something other")
    for communicator in ("sharded", "tree", "hierarchical"):
        if communicator == "hierarchical" and hvd.size() == 2:
            continue  # no alltoall
        with on_two_hosts(hvd.rank()):
            with raises(error, text):
                run(transport, communicator, "topk:0.05/rice/raw", given, wrap=_Damaging)
            assert np.isfinite(run(transport, communicator, "topk:0.05/rice/raw", given)[0]).all()


@check_under_every_launcher
def ranks_find_out_which_of_them_share_a_host():
    """Here they all do, unless the environment says something else."""
    plain = train(horovod(), steps=3)[0]
    for spread in (False, True):
        with on_two_hosts(hvd.rank()) if spread else contextlib.nullcontext():
            weights, optimizer, _ = train(compressed("topk:0.02/rice/raw", communicator="hierarchical"), steps=3)
        same_on_all_ranks(weights)
        assert optimizer._grace.exchange.transport.hosts == tuple(spread * (rank % 2) for rank in range(hvd.size()))
        # On one host nothing is compressed, and nothing but rounding tells it from Horovod's own.
        assert ((weights - plain).abs().max() < 1e-5) != spread, (weights - plain).abs().max()
