"""The model of memory traffic: what the interpreter counts, and how many passes over a gradient the default takes."""

import torch
from counting import counted
from inputs import STREAM, tensor, vector
from support.checking import check

import grace_ext
from grace_ext.adapters._torch import device_decoder, device_encoder
from grace_ext.adapters._torch.kernels import topk, traffic
from grace_ext.adapters._torch.kernels.parts import Parts
from grace_ext.pipeline.container import split

SPEC, D = "topk:0.01/rice/qsgd:7", 120_000
LARGE = 25_600_000  # elements of a ResNet-50


def containers(ranks):
    compressor = grace_ext.compressor(SPEC)
    return [split(compressor.compress(vector("normal", D, rank)), 1, D)[0] for rank in range(ranks)]


@check
def the_model_of_encoding_agrees_with_counts():
    gradient = tensor(vector("normal", D))
    sizes = (40_000, 3, D - 40_003)
    apart = Parts(list(gradient.clone().split(sizes)), topk.parts_layout(sizes))
    for bits, given in ((32, gradient.clone()), (16, gradient.clone()), (32, apart), (16, apart)):
        residual, following = (
            tensor(vector("normal", D, 1)),
            torch.zeros(D, dtype=torch.float32 if bits == 32 else torch.int16),
        )
        programs = apart.layout.blocks if given is apart else None
        with counted() as found:
            device_encoder.encode(
                grace_ext.compressor(SPEC),
                given,
                residual if bits == 32 else residual.bfloat16(),
                STREAM,
                0.0,
                following=following,
            )
        sample = topk.sample_size(D)
        candidates = (
            found["add_and_collect"] - (4 + bits / 4) * D - (44 if programs else 20) * (programs or -(-D // topk.BLOCK))
        ) / 8
        assert D // 100 <= candidates <= D // 20, candidates
        model = traffic.encode(D, D // 100, candidates, sample, bits, programs=programs)
        assert set(found) == {name for name in model if "cumsum" not in name}
        for name, number in found.items():
            # In the second round of a selection, only some are counted; of codes, not all reach into a second word.
            least = 0.6 if name == "radix_histogram" else 0.85 if name == "rice_write" else 0.98
            assert least * model[name] <= number <= 1.02 * model[name], (bits, name, number, model[name])


@check
def the_model_of_decoding_agrees_with_counts():
    ranks, received = 2, containers(2)
    with counted() as found:
        device_decoder.decode_sum(received, torch.empty(D), 0.5)
    unary = received[0].index_section.size - 1 - (D // 100 * int(received[0].index_section[0]) + 7) // 8
    model = traffic.decode(D, D // 100, ranks, unary)
    assert set(found) == {name for name in model if "cumsum" not in name and name != "zeros"}
    for name, number in found.items():
        assert abs(number / model[name] - 1) <= 0.04, (name, number, model[name])


@check
def the_gradient_is_gone_over_three_times_to_encode_it_and_once_to_decode():
    """Reading it and the residual, and writing what remains; the rest is about what is selected."""
    n, sample = LARGE // 100, topk.sample_size(LARGE)
    for bits, dense in ((32, 3), (16, 2)):
        model = traffic.encode(LARGE, n, round(1.25 * n), sample, bits)
        assert dense <= model["add_and_collect"] / 4 / LARGE <= dense + 0.03
        assert traffic.passes(model, LARGE) <= dense + 0.33
        in_tensors = traffic.encode(LARGE, n, round(1.25 * n), sample, bits, programs=-(-LARGE // topk.BLOCK) + 161)
        assert traffic.passes(model, LARGE) < traffic.passes(in_tensors, LARGE) <= traffic.passes(model, LARGE) + 0.01
    assert traffic.passes(traffic.decode(LARGE, n, 1, n // 4), LARGE) <= 1.2
