"""The figures of a bench run as tables: plain text for the terminal, Markdown for docs/codecs.md."""

import dataclasses
import textwrap

_HOW = ("Times: the median of {repetitions} repetitions (fewer, but at least three, where they take more than ten "
        "seconds) and in parentheses the minimum, as multiples of one memcpy (np.copyto) of the gradient. What is "
        "compared took turns with that memcpy. Everything ran on one thread.")
_RATES = ("encode M/s", "decode M/s", "encode x memcpy", "decode x memcpy")
_STAGES = ("select", "index", "value", "container", "residual")


@dataclasses.dataclass
class Table:
    """note: what the columns mean; the first column is text, the others are numbers."""

    title: str
    note: str
    header: list[str]
    rows: list[list[str]]


def tables(run: dict) -> list[Table]:
    """The tables of one gradient."""
    return [_selection(run), _index(run), _value(run), _road(run), _stages(run)]


def _selection(run):
    rows = [[f"{row['name']}, {row['form']}", f"{row['density']:.4g}",
             "" if row["selected"] is None else f"{row['selected']:,}", _times(row)] for row in run["selection"]]
    return Table("Selection", "fused: gradient + residual is formed in the same pass and written out; error "
                 "feedback only: that sum alone. torch.topk and np.argpartition give the positions in no order and "
                 "leave the sum out.",
                 ["sparsifier", "density", "selected", "x memcpy"], rows)


def _index(run):
    rows = []
    for row in run["index"]:
        name = row["name"] + (f" ({row['chosen']})" if row["chosen"] != row["name"] else "")
        grown = "" if row["support"] == row["k"] else f" (rebuilds {row['support']:,} of {row['k']:,})"
        rows.append([name + grown, f"{row['density']:.4g}", f"{row['bits']:.2f}", f"{row['bound']:.2f}",
                     f"{row['bits'] / row['bound']:.2f}" if row["bound"] > 0 else "", *_rates(row)])
    return Table("Index codecs", "bound: log2 C(d, k) / k, which uniformly random positions cannot beat on average; "
                 "clustered ones can. M/s: million indices a second, inputs in the cache; view: nothing is copied.",
                 ["codec", "density", "bits/index", "bound", "of bound", *_RATES], rows)


def _value(run):
    rows = [[row["stage"], row["values"], f"{row['k']:,}", f"{row['bits']:.2f}",
             "0" if row["error"] == 0 else f"{row['error']:.2e}", *_rates(row)] for row in run["value"]]
    return Table("Value codecs", "top: the values at those positions; dense: the gradient, from its beginning. error: "
                 "the 2-norm of decoded - original over that of the original. Bits include norms, parameters and the "
                 "order that a sorting codec needs.",
                 ["codec", "values", "k", "bits/value", "error", *_RATES], rows)


def _road(run):
    rows = []
    for row in run["road"]:
        sides = (row["compress"], row["decode"])
        rows.append([row["spec"], f"{row['bytes']:,}", f"{row['ratio']:.1f}", *map(_times, sides),
                     *(f"{1e3 * side['seconds']['median']:.2f}" for side in sides)])
    return Table("The whole road", "compress: gradient + residual, selection, codecs, container and the next "
                 f"residual, in place. decode-add: checking {run['road'][0]['ranks']} containers (one a rank) and "
                 "writing their weighted sum to a dense gradient. ratio: against float32, headers included.",
                 ["spec", "bytes", "ratio", "compress x memcpy", "decode-add x memcpy", "compress ms",
                  "decode-add ms"], rows)


def _stages(run):
    rows = [[row["spec"], *(f"{row['stages'].get(stage, 0):.2f}" for stage in _STAGES)] for row in run["road"]]
    return Table("Where compress spends its time", "In memcpys of the gradient (medians), by the compressor's own "
                 "clock.", ["spec", *_STAGES], rows)


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
    """For the terminal."""
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


def markdown(results: dict, image: str | None = None) -> str:
    """docs/codecs.md. image: the plot's path as seen from the document."""
    out = ["# Parts and figures", "", f"Written on {results['date']} by", "", "```", results["command"], "```",
           "", "Do not edit: run the command again.", "", "## What there is", ""]
    header = ["kind", "name and defaults", "id", "properties", "what it is", "from"]
    rows = []
    for part in results["catalogue"]:
        options = "".join(f":{key}={value}" for key, value in part["options"].items())
        rows.append([part["kind"], f"`{part['name']}{options}`", "" if part["id"] is None else str(part["id"]),
                     ", ".join(part["traits"]), f"{part['summary']} {part['notes']}".strip(),
                     " ".join(part["papers"])])
    out += [*_markdown_table(header, rows), "", "## Figures", ""]
    out += [*(f"- {line}" for line in _circumstances(results)), ""]
    if image:
        out += [f"![the figures below as plots]({image})", ""]
    for run in results["runs"]:
        out += [f"## {run['gradient']}", "", _memcpy(run), ""]
        for table in tables(run):
            out += [f"### {table.title}", "", table.note, ""]
            out += [*_markdown_table(table.header, table.rows, numbers=True), ""]
    return "\n".join(out)


def _markdown_table(header: list[str], rows: list[list[str]], numbers: bool = False) -> list[str]:
    rule = [":--"] + ["--:" if numbers else ":--"] * (len(header) - 1)
    lines = [[cell.replace("|", "\\|") for cell in line] for line in (header, rule, *rows)]
    return [f"| {' | '.join(line)} |" for line in lines]
