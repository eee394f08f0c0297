"""What is checked inside the ranks of one job: containers over a group of PyTorch's Gloo beside Horovod."""

import gc
from unittest import mock

import horovod.torch as hvd
import numpy as np
import torch
from harness import batches, compressed, flat, same_on_all_ranks, train
from support.checking import check, check_under_every_launcher, raises

from grace_ext import ConfigError, ExchangeError
from grace_ext.adapters._torch import gloo_transport, horovod_backends
from grace_ext.adapters._torch.gloo_transport import GlooTransport
from grace_ext.adapters.horovod_torch import DistributedOptimizer, HorovodTransport


class TwoBranches(torch.nn.Module):
    """Backward produces the gradients of the one that came last first."""

    def __init__(self, first):
        super().__init__()
        torch.manual_seed(3)
        self.branches = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 48), torch.nn.ReLU(), torch.nn.Linear(48, 10))
            for _ in range(2)
        )
        self._first = first

    def forward(self, x):
        return sum(self.branches[(self._first + number) % 2](x) for number in range(2))


@check_under_every_launcher
def over_gloo_all_is_as_over_horovod():
    options = ({}, {"spec": "topk:0.05/rice/raw", "bucket_bytes": 4096}, {"communicator": "sharded"})
    for one in options:
        plain, beside = (train(compressed(**one, backend=backend), steps=6)[0] for backend in ("horovod", "gloo"))
        assert torch.equal(plain, beside), one


@check
def over_gloo_no_gradient_waits_for_horovod():
    specs = {"spec": "dense/raw"}, {"spec": "dense/fp16", "communicator": "allreduce"}, {"rules": {"0.*": "dense/raw"}}
    for one in specs:
        theirs = train(compressed(**one, backend="horovod"), steps=4)[0]
        with mock.patch.object(hvd, "allreduce_async_", side_effect=AssertionError("an allreduce of Horovod")):
            ours = train(compressed(**one, backend="gloo"), steps=4)[0]
        same_on_all_ranks(ours)
        # In fp16, Horovod multiplies each gradient by its share of the average, and the sums differ by rounding.
        assert torch.allclose(ours, theirs, rtol=0, atol=2e-3 if "fp16" in one.get("spec", "") else 1e-6), one


@check_under_every_launcher
def buckets_go_in_one_order_whatever_that_of_backward():
    """By name they would find each other; Gloo pairs what ranks send by its order."""

    def trained(backend):
        net = TwoBranches(first=hvd.rank() % 2)
        given = compressed("topk:0.1/rice/raw", bucket_bytes=4096, backend=backend)
        weights, optimizer, _ = train(given, steps=5, net=net)
        assert len(optimizer._grace.exchange.buckets) > 2
        return weights

    ours = trained("gloo")
    same_on_all_ranks(ours)
    assert torch.equal(ours, trained("horovod"))


@check
def ranks_that_join_start_what_the_others_do():
    """Longer containers than those before need a second collective, and the order of all has to be the same."""

    def trained(backend):
        given = compressed("threshold:0.001/rice/raw", bucket_bytes=4096, backend=backend)
        weights, optimizer, net = train(given, steps=2 + hvd.rank())
        last = optimizer.join()
        same_on_all_ranks(torch.tensor([float(last)]))
        assert last == hvd.size() - 1
        hvd.broadcast_parameters(net.state_dict(), root_rank=last)
        return flat(net)

    ours = trained("gloo")
    same_on_all_ranks(ours)
    assert torch.equal(ours, trained("horovod"))


@check
def nothing_is_exchanged_after_a_step_that_was_given_up():
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
    optimizer = compressed(backend="gloo")(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
    data = batches(4)

    def backward():
        x, y = next(data)
        torch.nn.functional.cross_entropy(net(x), y).backward()

    backward()
    optimizer.step()
    backward()
    optimizer._grace.abort()
    for p in net.parameters():
        p.grad = None
    with raises(ExchangeError, "a step was given up after it had begun"):
        backward()


@check
def payloads_of_any_length_arrive_over_gloo():
    transport = GlooTransport(hvd.global_process_set, "grace_ext.check.any_length")
    for step, length in enumerate((0, 1, 5000, 3, 200_000)):
        own = np.full(length + hvd.rank(), 7 * step + hvd.rank(), np.uint8)
        expected = np.concatenate([np.full(length + rank, 7 * step + rank, np.uint8) for rank in range(hvd.size())])
        assert np.array_equal(transport.allgather("payload", own).wait(), expected)
        parts = transport.gather_to("gathered", own, to=hvd.size() - 1)
        assert len(parts) == (hvd.size() if hvd.rank() == hvd.size() - 1 else 0)
        assert not parts or np.array_equal(np.concatenate(parts), expected)


@check
def a_group_is_not_freed_with_its_transport():
    """Its threads might want the interpreter lock while Python waits for them and holds it: one of some thousand groups that were
    freed stood still for ever."""
    transport = GlooTransport(hvd.global_process_set, "grace_ext.check.freed")
    transport.connect()
    number = id(transport.group)
    del transport
    gc.collect()
    assert number in map(id, gloo_transport._groups)


@check
def elastic_horovod_with_gloo_beside_it_is_refused():
    net = torch.nn.Linear(3, 3)
    with mock.patch.dict("os.environ", HOROVOD_ELASTIC="1"), raises(ConfigError, "backend='gloo': with it, elastic Horovod"):
        DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters(), backend="gloo")


def chosen(prefix):
    """What carries containers where the user leaves it open, and what the log says."""
    with mock.patch.object(horovod_backends, "log") as log:
        transport = horovod_backends.make_transport(hvd.global_process_set, None, f"grace_ext.check.{prefix}")
    said = [call.args[0] % call.args[1:] for call in (*log.info.call_args_list, *log.warning.call_args_list)]
    assert len(said) <= (hvd.rank() == 0)
    return type(transport), "".join(said)


@check
def where_horovod_is_slow_containers_go_by_gloo():
    with mock.patch.object(horovod_backends, "SLOW", 1e9):
        assert chosen("fast") == (HorovodTransport, "")
    with mock.patch.object(horovod_backends, "SLOW", 0.0):
        kind, said = chosen("slow")
        assert kind is GlooTransport and ("containers go by a group of Gloo" in said) == (hvd.rank() == 0)
        with mock.patch.dict("os.environ", HOROVOD_ELASTIC="1"):
            assert chosen("elastic") == (HorovodTransport, "")


@check
def horovod_carries_containers_where_gloo_cannot_connect():
    with mock.patch.object(horovod_backends, "SLOW", 0.0):
        with mock.patch.dict("os.environ", GLOO_SOCKET_IFNAME="none7"):
            kind, said = chosen("lost")
        assert kind is HorovodTransport and ("reach none of the addresses" in said) == (hvd.rank() == 0)
        with mock.patch.object(torch.distributed, "TCPStore", side_effect=OSError("no port")):
            kind, said = chosen("closed")
        assert kind is HorovodTransport and ("rank 0 cannot open a port" in said) == (hvd.rank() == 0)
