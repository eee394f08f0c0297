"""The figures of a bench run as tables: plain text for the terminal, Markdown for docs/codecs.md."""

import dataclasses
import math
import textwrap

_HOW = (
    "Each time is the median of {repetitions} repetitions (fewer, but at least three, if they take more than a few seconds), with "
    "the minimum in parentheses, in multiples of one memcpy (np.copyto) of the gradient. Each measurement alternates with that "
    "memcpy. Everything ran on one thread."
)
_RATES = ("encode M/s", "decode M/s", "encode x memcpy", "decode x memcpy")
_STAGES = ("transform", "select", "index", "value", "container", "residual")
_SIDES = ("compress", "decode")
_VOLUME = (
    "ratio is the number of bytes of dense float32 divided by the bytes sent, headers included; volume is its inverse; value "
    "error is the relative error of the values that are sent."
)
_VOLUME_HEADER = ("bytes", "ratio", "volume", "value error", "compress x memcpy", "decode-add x memcpy")
_PEERS = "Rows marked (library) are other libraries, for comparison."


@dataclasses.dataclass
class Table:
    """A table whose first column is text and whose other columns are numbers.

    Attributes:
        title: Its title.
        note: What the columns mean.
        header: The titles of the columns.
        rows: The cells.
    """

    title: str
    note: str
    header: list[str]
    rows: list[list[str]]


def tables(run: dict) -> list[Table]:
    """Make the tables of one gradient.

    Args:
        run: The figures of the gradient.

    Returns:
        The tables; none for a kind that has no figures.
    """
    made = (
        ("selection", _selection),
        ("index", _index),
        ("value", _value),
        ("transform", _transform),
        ("lowrank", _low_rank),
        ("end_to_end", _end_to_end),
        ("end_to_end", _stages),
        ("preset", _presets),
    )
    return [make(run) for kind, make in made if run[kind]]


def _selection(run):
    rows = [
        [
            f"{row['name']}, {row['form']}",
            f"{row['density']:.4g}",
            "" if row["selected"] is None else f"{row['selected']:,}",
            _times(row),
        ]
        for row in run["selection"]
    ]
    return Table(
        "Selection",
        "fused: the same pass also computes gradient + residual and writes it out; error feedback only: this sum alone. "
        "torch.topk and np.argpartition return unsorted positions, and do not compute the sum.",
        ["sparsifier", "density", "selected", "x memcpy"],
        rows,
    )


def _index(run):
    rows = []
    for row in run["index"]:
        name = _peer(row) + (f" ({row['chosen']})" if row["chosen"] != row["name"] else "")
        grown = "" if row["support"] == row["k"] else f" (rebuilds {row['support']:,} of {row['k']:,})"
        rows.append(
            [
                name + grown,
                f"{row['density']:.4g}",
                f"{row['bits']:.2f}",
                f"{row['bound']:.2f}",
                f"{row['bits'] / row['bound']:.2f}" if row["bound"] > 0 else "",
                _share(row["kept"], ".3f"),
                _share(row["fpr"], ".3g"),
                *_rates(row),
            ]
        )
    return Table(
        "Index codecs",
        "bound is log2 C(d, k) / k, the fewest bits that uniformly random positions need on average; clustered positions can "
        "need fewer. kept is the share of the selected positions that receivers rebuild, where it may be less than 1; FPR is the "
        "share of the other positions that they rebuild as well. M/s is million indices per second, with inputs in the cache; "
        f"view means that nothing is copied. {_PEERS} A library's Bloom filter was queried for a sample of the positions; its "
        "decoding time is scaled from the sample's size to d.",
        ["codec", "density", "bits/index", "bound", "of bound", "kept", "FPR", *_RATES],
        rows,
    )


