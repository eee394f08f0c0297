"""The section of benchmarks/scaling.py and its plot."""

import datetime
import statistics

from _lib import as_markdown, machine, size

SIMULATED = [2**i for i in range(1, 11)]  # workers
SHOWN = 16, 64, 256, 1024  # of these, in the tables
PROBED = 2, 4  # numbers of hosts whose collectives are timed
FITTED = 2, 4, 8  # numbers of hosts whose steps the model is fitted to
LIBRARIES = "Horovod", "torch"
TRUSTED = "Horovod fp16", "allgather", "sharded", "hierarchical", "DDP", "allgather over DDP"  # what their labels begin with
STYLES = "o-", "s--", "^-.", "D:", "v-", "P-", "X--", "*-."


def cell(measured: float, predicted: float, form) -> str:
    return f"{form(measured)} / {form(predicted)}"


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g}" if seconds < 1 else f"{1000 * seconds:,.0f}"


def rate_of(name: str) -> str:
    return name.replace("mbit", " Mbit/s").replace("gbit", " Gbit/s")


def ranks_of(rate) -> list[int]:
    return sorted(next(iter(rate.points.values())))


def bytes_table(rate) -> list[list[str]]:
    ranks = ranks_of(rate)
    rows = [
        [
            "bytes a rank and step",
            f"handed over, {ranks[0]} ranks",
            f"{ranks[-1]} ranks",
            *(f"link, {n} ranks" for n in ranks),
            *(f"{n:,}" for n in SHOWN),
        ]
    ]
    for label, points in rate.points.items():
        rows.append(
            [
                label,
                *(size(points[n].payload) if n in points else "" for n in (ranks[0], ranks[-1])),
                *(cell(points[n].sent, rate.shared.sent(label, n), size) if n in points else "" for n in ranks),
                *(size(rate.own.sent(label, n)) for n in SHOWN),
            ]
        )
    return rows


def time_table(rate) -> list[list[str]]:
    ranks = ranks_of(rate)
    rows = [
        [
            "ms a step",
            *(f"{n} ranks" for n in ranks),
            "wire alone, " + f"{ranks[-1]} ranks",
            "codecs alone",
            *(f"{n:,}" for n in SHOWN),
        ]
    ]
    for label, points in rate.points.items():
        last = points[max(points)]
        rows.append(
            [
                label,
                *(
                    cell(points[n].seconds, rate.shared.seconds(label, n), milliseconds) if n in points else ""
                    for n in ranks
                ),
                cell(last.wire, rate.shared.wire(label, last.ranks), milliseconds),
                milliseconds(rate.own.codec(label, last.ranks)),
                *(
                    f"{milliseconds(middle)} ({milliseconds(low)} … {milliseconds(high)})"
                    for middle, low, high in (band(rate, label, n) for n in SHOWN)
                ),
            ]
        )
    return rows


def band(rate, label: str, ranks: int) -> tuple[float, float, float]:
    """Return predicted seconds of a step with whole cores, and the least and the most that they may be.

    They may be off by as much as the method's predictions were off where it was measured.
    """
    predicted = rate.own.seconds(label, ranks)
    off = [1 / (1 + error) for error, of, _ in errors(rate)["step"] if of == label]
    return predicted, predicted * min([1.0, *off]), predicted * max([1.0, *off])


def errors(rate) -> dict[str, list[tuple[float, str, int]]]:
    """Return, for each quantity, (predicted / measured - 1, method, ranks) at points that nothing was fitted to."""
    found = {"step": [], "wire": [], "bytes": []}
    for label, points in rate.points.items():
        for point in points.values():
            if point.hosts not in FITTED:
                pairs = {
                    "step": (rate.shared.seconds(label, point.ranks), point.seconds),
                    "wire": (rate.shared.wire(label, point.ranks), point.wire),
                    "bytes": (rate.shared.sent(label, point.ranks), point.sent),
                }
                for what, (predicted, measured) in pairs.items():
                    found[what].append((predicted / measured - 1, label, point.ranks))
    return found


def error_table(rates) -> list[list[str]]:
    rows = [
        [
            "predicted, for " + ", ".join(map(str, checked(rates))) + " hosts",
            "median error",
            "largest error",
            "at",
            "above 20 %",
        ]
    ]
    titles = {
        "trusted": "seconds of a step, without `tree` and `allreduce, fp16`",
        "step": "seconds of a step, all methods",
        "wire": "seconds of its collectives",
        "bytes": "bytes on the link",
    }
    for rate in rates:
        of_rate = errors(rate)
        trusted = [one for one in of_rate["step"] if one[1].startswith(TRUSTED)]
        for what, found in {"trusted": trusted, **of_rate}.items():
            if not found:
                continue
            largest, label, ranks = max(found, key=lambda one: abs(one[0]))
            rows.append(
                [
                    f"{titles[what]}, {rate_of(rate.name)}",
                    f"{statistics.median(abs(one[0]) for one in found):.0%}",
                    f"{largest:+.0%}",
                    f"{label}, {ranks} ranks",
                    f"{sum(abs(one[0]) > 0.2 for one in found)} of {len(found)}",
                ]
            )
    return rows


