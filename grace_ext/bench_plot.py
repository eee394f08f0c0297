"""The figures of a bench run as one picture. The only module that imports matplotlib."""

from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot  # noqa: E402  (the backend comes first: there may be no display)

_MARKERS = "osD^vP*X<>"


def draw(results: dict, path: Path) -> None:
    """Four panels for the largest gradient of the run; the suffix of the path decides the format."""
    run = max(results["runs"], key=lambda run: run["d"])
    figure, axes = pyplot.subplots(2, 2, figsize=(14, 10), layout="constrained")
    _index(axes[0, 0], run)
    _value(axes[0, 1], run)
    _selection(axes[1, 0], run)
    _road(axes[1, 1], run)
    figure.suptitle(f"{run['gradient']}; {results['machine']['cpu']}, one thread; {results['date'][:10]}")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _index(axes, run):
    lines = defaultdict(list)
    for row in run["index"]:
        lines[row["name"]].append((row["density"], row["bits"]))
    for place, (name, points) in enumerate(lines.items()):
        # auto lies on top of the codec that it chose: hollow, so that both are seen
        face = {"markerfacecolor": "none", "markersize": 12, "linestyle": ":"} if name == "auto" else {}
        axes.plot(*_columns(points), marker=_MARKERS[place % len(_MARKERS)], label=name, **face)
    bounds = sorted({(row["density"], row["bound"]) for row in run["index"]})
    axes.plot(*_columns(bounds), "k--", label="log2 C(d, k) / k")
    axes.set(xscale="log", yscale="log", xlabel="density", ylabel="bits per index", title="Index codecs")
    _plain_numbers(axes.yaxis, (2, 3, 4, 6, 8, 10, 15, 20, 32, 100, 300, 1000), axes.get_ylim())
    axes.grid(alpha=0.3)
    axes.legend()


def _value(axes, run):
    lines = defaultdict(list)
    lossless = defaultdict(list)
    for row in run["value"]:
        if row["lossless"]:
            lossless[row["values"]].append(f"{row['stage']} {row['bits']:.1f}")
        elif row["error"] > 0:
            lines[row["name"], row["values"]].append((row["bits"], row["error"]))
    names = list(dict.fromkeys(name for name, _ in lines))
    for (name, values), points in lines.items():
        place = names.index(name)
        axes.plot(*_columns(sorted(points)), marker=_MARKERS[place % len(_MARKERS)], color=f"C{place}",
                  linestyle=":" if values == "dense" else "-", label=f"{name}, {values}")
    exact = "\n".join(f"bits of lossless codecs, {values}: {', '.join(found)}" for values, found in lossless.items())
    axes.text(0.03, 0.03, exact, transform=axes.transAxes, fontsize=8)
    axes.set(yscale="log", xlabel="bits per value", ylabel="relative 2-norm error", title="Value codecs")
    axes.grid(alpha=0.3)
    axes.legend()


def _selection(axes, run):
    densities = sorted({row["density"] for row in run["selection"]})
    labels = list(dict.fromkeys((row["name"], row["form"]) for row in run["selection"]))
    height = 0.85 / len(labels)
    for place, label in enumerate(labels):
        rows = [row for row in run["selection"] if (row["name"], row["form"]) == label]
        offset = (place - (len(labels) - 1) / 2) * height
        positions = [densities.index(row["density"]) + offset for row in rows]
        bars = axes.barh(positions, [row["memcpy"]["median"] for row in rows], height, label=", ".join(label))
        axes.bar_label(bars, fmt="%.3g", padding=3, fontsize=8)
    axes.set(xscale="log", xlabel="memcpys of the gradient (median)", ylabel="density", title="Selection")
    axes.set_xlim(0.5, 1.6 * max(row["memcpy"]["median"] for row in run["selection"]))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yticks(range(len(densities)), [f"{density:.4g}" for density in densities])
    _finish_bars(axes)


def _road(axes, run):
    rows = run["road"]
    for side, label, offset in (("compress", "compress, with error feedback", -0.2),
                                ("decode", f"decode-add of {rows[0]['ranks']} ranks", 0.2)):
        times = [row[side]["memcpy"]["median"] for row in rows]
        bars = axes.barh([place + offset for place in range(len(rows))], times, 0.4, label=label)
        axes.bar_label(bars, fmt="%.3g", padding=3, fontsize=8)
    axes.set_yticks(range(len(rows)), [f"{row['spec']}\n{row['ratio']:.1f} : 1" for row in rows])
    axes.margins(x=0.1)
    axes.set(xlabel="memcpys of the gradient (median)", title="The whole road")
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
