"""What is checked inside the ranks of one job: Horovod's SyncBatchNorm, whose collectives run within forward and backward,
beside ours. Its CUDA kernels are written out here for the CPU, where torch has none; its collectives are the real ones."""

import contextlib
from unittest import mock

import horovod.torch as hvd
import torch
from harness import batches, compressed, flat, horovod, same_on_all_ranks, train
from support.checking import check


def channels(values):
    """[n, channels, ...] -> [channels, n * ...]"""
    return values.transpose(0, 1).flatten(1)


def like(values, channel):
    return channel.view(1, -1, *[1] * (values.dim() - 2))


def stats(values, eps):
    flat_values = channels(values)
    return flat_values.mean(1), (flat_values.var(1, unbiased=False) + eps).rsqrt()


def gather_stats(values, means, invstds, running_mean, running_var, momentum, eps, counts):
    share = (counts / counts.sum())[:, None]
    mean = (share * means).sum(0)
    var = (share * (invstds**-2 - eps + (means - mean) ** 2)).sum(0)
    running_mean.lerp_(mean, momentum)
    running_var.lerp_(var * counts.sum() / (counts.sum() - 1), momentum)
    return mean, (var + eps).rsqrt()


def normalize(values, weight, bias, mean, invstd, eps):
    return (values - like(values, mean)) * like(values, invstd * weight) + like(values, bias)


def backward_reduce(grad, values, mean, invstd, weight, *_):
    centred = values - like(values, mean)
    sum_dy, sum_dy_xmu = channels(grad).sum(1), channels(grad * centred).sum(1)
    return sum_dy, sum_dy_xmu, sum_dy_xmu * invstd, sum_dy


def backward_elements(grad, values, mean, invstd, weight, sum_dy, sum_dy_xmu, count):
    mean_dy, mean_dy_xmu = sum_dy / count.sum(), sum_dy_xmu / count.sum()
    centred = values - like(values, mean)
    return (grad - like(grad, mean_dy) - centred * like(grad, invstd**2 * mean_dy_xmu)) * like(grad, invstd * weight)


@contextlib.contextmanager
def kernels_for_the_cpu():
    with contextlib.ExitStack() as stack:
        for name, kernel in (
            ("stats", stats),
            ("gather_stats_with_counts", gather_stats),
            ("elemt", normalize),
            ("backward_reduce", backward_reduce),
            ("backward_elemt", backward_elements),
        ):
            stack.enter_context(mock.patch.object(torch, f"batch_norm_{name}", kernel))
        yield


class SyncBatchNorm(hvd.SyncBatchNorm):
    def forward(self, values):
        return self._maybe_run_sync_bn(values)  # the rest of it wants a GPU


def network(norm):
    torch.manual_seed(8)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 5),
        norm(8),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(4),
        torch.nn.Flatten(),
        torch.nn.Linear(8 * 36, 48),
        norm(48),
        torch.nn.ReLU(),
        torch.nn.Linear(48, 10),
    )


def alone(steps):
    """One rank that has the data of all."""
    net = network(torch.nn.BatchNorm2d)
    net[6] = torch.nn.BatchNorm1d(48)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for x, y in batches(steps):
        x, y = hvd.allgather(x, name="alone.x"), hvd.allgather(y, name="alone.y")
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return net


@check
def sync_batch_norm_beside():
    expected = alone(4)
    with kernels_for_the_cpu():
        for wrap, exact in (
            (compressed("dense/raw"), True),
            (horovod(), True),
            (compressed(bucket_bytes=1000), False),
            (compressed("powersgd:2"), False),
        ):
            weights, _, net = train(wrap, steps=4, net=network(SyncBatchNorm))
            same_on_all_ranks(weights)
            same_on_all_ranks(net[1].running_var)
            assert torch.isfinite(weights).all()
            if exact:
                assert torch.allclose(weights, flat(expected), rtol=0, atol=1e-4), (weights - flat(expected)).abs().max()
                assert torch.allclose(net[1].running_var, expected[1].running_var, rtol=1e-3)
