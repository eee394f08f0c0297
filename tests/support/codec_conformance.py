"""What every stage of a compressor promises, as checks. Each test_conformance.py applies them to all that is registered."""

import functools
import threading
import tracemalloc

import numpy as np
import pytest

import grace_ext
from grace_ext import ContainerError, registry
from grace_ext._util.rng import Stream
from grace_ext.pipeline.container import order_width
from grace_ext.pipeline.container import parse as parse_container
from grace_ext.pipeline.decoder import add_all, decode_sum
from grace_ext.sparsifiers import Scope
from support.arrays import FLT_MAX, gauss, read_only, same_bits
from support.guards import guarded

STREAM = Stream(seed=3, name="weight", step=5, rank=1)


def refused_or(decode, payload, out):
    """True if decode(payload, out) succeeds, False if it raises ContainerError; anything else is an error."""
    try:
        decode(payload, out)
        return True
    except ContainerError:
        return False


def decoded_or_refused(decode, payload, size):
    """What decode(payload, out) writes to uint8[size], whatever was there and nowhere else; None if it refuses the payload."""
    found = []
    for before in (0, 0xEE):
        out, intact = guarded(size)
        out[:] = before
        good = refused_or(decode, read_only(payload), out)
        assert intact()
        found.append(out.copy() if good else None)
    assert found[0] is None and found[1] is None or np.array_equal(*found)
    return found[0]


def refused(message, blob, size=8):
    """decompress and decode_add refuse it with this message; decode_add leaves the accumulator as it was."""
    with pytest.raises(ContainerError, match=message):
        grace_ext.decompress(blob, size)
    accumulator = gauss(size)
    with pytest.raises(ContainerError, match=message):
        grace_ext.decode_add(blob, accumulator)
    assert same_bits(accumulator, gauss(size))