def _value(run):
    rows = [
        [
            _peer(row),
            row["values"],
            f"{row['k']:,}",
            f"{row['bits']:.2f}",
            _error(row["error"]),
            f"{row['bits'] + math.log2(row['error']):.2f}" if row["error"] > 0 else "",
            *_rates(row),
        ]
        for row in run["value"]
    ]
    return Table(
        "Value codecs",
        "top: the values of the largest elements, with their density; dense: the beginning of the gradient. error is the 2-norm "
        "of decoded - original divided by that of the original. above Gauss is the number of bits above the Gaussian "
        "rate-distortion function at this error, log2(1 / error); other distributions can need fewer. Bits include norms, "
        f"parameters, tables and the order section of codecs that sort. {_PEERS}",
        ["codec", "values", "k", "bits/value", "error", "above Gauss", *_RATES],
        rows,
    )


def _transform(run):
    rows = [
        [
            row["stage"],
            f"{row['density']:.4g}",
            f"{row['whole']:.3f}",
            f"{row['chunks']:.3f}",
            f"{row['plain']:.3f}",
            *(_times(row[side]) for side in ("encode", "decode")),
        ]
        for row in run["transform"]
    ]
    return Table(
        "Transforms",
        "error is the relative error if only the largest coefficients are kept: the largest of all, or the same share of each "
        "chunk. For comparison, no transform keeps the largest elements of the gradient itself.",
        [
            "transform",
            "density",
            "error, of all",
            "error, of each chunk",
            "error, no transform",
            "forward x memcpy",
            "inverse x memcpy",
        ],
        rows,
    )


def _low_rank(run):
    rows = [
        [row["stage"], " x ".join(map(str, row["shape"])), f"{row['volume']:.5f}", f"{row['error']:.3f}", _times(row)]
        for row in run["lowrank"]
    ]
    return Table(
        "Low rank",
        "One step with a warm start and the approximation, without an exchange, on the gradient as one matrix. volume is the "
        "size of the factors divided by that of the matrix. Here, numpy and torch use their default numbers of threads.",
        ["method", "matrix", "volume", "error", "x memcpy"],
        rows,
    )


def _end_to_end(run):
    rows = [
        [row["spec"], *_volume(row), *(f"{1e3 * row[side]['seconds']['median']:.2f}" for side in _SIDES)]
        for row in run["end_to_end"]
    ]
    return Table(
        "End to end",
        "compress covers gradient + residual, selection, codecs, container and the next residual, in place. decode-add checks "
        f"{run['end_to_end'][0]['ranks']} containers (one per rank) and writes their weighted sum to a dense gradient. {_VOLUME}",
        ["spec", *_VOLUME_HEADER, "compress ms", "decode-add ms"],
        rows,
    )


def _presets(run):
    rows = [[row["preset"], row["spec"], *_volume(row)] for row in run["preset"]]
    return Table(
        "Presets",
        f"Published methods, end to end. decode-add takes one container. {_VOLUME}",
        ["preset", "spec", *_VOLUME_HEADER],
        rows,
    )


def _stages(run):
    rows = [[row["spec"], *(f"{row['stages'].get(stage, 0):.2f}" for stage in _STAGES)] for row in run["end_to_end"]]
    return Table(
        "Stages of compress", "Medians in memcpys of the gradient, by the compressor's own clock.", ["spec", *_STAGES], rows
    )


def _volume(row: dict) -> list[str]:
    return [
        f"{row['bytes']:,}",
        f"{row['ratio']:.1f}",
        f"{row['volume']:.5f}",
        _error(row["value_error"]),
        *(_times(row[side]) for side in _SIDES),
    ]


def _peer(row: dict) -> str:
    return row["stage"] + (" (library)" if row["peer"] else "")


def _share(share: float | None, form: str) -> str:
    return "" if share is None else f"{share:{form}}"


def _error(error: float) -> str:
    return "0" if error == 0 else f"{error:.2e}"


def _times(row: dict) -> str:
    return f"{row['memcpy']['median']:.3g} ({row['memcpy']['minimum']:.3g})"


