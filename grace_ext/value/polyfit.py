"""Value codec `polyfit`."""

import numpy as np

from .._util.rng import Stream
from ..errors import ConfigError, ContainerError
from ..kernels.polyfit import evaluate_segments, find_knots, fit_segments
from ..registry import register
from ._sorting import check_magnitudes, sort_by_sign
from .base import ValueCodec

MAX_DEGREE, MAX_SEGMENTS = 9, 255
HEAD = 3


@register
class PolyFit(ValueCodec):
    """Piecewise polynomials fitted to the sorted values, separately for positive and negative ones.

    A segment is split where it is furthest from its chord (Lemma 10 of the paper). The number of segments that Remark 4
    gives depends on the unit of the gradient, so here it grows with the logarithm of the number of values instead. Splitting
    one segment after the other is greedy, and not proven to meet the bound of Lemma 12, which is that of the best knots; on
    curves of many kinds, lines between these knots stay below 0.15 of it (a test checks the lemma and Remark 5). The order of
    the values costs ceil(log2 k) bits each, more than a whole 8-bit quantizer, and nothing beside the index codec `keys`.

    The payload holds the segments' lengths, edges and coefficients for each sign (docs/container-format.md, "Value
    sections").

    Args:
        degree: Degree of the polynomials, 0 to 9.
        segments: Most segments for each sign, 1 to 255. 0: one below 128 values, one more for each doubling, at most 12.

    Source:
        DeepReduce's Fit-Poly: Xu et al., DeepReduce: A Sparse-tensor Communication Framework for Federated Deep Learning,
        NeurIPS 2021, section 5 and appendix C.
    """

    name, id = "polyfit", 10
    sweep = {"segments": (0, 4, 16)}

    def __init__(self, degree: int = 5, segments: int = 0):
        if not 0 <= degree <= MAX_DEGREE:
            raise ConfigError(f"polyfit: degree={degree}; allowed: 0 to {MAX_DEGREE}")
        if not 0 <= segments <= MAX_SEGMENTS:
            raise ConfigError(f"polyfit: segments={segments}; allowed: 1 to {MAX_SEGMENTS}, or 0 for a number that fits")
        self.degree = degree
        self.segments = segments

    def encode(self, values: np.ndarray, stream: Stream) -> tuple[np.ndarray, np.ndarray | None]:
        order, signs = sort_by_sign(values)
        counts, lengths, edges, coefficients = [], [], [], []
        for magnitudes in signs:
            counts.append(0)
            if not magnitudes.size:
                continue
            ends = np.empty(self.segments or min(max(magnitudes.size.bit_length() - 6, 1), 12), np.int64)
            ends = ends[: find_knots(magnitudes, self.degree + 1, ends)]
            fitted = np.empty((ends.size, self.degree + 1), np.float32)
            fit_segments(magnitudes, ends, fitted)
            counts[-1] = ends.size
            lengths.append(np.diff(ends, prepend=0).astype("<u4"))
            edges.append(magnitudes[np.concatenate([[0], ends[:-1], [magnitudes.size - 1]])].astype("<f4"))
            coefficients.append(fitted.astype("<f4"))
        head = np.array([self.degree, *counts], np.uint8)
        return np.concatenate([head, *(part.reshape(-1).view(np.uint8) for part in lengths + edges + coefficients)]), order

    @staticmethod
    def decode(payload: np.ndarray, out: np.ndarray) -> None:
        if payload.size < HEAD or payload[0] > MAX_DEGREE:
            raise ContainerError("polyfit: the parameters are missing or out of range")
        terms, counts = int(payload[0]) + 1, [int(payload[1]), int(payload[2])]
        segments = sum(counts)
        edge_count = segments + sum(count > 0 for count in counts)
        if payload.size != HEAD + 4 * (segments + edge_count + segments * terms):
            raise ContainerError(f"polyfit: {payload.size} bytes for {segments} segments of degree {terms - 1}")
        lengths, edges, coefficients = np.split(payload[HEAD:], [4 * segments, 4 * (segments + edge_count)])
        lengths = lengths.view("<u4").astype(np.int64)
        edges = edges.view("<f4").astype(np.float32)
        coefficients = coefficients.view("<f4").astype(np.float32).reshape(segments, terms)
        if lengths.sum() != out.size or not lengths.all():
            raise ContainerError(f"polyfit: the segments do not hold {out.size} values")
        if not np.isfinite(coefficients).all():
            raise ContainerError("polyfit: a coefficient is not finite")
        at = segment = edge = 0
        for negative, count in zip((False, True), counts, strict=True):
            if not count:
                continue
            bounds, pieces = edges[edge : edge + count + 1], slice(segment, segment + count)
            check_magnitudes("polyfit", bounds)
            ends = np.cumsum(lengths[pieces])
            evaluate_segments(coefficients[pieces], bounds, ends, negative, out[at : at + int(ends[-1])])
            at, segment, edge = at + int(ends[-1]), segment + count, edge + count + 1
