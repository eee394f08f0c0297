"""The figures of a bench run as one plot. This and simulate/plot.py are the only modules that import matplotlib."""

from collections import defaultdict
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")

from matplotlib import pyplot  # noqa: E402  (the backend comes first: there may be no display)

_MARKERS = "osD^vP*X<>"
_COLOURS = pyplot.get_cmap("tab20").colors
_MOST_BITS = 22


def draw(results: dict, path: Path) -> None:
    """Draw a row of panels for each gradient, and one with the times of the largest gradient.

    Args:
        results: What `measure` returned.
        path: The file; its suffix decides the format.
    """
    runs = results["runs"]
    figure, axes = pyplot.subplots(
        len(runs) + 1, 3, figsize=(22, 7.5 * (len(runs) + 1)), layout="constrained", squeeze=False
    )
    for row, run in zip(axes, runs, strict=False):
        places = list(dict.fromkeys(one["values"] for one in run["value"]))
        _index(row[0], run)
        for panel, where in zip(row[1:], places, strict=True):
            _rate_distortion(panel, run, where)
        row[0].set_title(f"{run['gradient']}\nindex codecs")
    largest = max(runs, key=lambda run: run["d"])
    _selection(axes[-1, 0], largest)
    _end_to_end(axes[-1, 1], largest)
    _volume(axes[-1, 2], runs)
    figure.suptitle(f"{results['machine']['cpu']}, one thread; {results['date'][:10]}")
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def _index(axes, run):
    lines = defaultdict(list)
    for row in run["index"]:
        if row["stage"] == row["name"]:  # sweeps are measured at one density only
            lines[row["name"], row["peer"]].append((row["density"], row["bits"]))
    for place, ((name, peer), points) in enumerate(lines.items()):
        # auto lies on top of the codec that it chose; its markers are hollow, so that both are visible
        face = {"markerfacecolor": "none", "markersize": 14, "linestyle": ":"} if name == "auto" else {}
        axes.plot(
            *_columns(points),
            marker=_MARKERS[place % len(_MARKERS)],
            color=_COLOURS[place % 20],
            label=f"{name} (library)" if peer else name,
            **{"linestyle": "--" if peer else "-", **face},
        )
    bounds = sorted({(row["density"], row["bound"]) for row in run["index"]})
    axes.plot(*_columns(bounds), "k--", label="log2 C(d, k) / k")
    axes.set(xscale="log", yscale="log", xlabel="density", ylabel="bits per index")
    _plain_numbers(axes.yaxis, (1, 2, 3, 4, 6, 8, 10, 15, 20, 32, 100, 300, 1000), axes.get_ylim())
    axes.grid(alpha=0.3)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=3, fontsize=8)


def _rate_distortion(axes, run, where):
    """Draw bits per value, including the order of a sorting codec, against relative error: one line for each codec."""
    lines, lossless = defaultdict(list), []
    for row in run["value"]:
        if row["values"] != where:
            continue
        if row["lossless"]:
            lossless.append(f"{row['stage']} {row['bits']:.1f}")
        elif row["error"] > 0:
            name = row["curve"] if row["peer"] else row["name"]
            lines[row["curve"], name, row["peer"]].append((row["error"], row["bits"]))
    names = list(dict.fromkeys(name for _, name, _ in lines))
    for (curve, name, peer), points in lines.items():
        place = names.index(name)
        style = "--" if peer else "-" if curve == name else ":"
        axes.plot(
            *_columns(sorted(points)),
            marker=_MARKERS[place % len(_MARKERS)],
            color=_COLOURS[place % 20],
            linestyle=style,
            label=f"{curve} (library)" if peer else curve,
        )
    errors = np.geomspace(0.002, 1)
    axes.plot(errors, -np.log2(errors), "k--", label="½ log2(1 / D), Gaussian values, D = error²")
    axes.text(0.02, 0.97, "bits of lossless codecs: " + ", ".join(lossless), transform=axes.transAxes, fontsize=8)
    axes.set(
        xscale="log",
        xlim=(0.002, 1.5),
        ylim=(0, _MOST_BITS),
        xlabel="relative 2-norm error",
        ylabel="bits per value",
        title=f"value codecs, {where}",
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=3, fontsize=8)


def _selection(axes, run):
    densities = sorted({row["density"] for row in run["selection"]})
    labels = list(dict.fromkeys((row["name"], row["form"]) for row in run["selection"]))
    height = 0.85 / len(labels)
    for place, label in enumerate(labels):
        rows = [row for row in run["selection"] if (row["name"], row["form"]) == label]
        offset = (place - (len(labels) - 1) / 2) * height
        positions = [densities.index(row["density"]) + offset for row in rows]
        bars = axes.barh(
            positions, [row["memcpy"]["median"] for row in rows], height, label=", ".join(label), color=_COLOURS[place % 20]
        )
        axes.bar_label(bars, fmt="%.3g", padding=3, fontsize=8)
    axes.set(
        xscale="log", xlabel="memcpys of the gradient (median)", ylabel="density", title=f"{run['gradient']}\nselection"
    )
    axes.set_xlim(0.5, 1.6 * max(row["memcpy"]["median"] for row in run["selection"]))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yticks(range(len(densities)), [f"{density:.4g}" for density in densities])
    _finish_bars(axes)


def _end_to_end(axes, run):
    rows = run["end_to_end"]
    for side, label, offset in (
        ("compress", "compress, with error feedback", -0.2),
        ("decode", f"decode-add of {rows[0]['ranks']} ranks", 0.2),
    ):
        times = [row[side]["memcpy"]["median"] for row in rows]
        bars = axes.barh([place + offset for place in range(len(rows))], times, 0.4, label=label)
        axes.bar_label(bars, fmt="%.3g", padding=3, fontsize=8)
    axes.set_yticks(range(len(rows)), [f"{row['spec']}\n{row['ratio']:.1f} : 1" for row in rows])
    axes.margins(x=0.1)
    axes.set(xlabel="memcpys of the gradient (median)", title=f"{run['gradient']}\nend to end")
    _finish_bars(axes)


def _volume(axes, runs):
    labels = [row.get("preset", row["spec"]) for row in runs[0]["end_to_end"] + runs[0]["preset"]]
    height = 0.85 / len(runs)
    for place, run in enumerate(runs):
        volumes = [row["volume"] for row in run["end_to_end"] + run["preset"]]
        offset = (place - (len(runs) - 1) / 2) * height
        bars = axes.barh([at + offset for at in range(len(labels))], volumes, height, label=run["gradient"])
        axes.bar_label(bars, fmt="%.2g", padding=3, fontsize=7)
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.margins(x=0.1)
    axes.set(xscale="log", xlabel="bytes over those of dense float32", title="wire volume")
    _finish_bars(axes)


def _finish_bars(axes):
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=3, fontsize=8)


def _plain_numbers(axis, ticks, limits):
    axis.set_ticks([tick for tick in ticks if limits[0] <= tick <= limits[1]])
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(matplotlib.ticker.NullLocator())


def _columns(points):
    return zip(*points, strict=True)