def _rates(row: dict) -> list[str]:
    rates = [f"{row[side]['per_second'] / 1e6:.0f}" for side in ("encode", "decode")]
    times = [_times(row[side]) for side in ("encode", "decode")]
    if row["view"]:
        rates[0], times[0] = "view", "view"
    return [*rates, *times]


def _circumstances(results: dict) -> list[str]:
    machine = results["machine"]
    return [
        f"Machine: {machine['cpu']}, {machine['cores']} cores, {machine['system']}; "
        f"SIMD: {' '.join(machine['simd']) or 'not known'}.",
        "Versions: " + ", ".join(f"{name} {version}" for name, version in results["versions"].items()) + ".",
        _HOW.format(repetitions=results["repetitions"]),
    ]


def _memcpy(run: dict) -> str:
    median, minimum = (run["memcpy_seconds"][which] for which in ("median", "minimum"))
    size = f"{4 * run['d'] / 1e6:.4g} MB"
    return f"One memcpy of the gradient ({size}): {1e3 * median:.4g} ms (minimum {1e3 * minimum:.4g} ms)."


def text(results: dict) -> str:
    """Format a bench run for the terminal.

    Args:
        results: What `measure` returned.

    Returns:
        The text.
    """
    out = [results["date"], *map(_wrap, _circumstances(results)), ""]
    for run in results["runs"]:
        out += [f"=== {run['gradient']}", _memcpy(run), ""]
        for table in tables(run):
            lines = [table.header, *table.rows]
            widths = [max(len(line[column]) for line in lines) for column in range(len(table.header))]
            out += [f"--- {table.title}", _wrap(table.note)]
            for first, *others in lines:
                cells = [first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]
                out.append("  ".join(cells).rstrip())
            out.append("")
    return "\n".join(out)


def _wrap(paragraph: str) -> str:
    return textwrap.fill(paragraph, 120)


_CAPTURED = (
    "`make gradients GRADIENTS=build/gradients` makes the files in `build/gradients`: gradients of a CNN, a language "
    "model and a transformer."
)


def markdown(results: dict, image: str | None = None) -> str:
    """Format a bench run as docs/codecs.md.

    Args:
        results: What `measure` returned, with the keys "command" and "catalogue".
        image: Path of the plot as seen from the document; None: no plot.

    Returns:
        The document.
    """
    out = [
        "# Codecs and measurements",
        "",
        f"Measured on {results['date']} by this command; to update the page, run it again:",
        "",
        "```",
        results["command"],
        "```",
        "",
        *([_CAPTURED, ""] if "build/gradients/" in results["command"] else []),
        "## Catalogue",
        "",
    ]
    header = ["kind", "name and defaults", "id", "properties", "description", "source"]
    rows = []
    for part in results["catalogue"]:
        options = "".join(f":{key}={value}" for key, value in part["options"].items())
        rows.append(
            [
                part["kind"],
                f"`{part['name']}{options}`",
                "" if part["id"] is None else str(part["id"]),
                ", ".join(part["traits"]),
                f"{part['summary']} {part['notes']}".strip(),
                " ".join(part["papers"]),
            ]
        )
    out += [*_markdown_table(header, rows), "", "## Figures", ""]
    out += [*(f"- {line}" for line in _circumstances(results)), ""]
    if image:
        out += [f"![plots of some of the figures below]({image})", ""]
    for run in results["runs"]:
        out += [f"## {run['gradient']}", "", _memcpy(run), ""]
        for table in tables(run):
            out += [f"### {table.title}", "", table.note, ""]
            out += [*_markdown_table(table.header, table.rows, numbers=True), ""]
    return "\n".join(out)


def _markdown_table(header: list[str], rows: list[list[str]], numbers: bool = False) -> list[str]:
    texts = ("spec", "values", "matrix")
    rule = [":--"] + ["--:" if numbers and name not in texts else ":--" for name in header[1:]]
    lines = [[cell.replace("|", "\\|") for cell in line] for line in (header, rule, *rows)]
    return [f"| {' | '.join(line)} |" for line in lines]
