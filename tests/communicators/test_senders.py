"""senders: each element is the mean over the ranks that have sent it."""

import numpy as np
import pytest
from support.communication import exchange
from support.exchanges import arrays_of
from support.in_process_ranks import RANKS, gradient, on_all_ranks
from support.memory_exchanges import make, step, topk

import grace_ext
from grace_ext import ConfigError
from grace_ext._util.rng import Stream
from grace_ext.errors import ContainerError
from grace_ext.pipeline import container, spec
from grace_ext.pipeline.decoder import decode_sender_mean, unpack_all


def mean_over_senders(parts):
    """parts: one dense vector for each rank, 0 where it has sent nothing."""
    total = np.zeros_like(parts[0])
    for part in parts:
        total += part
    return total / np.maximum(np.count_nonzero(parts, axis=0), 1).astype(np.float32)


@pytest.mark.parametrize("weight", [1 / RANKS, 1.0])  # a mean and a sum
@pytest.mark.parametrize("name", ["topk:0.1/rice/raw", "topk:0.3/auto/fp16", "topk:1.0/bitmap/fp16"])
def test_the_mean_of_an_element_is_over_the_ranks_that_sent_it(name, weight):
    gradients = [gradient(rank) for rank in range(RANKS)]
    compressor = grace_ext.compressor(name)
    parts = [grace_ext.decompress(compressor.compress(g, rank=rank), g.size) for rank, g in enumerate(gradients)]
    expected = mean_over_senders(parts) * np.float32(weight * RANKS)
    senders = np.count_nonzero(parts, axis=0)
    assert set(senders) >= {1, 2} or name.startswith("topk:1")
    for out, finite, pending in exchange("senders", name, gradients, weight):
        np.testing.assert_array_equal(out, expected)
        assert finite and pending.wire_bytes > 0 and {"exchange", "decode"} <= pending.seconds.keys()


def test_containers_count_by_their_shares():
    names, shares = ["topk:0.3/rice/raw", "topk:0.1/rice/qsgd:2", "dense/raw"], [0.2, 1.5, 0.7]
    blobs = [grace_ext.compressor(name).compress(gradient(rank, 500)) for rank, name in enumerate(names)]
    total, weights = np.zeros(500), np.zeros(500)
    for blob, share, sent in zip(blobs, shares, [150, 50, 500], strict=True):
        values = grace_ext.decompress(blob, 500).astype(np.float64)
        is_sent = np.zeros(500, bool)
        is_sent[unpack_all([container.parse(blob)])[0] if sent < 500 else ...] = True  # some of them as 0
        assert is_sent.sum() == sent
        total, weights = total + share * values, weights + share * is_sent
    out = np.empty(500, np.float32)
    decode_sender_mean([container.parse(blob) for blob in blobs], out, 2.0, shares)
    np.testing.assert_allclose(out, 2 * total / weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["dense/qsgd:7", "randomk:0.1"])
def test_where_all_ranks_send_the_same_elements_it_is_allgather(name):
    gradients = [gradient(rank) for rank in range(RANKS)]
    expected = exchange("allgather", name, gradients, 1 / RANKS)[0][0]
    for out, _, _ in exchange("senders", name, gradients, 1 / RANKS):
        np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-6)  # weighted before they are summed
        assert out.any()


def test_with_a_transform_the_elements_are_its_coefficients():
    gradients = [gradient(rank, 4096) for rank in range(RANKS)]
    compressor = grace_ext.compressor("dct:16/topk:0.1:per=chunk/raw/raw")
    transform, coefficients = compressor.transform, []
    for rank, one in enumerate(gradients):
        sent, found = grace_ext.decompress(compressor.compress(one, rank=rank), 4096), np.empty(4096, np.float32)
        transform.forward(sent, found)
        coefficients.append(np.where(np.abs(found) > 1e-3, found, np.float32(0)))
    each = compressor.sparsifier.count(transform.chunk) * 4096 // transform.chunk
    assert [np.count_nonzero(one) for one in coefficients] == [each] * RANKS
    expected = mean_over_senders(coefficients)
    transform.inverse(transform.parameters(), expected)
    for out, _, _ in exchange("senders", str(compressor), gradients, 1 / RANKS):
        np.testing.assert_allclose(out, expected, atol=1e-5)


def test_a_rank_without_a_gradient_is_no_sender():
    communicator, compressor = spec.parse_stage("communicator", "senders"), grace_ext.compressor("topk:0.2/rice/raw")
    parts = [grace_ext.decompress(compressor.compress(gradient(rank)), 5000) for rank in (0, 2)]

    def work(transport):
        if transport.rank == 1:
            pending = communicator.start_empty(transport, "b", compressor, 5000, Stream())
        else:
            pending = communicator.start(transport, "b", compressor, gradient(transport.rank), None, Stream())
        out = np.empty(5000, np.float32)
        assert communicator.finish(pending, transport, out, 1 / RANKS)
        return out

    for out in on_all_ranks(work):
        np.testing.assert_array_equal(out, mean_over_senders(parts) * np.float32(1 / RANKS * RANKS))


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_reaches_all_ranks(poison):
    gradients = [gradient(rank) for rank in range(RANKS)]
    gradients[2][7] = poison
    for out, finite, _ in exchange("senders", "topk:0.1/rice/raw", gradients, 1 / RANKS):
        assert not finite and np.isnan(out).all()


def test_residuals_are_what_a_rank_has_not_sent():
    def work(transport):
        exchanged = make(transport, "residual", communicator="senders")
        return [step(exchanged, gradient(transport.rank) * (i + 1))[0] for i in range(3)], arrays_of(exchanged)

    residuals = np.zeros((RANKS, 5000), np.float32)
    results = on_all_ranks(work)
    for i in range(3):
        sent = []
        for rank in range(RANKS):
            residuals[rank] += gradient(rank) * (i + 1)
            sent.append(topk(residuals[rank], 500))
            residuals[rank] -= sent[-1]
        for outs, _ in results:
            np.testing.assert_array_equal(outs[i], mean_over_senders(sent) * np.float32(1 / RANKS * RANKS))
    for rank, (_, arrays) in enumerate(results):
        np.testing.assert_array_equal(np.concatenate([arrays["residual:a"], arrays["residual:b"]]), residuals[rank])


def test_memories_that_need_the_sum_are_refused():
    communicator, compressor = spec.parse_stage("communicator", "senders"), grace_ext.compressor("topk:0.1")
    for name in ("none", "residual", "momentum", "dgc", "demo"):
        grace_ext.memory(name).check(compressor, communicator)
    for name in ("ef21", "adam", "muon", "onebit_adam:100", "zeroone_adam", "signum"):
        memory = grace_ext.memory(name)
        with pytest.raises(ConfigError, match=f"memory '{memory.name}' .*senders.* use communicator allgather"):
            memory.check(compressor, communicator)


def test_containers_with_different_transforms_have_no_mean():
    gradients = gradient(0, 4096), gradient(1, 4096)
    specs = "dct:16/topk:0.1:per=chunk/raw/raw", "topk:0.1/rice/raw"
    blobs = [grace_ext.compressor(name).compress(one) for name, one in zip(specs, gradients, strict=True)]
    with pytest.raises(ContainerError, match="different transforms"):
        decode_sender_mean([container.parse(blob) for blob in blobs], np.empty(4096, np.float32))
