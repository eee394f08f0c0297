"""Whole roads: from the gradient to a container with error feedback, and from all ranks' containers to their sum."""

import numpy as np

from ..pipeline import container
from ..pipeline.compressor import Compressor
from ..pipeline.decoder import decode_sum
from ..pipeline.presets import PRESETS
from .subject import PATIENCE, Contestant, Subject, relative_error, touch

_PRESET_PATIENCE = 1.0  # there are many, and some are slow; see subject.AT_LEAST


def road(subject: Subject, spec: str, one: Compressor, ranks: int, patience: float = PATIENCE / 2) -> list[dict]:
    """compress in place, then decode_sum. volume: bytes over those of dense float32."""
    encoded = one.encode(subject.gradient, subject.stream)
    error = relative_error(encoded.values, encoded.decoded)
    blobs, residual = [], np.zeros_like(subject.gradient)
    for rank in range(ranks):  # every rank has the same gradient, moved
        moved = np.roll(subject.gradient, rank * subject.d // ranks)
        encoded = one.encode_compensated(moved, residual, moved, subject.stream)
        blobs.append(encoded.blob)
    residual = moved  # what the last rank did not send
    joined, work, stages = np.concatenate(blobs), np.empty_like(subject.gradient), []
    compress = Contestant(
        lambda: stages.append(one.encode_compensated(work, residual, work, subject.stream).seconds),
        lambda: np.copyto(work, subject.gradient),
    )
    out = np.empty_like(subject.gradient)
    decode = Contestant(lambda: decode_sum(container.split(joined, ranks, subject.d), out, 1 / ranks), touch(joined))
    times = subject.race({"compress": compress, "decode": decode}, patience)
    reference = times["compress"]["seconds"]["median"] / times["compress"]["memcpy"]["median"]
    medians = {key: float(np.median([each[key] for each in stages[1:]])) for key in stages[0]}
    size = blobs[0].size
    return [
        {
            "spec": spec,
            "bytes": size,
            "ratio": 4 * subject.d / size,
            "volume": size / (4 * subject.d),
            "ranks": ranks,
            "value_error": error,
            **times,
            "stages": {key: seconds / reference for key, seconds in medians.items()},
        }
    ]


def preset(subject: Subject, name: str, one: Compressor) -> list[dict]:
    """The same for a preset, with the container of one rank."""
    (row,) = road(subject, PRESETS[name], one, 1, _PRESET_PATIENCE)
    return [{"preset": name, **row}]
