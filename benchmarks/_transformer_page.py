"""docs/transformers.md, from the results of benchmarks/transformer.py."""

import os
import statistics

from _lib import ROOT, RunFailed, as_markdown
from _transformer_cost import section as cost_section
from _transformer_plot import draw
from _transformer_results import DENSE, Row, difference, read, signal, spearman, steps_to
from _transformer_tasks import MAP, TASKS, Task

PAGE = os.path.join(ROOT, "docs", "transformers.md")
PLOT = "transformers.png"


def write_page(results: str) -> str:
    """Write the page. Returns its path. Raises RunFailed where there is nothing to write."""
    tasks = {name: rows for name in TASKS if DENSE in (rows := read(name, results))}
    if not tasks:
        raise RunFailed(f"{results} has no results of {DENSE}: run that first")
    runs = [run for rows in tasks.values() for row in rows.values() for run in row.runs.values()]
    written = [write(TASKS[name], rows) for name, rows in tasks.items() for write in (section, guard_section)]
    sections = [text for text in written if text]
    dates, machines = (sorted({run[what] for run in runs}) for what in ("date", "machine"))
    text = "\n\n".join(
        [
            "# Transformers under AdamW",
            "Written by `benchmarks/transformer.py page`; do not edit. Each run is a job of four real ranks under horovodrun. "
            "All methods have the same model, data, batches and seeds, and the learning rate that is best without compression, "
            "unless the row says otherwise. Fewer bytes: the float32 bytes of all gradients of the run over what one rank "
            "handed to collectives, denser first steps, headers and exact tensors included. The milliseconds are of runs that shared "
            "the machine with other work.",
            f"![loss and accuracy against bytes and seconds]({PLOT})",
            *sections,
            *([cost] if (cost := cost_section(results)) else []),
            f"The runs were measured from {dates[0]} to {dates[-1]} on {'; '.join(machines)}; by `python benchmarks/transformer.py run "
            "--data DIR` and `python benchmarks/transformer.py page`. Each result, with its commit, is in "
            "`benchmarks/results/transformers`.",
        ]
    )
    draw([(TASKS[name], rows) for name, rows in tasks.items() if name != MAP], os.path.join(os.path.dirname(PAGE), PLOT))
    with open(PAGE, "w", encoding="utf-8") as file:
        file.write(text + "\n")
    return PAGE


def guard_section(task: Task, rows: dict[str, Row]) -> str | None:
    """Say how well the guard's signal ranks the runs of a task; None for fewer than 8 runs that have it."""
    runs = [run for row in rows.values() for run in row.runs.values()]
    pairs = [(found, run["curve"][-1][task.measure]) for run in runs if (found := signal(run)) is not None]
    if len(pairs) < 8 or task.measure != "loss":
        return None
    table = [
        ["", "mean of lag / √step", "loss"],
        *(
            [f"{row.label}, seed {seed}", f"{signal(run):.2f}", f"{run['curve'][-1]['loss']:.3f}"]
            for row in rows.values()
            for seed, run in sorted(row.runs.items())
            if signal(run) is not None
        ),
    ]
    table[1:] = sorted(table[1:], key=lambda line: float(line[1]))
    compressed = [pair for pair in pairs if pair[0]]
    return (
        f"### The guard's signal\n\nIts rank correlation (Spearman) with the loss is "
        f"{spearman(*map(list, zip(*compressed, strict=True))):.2f} over the {len(compressed)} runs with compression. Over all "
        f"{len(pairs)} runs, those without compression included, where it is 0 and the loss is not the smallest, it is "
        f"{spearman(*map(list, zip(*pairs, strict=True))):.2f}.\n\n{as_markdown(table)}"
    )


def section(task: Task, rows: dict[str, Row]) -> str:
    """Write the heading and the table of a task."""
    dense = rows[DENSE]
    steps = {run["steps"] for row in rows.values() for run in row.runs.values()}
    worse = "worse, %" if task.measure == "loss" else "worse, points"
    unit = 100 if task.measure == "accuracy" else 1
    table = [["", task.measure, "seeds", "from … to", worse, "fewer bytes", "ms a step"]]
    says_words = task.measure == "loss"
    if says_words:
        table[0].append("right next tokens, points")
    if task.target:
        table[0].append(f"steps to {100 * task.target:g} %")
    for row in sorted(rows.values(), key=lambda row: (row is not dense, row.fewer_bytes)):
        scores = [unit * score for score in row.last(task.measure)]
        table.append(
            [
                row.label,
                f"{statistics.mean(scores):.3f}",
                str(len(scores)),
                f"{min(scores):.3f} … {max(scores):.3f}",
                "" if row is dense else f"{difference(row, dense, task.measure):+.2f}",
                f"{row.fewer_bytes:.0f}×",
                f"{row.ms_per_step:.0f}",
            ]
        )
        if says_words:
            table[-1].append("" if row is dense else f"{-difference(row, dense, 'accuracy'):+.2f}")
        if task.target:
            reached = [steps_to(run, task.target) for run in row.runs.values()]
            table[-1].append("not reached" if None in reached else f"{statistics.mean(reached):.0f}")
    return f"## {task.label}\n\n{', '.join(map(str, sorted(steps)))} steps.\n\n{as_markdown(table)}"
