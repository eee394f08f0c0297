"""docs/transformers.md, from the results of benchmarks/transformer.py."""

import os
import statistics

from _accuracy_map import NOTHING, file_name, specs
from _lib import ROOT, RunFailed, as_markdown
from _page import days
from _transformer_cost import section as cost_section
from _transformer_plot import draw, draw_map
from _transformer_results import DENSE, OWN_MOMENT, Row, difference, lag_signal, read, signal, spearman, steps_to
from _transformer_tasks import MAP, TASKS, Task

from grace_ext.policy.guarded import Guarded

PAGE = os.path.join(ROOT, "docs", "transformers.md")
PLOT, MAP_PLOT = "transformers.png", "accuracy-map.png"


def write_page(results: str) -> str:
    """Write the page. Returns its path. Raises RunFailed where there is nothing to write."""
    tasks = {name: rows for name in TASKS if name != MAP and DENSE in (rows := read(name, results))}
    if not tasks:
        raise RunFailed(f"{results} has no results of {DENSE}: run that first")
    runs = [run for rows in tasks.values() for row in rows.values() for run in row.runs.values()]
    written = [write(TASKS[name], rows) for name, rows in tasks.items() for write in (section, guard_section)]
    sections = [*(text for text in written if text), *map_section(results)]
    dates, machines = (sorted({run[what] for run in runs}) for what in ("date", "machine"))
    text = "\n\n".join(
        [
            "# Transformers under AdamW",
            "Written by `benchmarks/transformer.py page`; do not edit. Each run is a job of four real ranks under horovodrun, "
            "those of the accuracy map excepted. All methods have the same model, data, batches and seeds, and the learning rate "
            "that is best without compression, unless the row says otherwise. Fewer bytes: the float32 bytes of all gradients of "
            "the run over what one rank handed to collectives, denser first steps, headers and exact tensors included. The "
            "milliseconds are of runs that shared the machine with other work.",
            f"![loss and accuracy against bytes and seconds]({PLOT})",
            *sections,
            *([cost] if (cost := cost_section(results)) else []),
            f"The runs were measured {days(dates)} on {'; '.join(machines)}; by `python benchmarks/transformer.py run "
            "--data DIR` and `python benchmarks/transformer.py page`. Each result, with its commit, is in "
            "`benchmarks/results/transformers`.",
        ]
    )
    draw([(TASKS[name], rows) for name, rows in tasks.items()], os.path.join(os.path.dirname(PAGE), PLOT))
    with open(PAGE, "w", encoding="utf-8") as file:
        file.write(text + "\n")
    return PAGE


def guard_section(task: Task, rows: dict[str, Row]) -> str | None:
    """Say how well the guard's signal ranks the runs of a task; None for fewer than 8 runs that have it."""
    found = [
        (f"{row.label}, seed {seed}", run["curve"][-1]["loss"], signal(run), lag_signal(run), run["library"] != "horovod")
        for row in rows.values()
        for seed, run in sorted(row.runs.items())
        if task.measure == "loss" and signal(run) is not None
    ]
    if len(found) < 8:
        return None
    found.sort(key=lambda one: one[2])
    table = [["", "signal", "mean of lag / √step", "loss"]]
    table += [[label, f"{excess:.2f}", f"{plain:.2f}", f"{loss:.3f}"] for label, loss, excess, plain, _ in found]
    compressed = [one for one in found if one[4]]
    others = [one for one in compressed if not one[0].endswith("seed 0")]
    own, plain, later, all_runs = (
        spearman([one[column] for one in runs], [one[1] for one in runs])
        for runs, column in ((compressed, 2), (compressed, 3), (others, 2), (found, 2))
    )
    return (
        f"### The guard's signal\n\nThe signal of a step is the lag over what `guarded` allows, {Guarded().share:g} √step, but at "
        f"least 1: below that, more or less of it did not matter. Where Adam's own second moment is made of what arrives, as with "
        f"the memories `residual` and `momentum`, a lag counts {OWN_MOMENT} times. Memory `momentum` also enlarges Adam's steps (see "
        f"[memories](training.md#memories)): there all of it counts (1 + beta1) / (1 - beta1) times, which was added when its runs "
        f"with seed 0 had been seen. The signal's mean has a rank correlation (Spearman) with the "
        f"loss of {own:.2f} over the {len(compressed)} runs with compression; the plain mean of lag / √step has {plain:.2f}. Over "
        f"the {len(others)} of them with other seeds than 0, the signal has {later:.2f}. Over all "
        f"{len(found)} runs, those without compression included, where it is 1 and the loss is not the smallest, the signal has "
        f"{all_runs:.2f}.\n\n{as_markdown(table)}"
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
    return f"## {task.label}\n\n{', '.join(map(str, sorted(steps)))} steps.\n\n{as_markdown(table)}"


def map_section(results: str) -> list[str]:
    """Write the heading, the table and the plot of the accuracy map; nothing before the run without compression is there."""
    rows, task = read(MAP, results), TASKS[MAP]
    if file_name(NOTHING) not in rows:
        return []
    found = {label: rows[file_name(label)] for label in specs() if file_name(label) in rows}
    dense, (run, *_) = found[NOTHING], found[NOTHING].runs.values()
    table = [["", "accuracy, %", "points", f"steps to {100 * task.target:g} %", "fewer bytes"]]
    for label, row in found.items():
        reached = [steps_to(one, task.target) for one in row.runs.values()]
        table.append(
            [
                f"`{label}`",
                f"{100 * statistics.mean(row.last('accuracy')):.2f}",
                "" if row is dense else f"{-difference(row, dense, 'accuracy'):+.2f}",
                "not reached" if None in reached else f"{statistics.mean(reached):.0f}",
                f"{row.fewer_bytes:.1f}×",
            ]
        )
    left = [label for label in specs() if label not in found]
    missing = f" Not measured: {', '.join(f'`{label}`' for label in left)}." if left else ""
    seeds = sorted({seed for row in found.values() for seed in row.runs})
    dates, machines = (
        sorted({one[what] for row in found.values() for one in row.runs.values()}) for what in ("date", "machine")
    )
    draw_map(found, os.path.join(os.path.dirname(PAGE), MAP_PLOT))
    return [
        f"## {task.label}",
        f"{run['steps']} steps of {run['ranks']} ranks with {run['batch']} images each, memory `residual`, seed "
        f"{', '.join(map(str, seeds))}, the same learning rate for all. The ranks are in one process, one after the other: the same "
        f"compressors, memory and communicator as in a job. One seed: differences below half a point say nothing.{missing}",
        f"![accuracy against bytes]({MAP_PLOT})",
        as_markdown(table),
        f"Measured {days(dates)} on {'; '.join(machines)}.",
    ]
