"""The plots of docs/transformers.md: the loss, or the accuracy, against bytes and against seconds."""

import statistics

from _transformer_results import DENSE, Row
from _transformer_tasks import Task

#: The methods that are drawn, of those that a task has results of.
SHOWN = (DENSE, "horovod-fp16", "powersgd-4", "onebit-adam", "demo", "plain-0.01", "default", "guarded", "sparser")


def draw(tasks: list[tuple[Task, dict[str, Row]]], path: str) -> None:
    """Draw a row of two panels for each task: means over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(tasks), 2, figsize=(11, 3.4 * len(tasks)), layout="constrained", squeeze=False)
    for (task, rows), (by_bytes, by_seconds) in zip(tasks, axes, strict=True):
        for number, method in enumerate(SHOWN):
            if method not in rows:
                continue
            look = {"color": f"C{number}", "label": rows[method].label, "marker": ".", "linewidth": 1}
            scores = _means(rows[method], task.measure)
            by_bytes.plot([sent / 1e6 for sent in _means(rows[method], "bytes_sent")], scores, **look)
            by_seconds.plot(_means(rows[method], "seconds"), scores, **look)
        by_bytes.set(xscale="log", xlabel="MB that a rank has sent", ylabel=f"{task.measure}, held-out", title=task.label)
        by_seconds.set(xlabel="seconds, evaluations left out; four ranks on one host that was not idle")
        if task.measure == "loss":
            for ax in (by_bytes, by_seconds):
                ax.set_yscale("log")
                ax.yaxis.set_minor_formatter("{x:.1f}")
        for ax in (by_bytes, by_seconds):
            ax.grid(alpha=0.3)
        by_seconds.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


#: What the rows of the accuracy map begin with, or contain, and what the plot calls them; the first that fits.
KINDS = {
    "preset": "presets",
    "bloom": "Bloom filters",
    "dense": "quantizers alone",
    "/auto/raw": "sparsifiers",
    "": "top-k and quantizers",
}


def draw_map(rows: dict[str, Row], path: str) -> None:
    """Draw a point for each row of the accuracy map. rows: by the map's labels."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(8, 4.5), layout="constrained")
    left = dict(rows)
    for number, (part, kind) in enumerate(KINDS.items()):
        chosen = {label: left.pop(label) for label in list(left) if part in label}
        shares = [100 / row.fewer_bytes for row in chosen.values()]
        scores = [100 * statistics.mean(row.last("accuracy")) for row in chosen.values()]
        ax.plot(shares, scores, "ox^sD"[number], color=f"C{number}", label=kind, markersize=5, alpha=0.8)
    ax.set(xscale="log", xlabel="bytes, % of float32's", ylabel="accuracy after the last step, %")
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _means(row: Row, what: str) -> list[float]:
    """Return a figure of each evaluation, the mean over seeds."""
    curves = [[point[what] for point in run["curve"]] for run in row.runs.values()]
    return [statistics.mean(column) for column in zip(*curves, strict=True)]