def checked(rates) -> list[int]:
    return sorted(set(ranks_of(rates[0])) - set(FITTED))


def link_table(rates) -> list[list[str]]:
    rows = [
        ["seconds = setup + α · rounds + β · bytes", "a share of a core: setup", "α", "β", "a whole core: setup", "α", "β"]
    ]
    for rate in rates:
        for library in LIBRARIES:
            for collective, link in rate.shared.links[library].items():
                rows.append(
                    [
                        f"{collective}, {library}, {rate_of(rate.name)}",
                        *(
                            text
                            for one in (link, rate.own.links[library][collective])
                            for text in (
                                f"{1e3 * one.setup:.2f} ms",
                                f"{1e3 * one.alpha:.2f} ms",
                                f"{1e9 * one.beta:.1f} ns",
                            )
                        ),
                    ]
                )
    return rows


def rest_table(rates) -> list[list[str]]:
    rows = [
        [
            "ms of a step beside codecs and collectives",
            *(
                f"{kind}, {rate_of(r.name)}"
                for r in rates
                for kind in ("a share of a core", "and times log2(ranks)", "a whole core")
            ),
        ]
    ]
    for label in rates[0].points:
        cells = [(*rate.shared.rest[label], rate.own.rest[label].base) for rate in rates]
        rows.append([label, *(f"{1e3 * seconds:.1f}" for of_rate in cells for seconds in of_rate)])
    return rows


def growth(rates) -> str:
    """Return the growth of the bytes of `sharded` from 4 ranks to 8; the bar is 1.15."""
    found = []
    for rate in rates:
        points = rate.points["sharded"]
        if 4 in points and 8 in points:
            handed, sent = (getattr(points[8], kind) / getattr(points[4], kind) for kind in ("payload", "sent"))
            found.append(
                f"{handed:.3f} times the bytes handed to collectives and {sent:.3f} times those on the link at "
                f"{rate_of(rate.name)}"
            )
    return (
        "- `sharded` with 8 ranks compared with 4: "
        + ", ".join(found)
        + ". A rank has to send 2 (n − 1) / n containers: with "
        "8 ranks that is 7 / 6 = 1.167 times as much as with 4, and with any number of ranks less than 2 containers."
        if found
        else ""
    )


def coordination(rates) -> str:
    rows = [
        ", ".join(f"{size(point.coordination)}/s with {ranks} ranks" for ranks, point in points.items())
        + f" at {rate_of(rate.name)}"
        for rate in rates
        for points in [next(iter(rate.points.values()))]
    ]
    return (
        "- The error of the bytes comes from headers and from Horovod's coordination, which runs continuously between "
        f"collectives. While nothing else is sent, it takes {'; '.join(rows)}."
    )


