"""Buckets whose gradients are encoded and summed by kernels: a training's steps, and what crosses to the host."""

import dataclasses

import numpy as np
import torch
from accelerator import Accelerator, OnAccelerator
from inputs import STREAM, vector, with_special
from support.checking import check, raises
from support.exchanges import arrays_of
from support.in_process_ranks import on_all_ranks

import grace_ext
from grace_ext.adapters._torch.device import TorchBucket, bucket_class
from grace_ext.adapters._torch.kernel_bucket import KernelBucket
from grace_ext.exchange.buckets import Tensor
from grace_ext.exchange.engine import Exchange
from grace_ext.pipeline.container import split
from grace_ext.pipeline.presets import PRESETS
from grace_ext.pipeline.spec import parse_stage

SPECS = ["topk:0.01/rice/qsgd:7", "topk:0.02/auto/lloyd", "dense/qsgd:4"]
#: What may cross beside the container: where sizes are not known before, and numbers that the host needs.
SLACK = 64 * 1024


def make(transport, kind, spec, memory, sizes):
    tensors = [Tensor(f"t{number}", size, 2) for number, size in enumerate(sizes)]
    exchange = Exchange(transport, grace_ext.memory(memory), 1 / transport.size)
    bucket = exchange.bucket("bucket", tensors, grace_ext.compressor(spec), parse_stage("communicator", "allgather"))
    if kind is not None:
        assert kind.fits(bucket.compressor, bucket.communicator, bucket.memory), spec
        bucket = kind(bucket.name, bucket.tensors, bucket.compressor, bucket.communicator, bucket.memory)
    exchange.set_buckets([bucket])
    return exchange


def train(kind, spec, memory, sizes=(2500, 1200), steps=3, ranks=2):
    """The results of some steps, the second with a gradient that is not finite on rank 1, and what the memories keep."""

    def work(transport):
        exchange = make(transport, kind, spec, memory, sizes)
        results = []
        for step in range(steps):
            given = vector("normal", sum(sizes), 10 * step + transport.rank)
            given = with_special(given, np.nan) if step == 1 and transport.rank == 1 else given
            out = np.empty(sum(sizes), np.float32) if kind is None else torch.empty(sum(sizes))
            exchange.start(exchange.buckets[0], lambda into, given=given: copy(given, into))
            exchange.finish(exchange.buckets[0], out)
            exchange.end_step()
            results.append(np.array(out).tobytes())
        return results, {name: array.tobytes() for name, array in arrays_of(exchange).items()}

    return on_all_ranks(work, ranks)


def copy(given, into):
    if isinstance(into, np.ndarray):
        np.copyto(into, given)
    else:
        into.copy_(torch.from_numpy(given))


@check
def steps_are_the_host_s_in_every_bit():
    assert bucket_class("cpu") is KernelBucket
    for spec in SPECS:
        for memory in ("residual", "none"):
            expected = train(None, spec, memory)
            assert train(KernelBucket, spec, memory) == expected, (spec, memory)
            assert expected[0][0] == expected[1][0]
    assert train(TorchBucket, SPECS[0], "residual") == train(None, SPECS[0], "residual")


@check
def what_has_no_kernels_is_left_to_the_host():
    def work(transport):
        for spec, memory in (("topk:0.01:per=tensor/rice/raw", "residual"), ("dense/raw", "none"), (SPECS[0], "dgc")):
            exchange = make(transport, None, spec, memory, (500,))
            bucket = exchange.buckets[0]
            assert not KernelBucket.fits(bucket.compressor, bucket.communicator, bucket.memory), (spec, memory)

    on_all_ranks(work, 1)


def crossings(spec, d, memory="residual", kind="normal"):
    """Of a gradient's way to a container and back: bytes that came to the host and how often it waited, before and after, and
    the container's bytes."""

    def work(transport):
        bucket = make(transport, KernelBucket, spec, memory, (d,)).buckets[0]
        with Accelerator() as accelerator:
            out = torch.empty(d, device="cpu")
            state = bucket.memory.begin(bucket.name, d, bucket._arrays)
            dense = torch.zeros(d, device="cpu") if state is None else state[1]
            dense.copy_(torch.from_numpy(vector(kind, d)))
            blob = bucket._encode(dense, state and state[0], STREAM, 0.0).blob
            before = dataclasses.replace(accelerator.crossings)
            assert bucket._decode_sum(split(blob, 1, d), out, 1.0)
        return before.nbytes, before.times, blob.size, accelerator.crossings.nbytes - before.nbytes

    return on_all_ranks(work, 1)[0]


@check
def nothing_dense_crosses():
    """At most 1.5 times the container, and 64 KiB; of the sums, only whether codes were sound."""
    d, published = 16_000, [name for name, spec in PRESETS.items() if spec.startswith("topk")]
    for spec, memory in [*((spec, "none") for spec in SPECS), *((spec, "residual") for spec in [*SPECS, *published])]:
        came, waits, container, received = crossings(spec, d, memory)
        assert came <= 1.5 * container + SLACK, (spec, came, container)
        assert came < 4 * d / 4, (spec, came)
        assert waits <= 3 and received <= 64, (spec, waits, received)


@check
def the_default_spec_crosses_in_its_own_size():
    """No slack for what grows with the gradient, and the host waits for the count and for the container."""
    came, waits, container, _ = crossings(SPECS[0], 200_000)
    assert container < came <= 1.25 * container + 256, (came, container)
    assert waits == 2
    assert crossings(SPECS[0], 50_000, kind="zeros")[0] <= 128, "nothing was selected"
    came, waits, container, _ = crossings(SPECS[2], 50_000)
    assert container <= came + 64 <= container + 256 and waits == 1


@check
def the_stand_in_tells_what_it_should():
    """Otherwise the checks above would prove nothing."""
    with Accelerator() as accelerator:
        x = torch.zeros(8, device="cpu")
        for waiting in (
            lambda: x.sum().item(),
            lambda: bool(x[0]),
            lambda: x[x > 0],
            lambda: torch.nonzero(x),
            lambda: x.numpy(),
        ):
            with raises(AssertionError, "wait"):
                waiting()
        assert accelerator.crossings.nbytes == 0
        assert isinstance(x.view(torch.int32)[2:] + 1, OnAccelerator)
        assert not isinstance(x.cpu(), OnAccelerator) and x.tolist() == [0.0] * 8
        assert (accelerator.crossings.times, accelerator.crossings.nbytes) == (2, 64)
