"""Metrics of clients' replies, so that one client can neither stop a round with them nor outweigh the others."""

import collections
import logging
import math
from collections.abc import Callable, Mapping, Sequence

from flwr.app import MetricRecord, RecordDict

_LOG = logging.getLogger("grace_ext")


def read_samples(content: RecordDict, key: str) -> float:
    """Read the number of samples that a client claims.

    Args:
        content: The records of its reply.
        key: The key of the number in the reply's MetricRecord.

    Returns:
        The number, finite and above 0.

    Raises:
        ValueError: There is not exactly one MetricRecord, or it has no such number.
    """
    if len(records := list(content.metric_records.values())) != 1:
        raise ValueError(f"{len(records)} MetricRecords; needed: one, with {key!r}")
    samples = records[0].get(key)
    if not isinstance(samples, int | float) or not (math.isfinite(samples) and samples > 0):
        raise ValueError(f"{key!r} of the MetricRecord is {samples!r}; allowed: a number, finite and above 0")
    return float(samples)


def comparable(contents: Mapping[int, RecordDict], key: str, weight: Callable[[int, float], float]) -> list[RecordDict]:
    """Choose the replies whose metrics can be averaged, and set how much each counts.

    Args:
        contents: By client, the records of its reply.
        key: The key of the number of samples.
        weight: Gives the weight of a client for the number of samples that it claims.

    Returns:
        Copies of the records, in which the number of samples is the weight. Left out, with a warning, are those whose
        metrics are not finite or are others than most clients have.
    """
    kept: dict[int, RecordDict] = {}
    for client, content in contents.items():
        try:
            counts = weight(client, read_samples(content, key))
            (name, metrics), *_ = content.metric_records.items()
            if not all(map(math.isfinite, _numbers(metrics))):
                raise ValueError("a metric is not finite")
        except ValueError as error:
            _LOG.warning("federated: client %d: its metrics do not count: %s", client, error)
            continue
        kept[client] = RecordDict({**content, name: MetricRecord({**metrics, key: counts})})
    return [kept[client] for client in _alike(kept)]


def _numbers(metrics: MetricRecord) -> list[float]:
    return [number for value in metrics.values() for number in (value if isinstance(value, list) else [value])]


def _alike(contents: Mapping[int, RecordDict]) -> Sequence[int]:
    """Return the clients that have the metrics, and lists of the lengths, that most have."""
    forms = {
        client: frozenset(
            (name, key, len(value) if isinstance(value, list) else -1)
            for name, metrics in content.metric_records.items()
            for key, value in metrics.items()
        )
        for client, content in contents.items()
    }
    if not forms:
        return []
    usual = collections.Counter(forms.values()).most_common(1)[0][0]
    for client, form in forms.items():
        if form != usual:
            _LOG.warning("federated: client %d: its metrics do not count: they are others than most clients have", client)
    return [client for client, form in forms.items() if form == usual]