def document(rates, args) -> str:
    links = " and ".join(rate_of(rate.name) for rate in rates)
    defaults = {
        "rates": ["100mbit", "1gbit"],
        "ranks": [2, 4, 6, 8, 12, 16],
        "elements": 4_000_000,
        "steps": 20,
        "launcher": "horovodrun --gloo",
    }
    options = "".join(
        f" --{name} {' '.join(map(str, given)) if isinstance(given, list) else given}"
        for name, default in defaults.items()
        if (given := getattr(args, name)) != default
    )
    tables = [
        text
        for rate in rates
        for text in (f"### {rate_of(rate.name)}", as_markdown(bytes_table(rate)), as_markdown(time_table(rate)))
    ]
    return (
        "\n\n".join(
            filter(
                None,
                [
                    "Written by `benchmarks/scaling.py`; do not edit. Only the exchange is measured, without a model: a "
                    f"synthetic gradient of {args.elements:,} float32, with one rank on each of 2 to {max(args.ranks)} "
                    f"hosts, or two on each for `hierarchical` ({links}; `{args.launcher}`), with `dense/fp16` and "
                    "`topk:0.01/rice/qsgd:7`. The gradients of all ranks share the scale of each element and half of the "
                    f"variance of its value. Each rank has at most {args.share:g} of a core (`mpirun/hosts cores`), whatever the "
                    f"number of hosts; a cycle of Horovod's coordination has {1 / args.share:g} ms.",
                    "![bytes and time against workers](scaling.png)",
                    "Cells with a slash are measured / predicted; the columns from 16 on without a slash are simulated, for ranks "
                    "with a whole core each. In brackets: as far off as the method's predictions were at this rate where they "
                    "could be checked. Bytes are either "
                    "those handed over to collectives, as counted by `compression_stats()`, or those sent on the link, as "
                    "a mean over ranks. Measured bytes include packet headers, acknowledgements and Horovod's "
                    "coordination, which the model leaves out. Times are medians of a step; there is no backward pass to "
                    "overlap with.",
                    *tables,
                    "### Accuracy of the simulation",
                    as_markdown(error_table(rates)),
                    "- The model assumes the algorithms of Gloo: rings for allreduce (2 (n − 1) rounds) and allgather (n "
                    "− 1 rounds), and all messages at a time for alltoall. Other libraries use fewer rounds for short "
                    "messages, so with many workers the times of compressed exchanges are an upper bound.",
                    "- A step is what its codecs take, measured in a single process and divided by the share of a core, what its "
                    "collectives take by the formula below, and a rest: the frameworks' own work, and with `hierarchical` what "
                    "goes on inside a host. With a share of a core, α · rounds is left out, and the rest has a term that grows with "
                    "log2(ranks): a rank that has used up its time stops, for longer than a message takes, and the others wait "
                    "for the slowest of all. Other forms of the rest were tried on the same measurements: a constant, and one that "
                    "grows with the number of rounds; their largest errors were about 40 %. "
                    '"Wire alone" is measured in other steps, in which each collective starts '
                    "when all ranks have reached it, so that it does not wait for another rank's codec.",
                    f"- The links were fitted to timed collectives of {' and '.join(map(str, PROBED))} hosts, and the rest to "
                    f"steps of {', '.join(map(str, FITTED[:-1]))} and {FITTED[-1]}, not to any other. The simulation gives each worker "
                    "a whole core: setup and rest come from two ranks that have one, the rest of `hierarchical` is taken to be "
                    "nothing; α from a message of one "
                    "byte between two hosts, without a library; β is the smallest one of all collectives, because the "
                    "link is the same. Horovod's coordination is assumed to be that of two ranks.",
                    "- Gloo's alltoall, and its allgather of two ranks, may take up to twice as long as the link needs. A "
                    "rank that starts after its peer sends its data before the notice that it is ready to receive, on the "
                    "same connection, so that one direction follows the other. The model covers this only as far as the "
                    "fit does.",
                    as_markdown(link_table(rates)),
                    as_markdown(rest_table(rates)),
                    growth(rates),
                    coordination(rates),
                    "- `tree` ends with an allgather to which only the root contributes, because Horovod's broadcast must "
                    "know the length beforehand. A ring takes n − 1 rounds for it, each with the whole container.",
                    f"Measured on {datetime.date.today().isoformat()} on {machine()}, by "
                    f"`python benchmarks/scaling.py{options}`.",
                ],
            )
        )
        + "\n"
    )


def plot(rates, file: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 1 + len(rates), figsize=(5.5 * (1 + len(rates)), 5), layout="constrained", squeeze=False)
    volume, *times = axes[0]
    for number, (label, style) in enumerate(zip(rates[0].points, STYLES, strict=False)):
        points, model = rates[0].points[label], rates[0].own
        look = {"color": f"C{number}", "marker": style[0]}
        simulated = [n for n in SIMULATED if n >= min(points)]
        volume.plot(simulated, [model.sent(label, n) for n in simulated], style[1:], color=f"C{number}", label=label)
        volume.plot(list(points), [point.sent for point in points.values()], linestyle="", **look)
        for ax, rate in zip(times, rates, strict=True):
            ranks = sorted(rate.points[label])
            middle, low, high = zip(*(band(rate, label, n) for n in simulated), strict=True)
            ax.plot(simulated, middle, style[1:], color=f"C{number}")
            ax.fill_between(simulated, low, high, color=f"C{number}", alpha=0.15, linewidth=0)
            ax.plot(ranks, [rate.shared.seconds(label, n) for n in ranks], "-", color=f"C{number}", alpha=0.35, linewidth=4)
            ax.plot(ranks, [rate.points[label][n].seconds for n in ranks], linestyle="", **look)
    volume.set(title=f"sent on a rank's link, {rate_of(rates[0].name)}", ylabel="bytes a step")
    for ax, rate in zip(times, rates, strict=True):
        ax.set(title=f"time, {rate_of(rate.name)}", ylabel="seconds a step")
    for ax in axes[0]:
        ax.set(xlabel="workers", xscale="log", yscale="log")
        ax.set_xticks(SIMULATED, [f"{n:,}" for n in SIMULATED], fontsize=8)
        ax.minorticks_off()
        ax.grid(True, alpha=0.3)
    figure.legend(loc="outside lower center", ncols=len(STYLES), frameon=False)
    figure.suptitle(
        "Points: measured; broad lines: predicted for their shares of a core; lines and bands: each worker has a whole core"
    )
    figure.savefig(file, dpi=150)
    plt.close(figure)
