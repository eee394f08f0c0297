"""Whole compressors: from the gradient to a container with error feedback, and from all ranks' containers to their sum."""

import numpy as np

from ..pipeline import container
from ..pipeline.compressor import Compressor
from ..pipeline.decoder import decode_sum
from ..pipeline.presets import PRESETS
from .subject import PATIENCE, Candidate, Subject, relative_error, warm_cache

_PRESET_PATIENCE = 1.0  # seconds: there are many presets, and some are slow


def end_to_end(subject: Subject, spec: str, one: Compressor, ranks: int, patience: float = PATIENCE / 2) -> list[dict]:
    """Measure a compressor: compression in place with error feedback, and decode_sum.

    Args:
        subject: The gradient.
        spec: The name of the compressor in the row.
        one: The compressor.
        ranks: Number of containers to decode and add.
        patience: Seconds after which the measurement may end early; see subject.py.

    Returns:
        One row; "volume" is bytes over those of dense float32.
    """
    encoded = one.encode(subject.gradient, subject.stream)
    error = relative_error(encoded.values, encoded.decoded)
    blobs, residual = [], np.zeros_like(subject.gradient)
    for rank in range(ranks):  # every rank has the same gradient, rotated
        moved = np.roll(subject.gradient, rank * subject.d // ranks)
        encoded = one.encode_compensated(moved, residual, moved, subject.stream)
        blobs.append(encoded.blob)
    residual = moved  # what the last rank did not send
    joined, work, stages = np.concatenate(blobs), np.empty_like(subject.gradient), []
    compress = Candidate(
        lambda: stages.append(one.encode_compensated(work, residual, work, subject.stream).seconds),
        lambda: np.copyto(work, subject.gradient),
    )
    out = np.empty_like(subject.gradient)
    decode = Candidate(lambda: decode_sum(container.split(joined, ranks, subject.d), out, 1 / ranks), warm_cache(joined))
    times = subject.compare({"compress": compress, "decode": decode}, patience)
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
    """Measure a preset as `end_to_end` does, with the container of one rank.

    Args:
        subject: The gradient.
        name: Name of the preset.
        one: Its compressor.

    Returns:
        One row.
    """
    (row,) = end_to_end(subject, PRESETS[name], one, 1, _PRESET_PATIENCE)
    return [{"preset": name, **row}]