def mutations(payload, seed=0, count=40):
    """Truncated, extended, emptied and altered versions of uint8[m]."""
    rng = np.random.default_rng(seed)
    yield payload[:0]
    yield payload[:-1]
    yield payload[: payload.size // 2]
    yield np.append(payload, np.uint8(0))
    yield rng.integers(0, 256, payload.size).astype(np.uint8)
    for _ in range(count if payload.size else 0):
        changed = payload.copy()
        at = rng.integers(0, min(payload.size, 12)) if rng.random() < 0.5 else rng.integers(0, payload.size)
        changed[at] = rng.integers(0, 256)
        yield changed


# Inputs


@functools.cache
def gradients():
    """name -> float32[d], all finite."""
    rng = np.random.default_rng(1)
    found = {"empty": np.empty(0, np.float32), "one": gauss(1), "one zero": np.zeros(1, np.float32)}
    found.update({f"{d} elements": gauss(d, d) for d in (2, 15, 16, 17, 511, 512, 513, 4095, 4096, 4097)})
    found["all zero"] = np.zeros(700, np.float32)
    found["signed zeros"] = np.where(rng.random(700) < 0.5, -0.0, 0.0).astype(np.float32)
    found["all equal"] = np.full(700, -1.25, np.float32)
    found["ties"] = rng.choice(np.array([-2, -1, 0, 1, 2], np.float32), 3000)
    found["one value in zeros"] = np.eye(1, 5000, 1234, dtype=np.float32)[0]
    found["FLT_MAX"] = gauss(1000)
    found["FLT_MAX"][[0, 500, 999]] = FLT_MAX, -FLT_MAX, FLT_MAX
    found["subnormal"] = (gauss(600) * np.float32(1e-41)).astype(np.float32)
    found["all magnitudes"] = (np.sign(gauss(3000)) * np.float32(2.0) ** rng.integers(-149, 127, 3000)).astype(np.float32)
    found["heavy tail"] = rng.standard_t(1.5, 20_000).astype(np.float32)
    found["clusters"] = np.where(np.arange(20_000) % 2000 < 150, gauss(20_000), np.float32(1e-4)).astype(np.float32)
    return found


@functools.cache
def supports():
    """name -> (indices uint32[k], d), k >= 1."""
    rng = np.random.default_rng(2)
    found = {
        "the only one": (np.zeros(1, np.uint32), 1),
        "last": (np.array([4096], np.uint32), 4097),
        "first and last of 2**20": (np.array([0, 2**20 - 1], np.uint32), 2**20),
    }
    for d in (8, 15, 16, 17, 511, 512, 513, 4095, 4096, 4097):
        for k in {1, d // 10 or 1, d // 2, d - 1, d}:
            found[f"{k} of {d}"] = (np.sort(rng.choice(d, k, replace=False)).astype(np.uint32), d)
    found["clusters"] = (np.flatnonzero(np.arange(30_000) % 3000 < 40).astype(np.uint32), 30_000)
    found["2000 of 200 000"] = (np.sort(rng.choice(200_000, 2000, replace=False)).astype(np.uint32), 200_000)
    return found


def index_codecs():
    """Names of those that encode any support."""
    return [name for name in registry.names("index") if registry.lookup("index", name).universal]


# Options to try besides the defaults; a part that is not listed is tried with its defaults.
OPTIONS = {
    ("index", "huffman"): ["huffman:bytes"],
    ("index", "rice_adaptive"): ["rice_adaptive:16", "rice_adaptive:4096"],
    ("index", "rows"): ["rows:1", "rows:7", "rows:2147483647"],
    ("index", "row_context"): ["row_context:1", "row_context:7", "row_context:65536"],
    ("transform", "dct"): ["dct:8", "dct:16:dims=1"],
    ("index", "bloom"): [
        "bloom:p1:fpr=0.01",
        "bloom:p2:fpr=0.01",
        "bloom:leftmost:fpr=0.1",
        "bloom:middle:fpr=0.5",
        "bloom:rightmost:fpr=1e-6",
        "bloom:naive:fpr=0.9:seed=7",
    ],
    ("sparsifier", "topk"): ["topk:0.1", "topk:1.0", "topk:0.1:per=tensor"],
    ("sparsifier", "randomk"): ["randomk:0.2", "randomk:1.0", "randomk:0.3:unbiased=true"],
    ("sparsifier", "threshold"): ["threshold:1.5"],
    ("sparsifier", "dgc"): ["dgc:0.1:sample=0.5"],
    ("sparsifier", "adaq"): ["adaq:0.1"],
    ("value", "qsgd"): [
        "qsgd:2",
        "qsgd:7:bucket=8",
        "qsgd:8:bucket=32768",
        "qsgd:levels=1:norm=l2:bucket=8",
        "qsgd:levels=256:norm=l2",
        "qsgd:levels=32767",
        "qsgd:levels=5:entropy=huffman",
        "qsgd:norm=l2:entropy=ans",
    ],
    ("value", "sketchml"): ["sketchml:5:entropy=ans", "sketchml:256:entropy=huffman"],
    ("value", "lloyd"): ["lloyd:0.01:entropy=huffman", "lloyd:0.3", "lloyd:0.1:entropy=none"],
    ("value", "deflate"): ["deflate:6"],
    ("value", "polyfit"): ["polyfit:1:segments=20", "polyfit:0:segments=1"],
    ("value", "minmax"): ["minmax:4:chunk=100:entropy=ans"],
    ("value", "natural"): ["natural:8:entropy=huffman"],
    ("value", "onebit"): ["onebit:0"],
    ("value", "sign"): ["sign:bucket=0"],
    ("value", "inceptionn"): ["inceptionn:1e-5"],
    ("value", "terngrad"): ["terngrad:ans:bucket=64"],
    ("value", "threelc"): ["threelc:1.1"],
}


STOCHASTIC = {
    "qsgd",
    *OPTIONS["value", "qsgd"],
    "natural",
    *OPTIONS["value", "natural"],
    "terngrad",
    *OPTIONS["value", "terngrad"],
}


def variants(kind):
    names = index_codecs() if kind == "index" else registry.names(kind)
    return [text for name in names for text in (name, *OPTIONS.get((kind, name), []))]


def specs():
    """Every part at least once with the default others, and each index codec with some of the value codecs."""
    index, value = index_codecs(), variants("value")
    pairs = [(i, "raw") for i in index] + [("auto", v) for v in value]
    pairs += [(index[n % len(index)], v) for n, v in enumerate(value)]
    found = [f"topk:0.1/{i}/{v}" for i, v in pairs] + [f"{s}/auto/raw" for s in variants("sparsifier")]
    found += [f"dense/{v}" for v in value]
    roads = ("topk:0.1/auto/raw", "topk:0.1:per=chunk/rice/qsgd", "dense/raw")
    found += [f"{transform}/{road}" for transform in variants("transform") for road in roads]
    found += ["topk:0.1/keys/polyfit", "topk:0.1/keys/dexp"]
    found += ["randomk:0.1/rice/qsgd:7", "randomk:0.1/shared/fp16", "randomk:0.1:unbiased=true/shared/qsgd"]
    return sorted(set(found))


# The parts


def check_index_codec(codec, indices, d):
    codec = codec.choose(read_only(indices), d)
    assert codec.id is not None, "the codec that writes a section has an id"
    payload, support = codec.encode(read_only(indices), d)
    check_support(support, d)
    if codec.lossless:
        assert np.array_equal(support, indices)
        assert codec.size(read_only(indices), d) == payload.size
    assert payload.dtype == np.uint8 and payload.ndim == 1
    again, _ = type(codec)(**codec.options()).encode(read_only(indices), d)
    assert same_bits(again, payload)

    out = np.full(support.size, 0xFFFFFFFF, np.uint32)
    type(codec).decode(read_only(payload), d, out)
    assert np.array_equal(out, support), "the receiver rebuilds another support"
    for bad in mutations(payload):
        for k in {support.size, 1, min(d, support.size + 1)}:
            out = np.full(k, 0xFFFFFFFF, np.uint32)
            if refused_or(lambda bytes_, into: type(codec).decode(bytes_, d, into), bad, out):
                check_support(out, d)


def check_support(support, d):
    assert support.dtype == np.uint32 and support.ndim == 1
    assert support.size == 0 or support[-1] < d
    assert (support[1:] > support[:-1]).all(), "not strictly ascending"


def check_value_codec(codec, values):
    """values: float32[k], finite, k >= 1. Returns what receivers get."""
    payload, order = codec.encode(read_only(values), STREAM)
    assert payload.dtype == np.uint8 and payload.ndim == 1
    if order is not None:
        assert order.dtype == np.uint32 and np.array_equal(np.sort(order), np.arange(values.size))
    again, _ = type(codec)(**codec.options()).encode(read_only(values), STREAM)
    assert same_bits(again, payload)

    def decode(bytes_, filled_before):
        out = np.full(values.size, filled_before, np.float32)
        return out if refused_or(type(codec).decode, bytes_, out) else None

    decoded = decode(read_only(payload), np.nan)
    assert decoded is not None and np.isfinite(decoded).all()
    decoded[order if order is not None else ...] = decoded.copy()
    if codec.lossless:
        assert same_bits(decoded, values)
    for bad in mutations(payload):
        first, second = decode(bad, 1), decode(bad, 2)
        assert (first is None) == (second is None)
        assert first is None or same_bits(first, second), "decode left places as they were"
    return decoded


def scope_of(dense):
    """Of one tensor."""
    return Scope(STREAM, (dense.size,))


def check_sparsifier(sparsifier, dense):
    scope = scope_of(dense)
    for at in {0, dense.size // 2, dense.size - 1} if dense.size else ():
        bad = dense.copy()
        bad[at] = np.nan if at % 2 else -np.inf
        values = sparsifier.select(bad, scope)[1]
        assert values.size == 0 or not np.isfinite(values).all(), "a NaN or an Inf stayed unseen"
    indices, values = sparsifier.select(read_only(dense), scope)
    if indices is None:
        assert same_bits(values, dense)
    else:
        indices, values = indices.copy(), values.copy()
        check_support(indices, dense.size)
        assert same_bits(values, dense[indices])

    residual = gauss(dense.size, 7) * np.float32(0.01)
    with np.errstate(over="ignore", invalid="ignore"):
        total = dense + residual
    expected = sparsifier.select(total, scope)
    expected = [None if part is None else part.copy() for part in expected]
    in_place = dense.copy()
    for gradient, out in ((read_only(dense), np.full_like(dense, 5)), (in_place, in_place)):
        found = sparsifier.select_compensated(gradient, read_only(residual), out, scope)
        assert same_bits(out, total)
        assert (found[0] is None) == (expected[0] is None)
        assert found[0] is None or np.array_equal(found[0], expected[0])
        assert same_bits(found[1], expected[1])


# The whole pipeline


def check_compressor(c, gradient):
    """Round trip, sizes, wrong sizes. Returns (container, dense)."""
    blob = c.compress(read_only(gradient), name="weight", step=5, rank=1)
    encoded = c.encode(read_only(gradient), Stream(c.seed, "weight", 5, 1))
    assert same_bits(encoded.blob, blob)
    dense = grace_ext.decompress(read_only(blob), gradient.size)
    assert dense.dtype == np.float32 and dense.shape == gradient.shape and np.isfinite(dense).all()

    if c.transform is None:
        support = np.arange(gradient.size) if encoded.support is None else encoded.support
        assert same_bits(encoded.values, gradient[support])
        expected = np.zeros_like(gradient)
        expected[support] = encoded.decoded
        assert same_bits(dense, expected), "the receiver gets something else than the sender believes"
        if c.value.lossless and not (c.index.remaps_values or c.unbiased):
            assert same_bits(dense[support], gradient[support])

    check_layout(blob, encoded, gradient.size)
    for wrong in {0, 1, gradient.size - 1, gradient.size + 1, 2**31 - 1} - {gradient.size, -1}:
        assert not refused_or(grace_ext.decompress, blob, wrong)
    check_adding(blob, dense)
    return blob, dense


def check_layout(blob, encoded, d):
    """Sizes add up; rule 3 (no section longer than raw) and rule 5 (at most 24 bytes of overhead)."""
    parsed = parse_container(blob, d)
    assert parsed.nbytes == blob.size and parsed.d == d <= parsed.domain and not parsed.non_finite
    assert parsed.k == len(encoded.values)
    assert parsed.index_section.size == encoded.index_bytes <= (4 * parsed.k if parsed.index_id else 0)
    assert parsed.value_section.size == encoded.value_bytes <= 4 * parsed.k
    order = 0 if parsed.order_section is None else (parsed.k * order_width(parsed.k) + 7) // 8
    overhead = blob.size - encoded.index_bytes - encoded.value_bytes - order
    passed = (d >= 2**28) + (parsed.index_id != 0) * ((parsed.k >= 2**21) + (encoded.index_bytes >= 2**21))
    assert overhead <= 24 + passed + (0 if parsed.transform is None else 2 + len(parsed.transform[1]))


def check_adding(blob, dense):
    start = gauss(dense.size, 8)
    accumulator = start.copy()
    add_all([parse_container(blob)], accumulator)
    with np.errstate(over="ignore"):
        assert same_bits(accumulator, start + dense)
    for weight in (1.0, 0.25, 0.3):
        accumulator = start.copy()
        grace_ext.decode_add(read_only(blob), accumulator, weight)
        with np.errstate(over="ignore"):
            assert same_bits(accumulator, start + np.float32(weight) * dense)
        alone = np.full_like(start, 9)
        decode_sum([parse_container(blob)], alone, weight)
        assert np.array_equal(alone, np.float32(weight) * dense)


def check_feedback(c, steps):
    """The plain and the fused road give the same bytes and the same state; nothing is lost if values are exact."""
    plain, fused, in_place = (grace_ext.memory("residual") for _ in range(3))
    for step, gradient in enumerate(steps):
        stream = Stream(c.seed, "w", step, 0)
        before = _residual(plain, gradient)
        with np.errstate(over="ignore", invalid="ignore"):
            compensated = plain.compensate("w", gradient)
            blob = c.compress(compensated, name="w", step=step)
            sent = grace_ext.decompress(blob, gradient.size)
            plain.update("w", compensated, sent)
            total = gradient + before
        left = total.copy()
        assert same_bits(c.encode_in_place(left, stream).blob, blob)
        for memory, reuse in ((fused, False), (in_place, True)):
            given = gradient.copy()
            state, following = memory.begin("w", gradient.size)
            pending = given if reuse else following
            encoded = c.encode_compensated(given, state, pending, stream)
            assert same_bits(encoded.blob, blob)
            following[:] = pending
            memory.rollback() if encoded.non_finite else memory.commit()
        state = _residual(fused, gradient)
        assert np.isfinite(state).all()
        assert same_bits(state, _residual(plain, gradient))
        assert same_bits(state, _residual(in_place, gradient))
        if encoded.non_finite:
            assert np.isnan(sent).all() and np.array_equal(state, before)
        else:
            assert same_bits(state, left)
        if c.value.lossless and not (encoded.non_finite or c.index.remaps_values or c.unbiased):
            scale = 0 if c.transform is None else 1e-6 * np.abs(total).max(initial=0)
            assert np.allclose(state + sent, total, rtol=0, atol=scale)


def _residual(memory, gradient):
    return memory.state_dict().get("w", {}).get("residual", np.zeros_like(gradient))


def peak_of(refusal, function, *arguments):
    """The most memory that numpy and Python hold while function(*arguments) runs, in a thread without scratch arrays. It may
    end with the exception `refusal`."""
    peaks = []

    def run():
        tracemalloc.start()
        try:
            function(*arguments)
        except refusal:
            pass
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return peaks[0]


def decode(codec, values, stream):
    out = np.empty_like(values)
    codec.decode(codec.encode(values, stream)[0], out)
    return out.astype(np.float64)
