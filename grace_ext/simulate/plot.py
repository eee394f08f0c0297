"""Plots of a simulation, like Figures 3 to 9 of Kimad."""

from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")

from matplotlib import pyplot  # noqa: E402  (the backend comes first: there may be no display)

from .run import Round  # noqa: E402


def draw(found: dict[tuple[int, str], list[Round]], path: Path) -> None:
    """Draw a row of plots for each number of workers: bandwidth and bytes, step time, loss and error over virtual time.

    Args:
        found: (number of workers, label) -> records.
        path: The file; its suffix decides the format.
    """
    numbers = list(dict.fromkeys(workers for workers, _ in found))
    figure, axes = pyplot.subplots(len(numbers), 4, figsize=(22, 4.2 * len(numbers)), layout="constrained", squeeze=False)
    for row, workers in zip(axes, numbers, strict=True):
        runs = {label: records for (count, label), records in found.items() if count == workers}
        _bytes(row[0], runs)
        for axis, name, title in zip(
            row[1:],
            ("seconds", "loss", "error"),
            ("seconds of a step", "loss", "squared error of a worker's update"),
            strict=True,
        ):
            for number, (label, records) in enumerate(runs.items()):
                axis.plot(*_columns(records, name), color=f"C{number}", label=label, alpha=0.8)
            axis.set(title=title, xlabel="virtual seconds")
            axis.grid(alpha=0.3)
            axis.legend()
        row[0].set_ylabel(f"{workers} workers\nkB a message")
        for axis in row[2:]:
            axis.set_yscale("log")
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def _bytes(axis, runs: dict[str, list[Round]]) -> None:
    for number, (label, records) in enumerate(runs.items()):
        times, sent = _columns(records, "sent")
        axis.plot(times, sent / 1e3, color=f"C{number}", label=label, alpha=0.8)
    axis.set(title="worker 0, upwards: message, and bandwidth (dashed)", xlabel="virtual seconds")
    axis.legend()
    times, rates = _columns(next(iter(runs.values())), "bandwidth")
    other = axis.twinx()
    other.plot(times, rates * 8 / 1e6, "--", color="grey")
    other.set_ylabel("Mbit/s")


def _columns(records: list[Round], name: str) -> tuple[np.ndarray, np.ndarray]:
    return np.array([record.start for record in records]), np.array([getattr(record, name) for record in records])
