"""Whole containers: the bytes of the host's encoder, its remainder, and the sums that its decoder gives."""

import time

import numpy as np
import torch
from inputs import STREAM, same, tensor, vector, with_special
from support.checking import check, raises

import grace_ext
from grace_ext import ContainerError
from grace_ext.adapters._torch import device_decoder, device_encoder, device_transform
from grace_ext.pipeline import container, decoder
from grace_ext.pipeline.presets import PRESETS
from grace_ext.transforms.dct import DCT

SPARSE = [
    "topk:0.01/rice/qsgd:7",
    "topk:0.01/rice/raw",
    "topk:0.05/auto/qsgd:4:bucket=64",
    "topk:0.01/rice/lloyd",
    "topk:0.02/bloom:p0:fpr=0.01/lloyd",
    "topk:0.02/bloom:naive/qsgd:4",
    "topk:0.3/elias_fano/qsgd:8:norm=l2",
    "topk:1/rice/qsgd:7",
    "topk:0.02/rice/qsgd:4:levels=300",
]
DENSE = [
    "dense/qsgd:4",
    "dense/qsgd:6:norm=l2",
    "dense/onebit",
    "dense/fp16",
    "dense/bf16",
    "dense/terngrad",
    "dense/minmax:4",
    "dense/natural",
    "dense/threelc:1.5",
    "dense/lloyd",
    "dense/sketchml:8",
]
TRANSFORMED = [
    "dct:16/topk:0.02:per=chunk/auto/minmax:per=chunk",
    "dct:8:dims=1/topk:0.05/rice/qsgd:7",
    "dct:4/topk:0.5:per=32/rice/lloyd",
    "dct:32/topk:0.01/bloom:fpr=0.01/fp16",
    "dct:8/topk:0.2:per=chunk/bitmap/raw",
]


def compare(spec, gradient, residual):
    compressor, pending = grace_ext.compressor(spec, seed=STREAM.seed), np.empty_like(gradient)
    expected = compressor.encode(gradient, STREAM, state=(residual, pending))
    blob, own = expected.blob.copy(), tensor(gradient)
    found = device_encoder.encode(compressor, own, tensor(residual), STREAM, time.perf_counter())
    assert found.blob.tobytes() == blob.tobytes(), spec
    assert found.index_codec == expected.index_codec and found.non_finite == expected.non_finite
    if not found.non_finite:
        assert same(own, pending), f"{spec}: remainder"
    expected = compressor.encode(gradient, STREAM)
    own = tensor(gradient)
    found = device_encoder.encode(compressor, own, None, STREAM, time.perf_counter())
    assert found.blob.tobytes() == expected.blob.tobytes(), spec
    assert same(own, gradient), f"{spec}: the gradient was changed"
    assert set(found.seconds) >= {"value", "container"} or found.non_finite


@check
def containers_are_the_host_s():
    for spec in [*SPARSE, *DENSE]:
        for kind in ("normal", "ties", "denormal", "zeros"):
            for d in (1, 40, 5000) if kind == "normal" else (700,):
                compare(spec, vector(kind, d), vector(kind, d, 1))
    compare(SPARSE[0], *np.empty((2, 0), np.float32))
    compare(DENSE[0], *np.empty((2, 0), np.float32))


@check
def containers_of_published_methods_are_the_host_s():
    for spec in PRESETS:
        compare(spec, vector("normal", 6000), vector("normal", 6000, 1))


@check
def transforms_are_the_host_s_in_every_bit():
    for size in (2, 4, 8, 16, 32, 64, 128, 256):
        for dims, kind in ((1, "normal"), (2, "denormal"), (2, "huge"), (1, "zeros")):
            if size > 64 and kind != "normal":
                continue  # larger squares have nothing else than larger rows
            transform = DCT(size, dims)
            given = vector(kind, 2 * transform.chunk + 3, size)
            domain = transform.domain(transform.parameters(), given.size)
            expected = np.empty(domain, np.float32)
            transform.forward(given, expected)
            found = device_transform.forward(tensor(given), transform)
            assert same(found, expected), (size, dims, kind)
            transform.inverse(transform.parameters(), expected)
            assert same(device_transform.inverse(found, transform.parameters()), expected), (size, dims, kind)


@check
def containers_of_coefficients_are_the_host_s():
    for spec in TRANSFORMED:
        for kind, d in (("normal", 700), ("ties", 300), ("zeros", 40), ("normal", 1)):
            compare(spec, vector(kind, d), vector(kind, d, 1))
        compare(spec, with_special(vector("normal", 200), np.inf), vector("normal", 200, 1))


@check
def a_gradient_that_is_not_finite_has_the_host_s_container():
    for spec in [SPARSE[0], SPARSE[3], *DENSE]:
        for special in (np.nan, np.inf):
            compare(spec, with_special(vector("normal", 700), special), vector("normal", 700, 1))


def containers(specs, d):
    return [
        container.parse(grace_ext.compressor(spec).compress(vector("normal", d, seed), name="x", step=seed))
        for seed, spec in enumerate(specs)
    ]


@check
def sums_are_the_host_s_in_every_bit():
    for specs in (
        [SPARSE[0]] * 4,
        DENSE,
        SPARSE,
        [*DENSE, "dense/raw"],
        ["topk:0.01/rice/qsgd:7", "topk:0.05/raw/sketchml", "topk:0.1/raw/polyfit"],
        TRANSFORMED[:1] * 3,
        [TRANSFORMED[0], SPARSE[0], TRANSFORMED[1]],
        ["dct:8/dense/qsgd:4"] * 2,
        [],
    ):
        for d in (1, 33, 5000):
            received, expected, out = containers(specs, d), np.empty(d, np.float32), torch.empty(d)
            decoder.decode_sum(received, expected, 1 / 3)
            assert device_decoder.decode_sum(received, out, 1 / 3)
            assert same(out, expected), specs
    received.append(container.parse(container.pack_non_finite(d)))
    assert not device_decoder.decode_sum(received, out, 1.0) and out.isnan().all()


@check
def damaged_sections_are_refused_as_the_host_refuses_them():
    """Bytes are changed behind the checksum's back."""
    d, rng = 3000, np.random.default_rng(0)
    refused = 0
    for spec in (
        "topk:0.05/rice/qsgd:4:levels=5",
        "dense/qsgd:4:levels=5",
        "dense/natural:4",
        "dense/threelc",
        "topk:0.05/rice/lloyd:0.02:entropy=none",
        "topk:0.1/rice/sketchml:5",
        "dct:8/topk:0.1:per=chunk/rice/minmax:5:per=chunk",
    ):
        [sound] = containers([spec], d)
        for which in ("index_section", "value_section"):
            for _ in range(12 if getattr(sound, which).size else 0):
                section = getattr(sound, which).copy()
                section[rng.integers(section.size)] ^= 1 << rng.integers(8)
                [one] = containers([spec], d)
                one = one._replace(**{which: section})
                expected, out = np.empty(d, np.float32), torch.empty(d)
                try:
                    decoder.decode_sum([one], expected, 1.0)
                except ContainerError as error:
                    refused += 1
                    with raises(ContainerError, str(error)):
                        device_decoder.decode_sum([one], out, 1.0)
                else:
                    assert device_decoder.decode_sum([one], out, 1.0) and same(out, expected)
    assert refused >= 5
