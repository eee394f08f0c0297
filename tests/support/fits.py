"""Values and round trips for the codecs that fit sorted values."""

import functools

import numpy as np

from grace_ext.kernels.sketch import sketch_encode
from grace_ext.kernels.sort import argsort_bits
from grace_ext.pipeline import spec
from support import codec_conformance, reference_kernels

CASES = {name: values for name, values in codec_conformance.gradients().items() if values.size}


def value(text):
    return spec.parse_stage("value", text)


def round_trip(codec, values):
    """float32[k] as receivers get them, in the order of values; the payload's length."""
    payload, order = codec.encode(values, codec_conformance.STREAM)
    out = np.full(values.size, np.nan, np.float32)
    codec.decode(payload, out)
    if order is not None:
        out[order] = out.copy()
    return out, payload.size


def error(values, decoded):
    """Relative L2 error."""
    return np.linalg.norm(values.astype(float) - decoded) / np.linalg.norm(values.astype(float))


@functools.cache
def heavy(k=10_000):
    """The top 1 % of a normal times a lognormal variable, as in the notes' measurements."""
    rng = np.random.default_rng(0)
    gradient = (rng.standard_normal(100 * k) * np.exp(rng.standard_normal(100 * k))).astype(np.float32)
    return gradient[reference_kernels.topk(gradient, k)]


def sort(values, fence=lambda array: array):
    k = values.size
    order, ordered = fence(np.zeros(k, np.uint32)), fence(np.zeros(k, np.float32))
    count = argsort_bits(fence(values), fence(np.zeros(k, np.uint64)), fence(np.zeros(k, np.uint64)), order, ordered)
    return order, ordered, count


def sketch(values, most, bins, fence=lambda array: array):
    counts, lookup = fence(np.full(2 * bins + 1, 7, np.uint32)), fence(np.full(2 * bins + 1, 7, np.uint8))
    levels, table = fence(np.full(values.size, 255, np.uint8)), fence(np.full(256, np.nan, np.float32))
    used = sketch_encode(fence(values), most, counts, lookup, levels, table)
    return levels, table[:used]
