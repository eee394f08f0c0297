"""The section of docs/local-steps.md and its plot, of what benchmarks/local_steps.py has measured."""

import math
import os
import statistics

from _hosts import OUR_ENVIRONMENT
from _lib import as_markdown
from _local_steps_results import ALONE, DDP, DEFAULT, FP16, HOROVODS, LENGTHENED, LENGTHS, Measured, measured, methods
from _page import days, write_section
from _transformer_results import DENSE
from _transformer_tasks import TASKS

#: In the plots.
SHOWN = (DENSE, "default", "fedavg-5", "sparseloco-5", "adam-5", "delayed-5", "fedavg-30", "sparseloco-30", "adam-30")
#: What the published SparseLoCo sends: 12 bits for a position among 4,096, and 2 for the value, of one element in 64.
NOTE = f"""\
Worse: than float32 with the same seeds. Times fewer bytes: than float32 in each step; in an exchange: than float32 as often as the
method exchanges, headers included. SparseLoCo's published format, 12 bits for a position and 2 for a value, sends
{64 * 32 / 14:.0f} times fewer in an exchange."""
#: Targets, set before measuring.
FEWER_BYTES = 215  # times, in an exchange
WORSE = 1.015  # the loss with LocalAdamW and rounds of the fewest steps, against float32 in each step
#: Seconds, divided by those of the default, where it spends MOSTLY of its step or more in the exchange, and elsewhere.
MOSTLY, FASTER, SLOWER = 0.8, 1 / 3, 1.1
SLOW_LINK, OF_FP16 = "10mbit-20ms", 50  # there, so many times fewer seconds than with Horovod fp16
HIDDEN = 1.05  # a step, divided by that of compute alone, with exchanges in the background, at HIDDEN_AT
HIDDEN_AT = "100mbit"
SECONDS = f"""\
Seconds until the loss is that of Horovod float32 at its end, of those local steps that take the fewest, beside an exchange in each
step. The default is the faster of those over Horovod and DDP, as far as measured, and its exchange is what its step takes longer than
one without an exchange. Horovod fp16 is taken to need as many steps as float32. Rows with {LENGTHENED:g} times the steps are trainings
whose learning rate falls over so many. The default over Horovod has
{" ".join(f"`{name}={value}`" for name, value in OUR_ENVIRONMENT.items())}."""


def write_page(results: str, transformers: str, out: str) -> str:
    """Write the section and the plot; return what was written."""
    text, plotted = "", {}
    for task in TASKS:
        found = measured(results, transformers, task)
        if any(methods()[method][1] == "local" for method in found):
            plotted[task] = found
            bounds = targets(found) if TASKS[task].measure == "loss" else ""
            text += f"### {TASKS[task].label}\n\n{bounds}{tables(found, TASKS[task].measure)}\n"
    if plotted:
        draw(plotted, os.path.join(out, "local-steps.png"))
        methods_of = [method for found in plotted.values() for method in found.values()]
        runs = [run for method in methods_of for run in method.runs.values() if run.get("library") == "local"]
        limited = [run for method in methods_of for run in method.steps.values()]
        text = f"""\
Written by `benchmarks/local_steps.py`; do not edit.

![loss against tokens, bytes and seconds](local-steps.png)

{text.rstrip()}

Local steps {when_and_where(runs)}, all ranks on the same cores, by
`python benchmarks/local_steps.py run --data DIR`; rows with an exchange in each step are those of [transformers.md](transformers.md).
"""
        if limited:
            text += f"""\
Steps on limited links {when_and_where(limited)}, by `… links --data DIR`. The four hosts share these cores, and differences of a tenth
are chance: some steps with an exchange took less than the one without.
"""
    return write_section(out, "local-steps", "Measurements", text, "local-steps.md")


def when_and_where(runs: list[dict]) -> str:
    machines = sorted({run["machine"] for run in runs})
    return f"measured {days([run['date'] for run in runs])} on {' and '.join(machines)}"


def fewer_bytes(run: dict) -> tuple[float, float]:
    """How many times fewer bytes a rank has sent than with float32 in each step, and than with float32 as often as it did."""
    once = 4 * run["parameters"] / run["curve"][-1]["bytes_sent"]
    return once * run["curve"][-1]["step"], once * exchanges(run)


def exchanges(run: dict) -> int:
    """How often a run has exchanged its whole model."""
    end, arguments = run["curve"][-1], run.get("arguments", {})  # none: an exchange in each step
    made = end.get("rounds", end["step"])  # of all fragments, and what `synchronize` adds where there is nothing to send
    return made if "ramp" in arguments else min(made, math.ceil(end["step"] / arguments.get("steps", 1)))


def loss_against(method: Measured, other: Measured) -> tuple[float, int] | None:
    """The mean loss at the end, divided by that of another method, and the number of seeds that both have; None without one."""
    if not (both := method.runs.keys() & other.runs.keys()):
        return None
    own, base = (statistics.mean(one.runs[seed]["curve"][-1]["loss"] for seed in both) for one in (method, other))
    return own / base, len(both)


def targets(found: dict[str, Measured]) -> str:
    """What the losses and bytes were to be, and what they are."""
    rows = [["target", "bound", "measured", "seeds"]]
    shortest = min(LENGTHS)
    for ours, other, at_most in [
        *((f"sparseloco-{steps}", f"fedavg-{steps}", 1.0) for steps in LENGTHS),
        *(
            (f"{ours}-{steps}", dense, 1.0)
            for ours in ("adam", "delayed")
            for steps in LENGTHS
            for dense in (f"fedavg-{steps}", f"fedavg-adam-{steps}")
        ),
        *((f"{ours}-{shortest}", DENSE, WORSE) for ours in ("adam", "delayed")),
    ]:
        if ours in found and other in found and (against := loss_against(found[ours], found[other])):
            value, seeds = against
            label = f"{found[ours].label}: loss, divided by that of {found[other].label}"
            rows.append([label, f"at most {at_most:g}", f"{value:.4f}, {met(value <= at_most)}", str(seeds)])
    for steps in LENGTHS:
        for name in (f"sparseloco-{steps}", f"adam-{steps}", f"delayed-{steps}"):
            if name in found and found[name].runs:
                fewer = [fewer_bytes(run)[1] for run in found[name].runs.values()]
                label = f"{found[name].label}: times fewer bytes in an exchange"
                value = f"{min(fewer):.1f}, {met(min(fewer) >= FEWER_BYTES)}"
                rows.append([label, f"at least {FEWER_BYTES}", value, str(len(fewer))])
    for name in [name for name in found if name.startswith("streaming-")]:
        for link, result in found[name].steps.items():
            if not link.startswith(f"{HIDDEN_AT}-") or "alone_ms_per_step" not in result:
                continue
            value = result["ms_per_step"] / result["alone_ms_per_step"]
            label = f"{found[name].label}: step at {link}, divided by one without an exchange"
            rows.append([label, f"at most {HIDDEN:g}", f"{value:.3f}, {met(value <= HIDDEN)}", "1"])
    return f"{as_markdown(rows)}\n\n" if len(rows) > 1 else ""


def met(is_met: bool) -> str:
    return "met" if is_met else "**missed**"


def tables(found: dict[str, Measured], measure: str) -> str:
    """The loss and the bytes of each method, and how long it takes on each link to be as good as Horovod float32 at its end."""
    dense = found.get(DENSE)
    rows = [
        ["method", measure, "seeds", "worse than float32, %", "times fewer bytes", "in an exchange", "steps to the same"]
    ]
    for method in [one for one in found.values() if one.runs]:
        ends = [run["curve"][-1] for run in method.runs.values()]
        mean = statistics.mean(end[measure] for end in ends)
        fewer, in_exchange = zip(*map(fewer_bytes, method.runs.values()), strict=True)
        worse, needed = "", None
        if dense and (both := dense.runs.keys() & method.runs.keys()):
            base, own = (statistics.mean(one.runs[seed]["curve"][-1][measure] for seed in both) for one in (dense, method))
            worse = f"{100 * (own / base - 1) * (1 if measure == 'loss' else -1):+.2f}"
            needed = method.steps_to_the_end_of(dense, measure)
        rows.append(
            [
                method.label,
                f"{mean:.4f}",
                str(len(ends)),
                worse,
                f"{statistics.mean(fewer):,.1f}",
                f"{statistics.mean(in_exchange):.1f}",
                "not reached" if needed is None else f"{needed:.0f}",
            ]
        )
    text = as_markdown(rows) + f"\n\n{NOTE}"
    links = sorted({name for method in found.values() for name in method.milliseconds}, key=_by_rate)
    if links:
        text += (
            "\n\nMilliseconds a step (divided by a step without an exchange, which took turns with it) / seconds to the same, by the "
            "rate\nof the links and the delay from host to host:\n\n"
        )
        rows = [["method", *links]]
        for method in [one for one in found.values() if one.milliseconds]:
            as_default = method in (found.get(DDP), found.get(HOROVODS))
            trained = found.get(DEFAULT, method) if as_default else method
            needed = trained.steps_to_the_end_of(dense, measure) if dense else None
            rows.append([method.label, *(cell_of(method.steps.get(name), needed) for name in links)])
        text += as_markdown(rows) + seconds(found, measure, links)
    return text + "\n"


def cell_of(result: dict | None, needed: float | None) -> str:
    """The cell of a step on limited links. needed: how many such steps are as good as the dense run."""
    if result is None:
        return ""
    value, alone = result["ms_per_step"], result.get("alone_ms_per_step")
    of_alone = "" if alone is None else f" ({value / alone:.2f})"
    return f"{value:.1f}{of_alone} / {'–' if needed is None else f'{value * needed / 1000:,.0f}'}"


def seconds(found: dict[str, Measured], measure: str, links: list[str]) -> str:
    """A table of the fastest local steps beside an exchange in each step, by links, with their targets; empty if one is missing."""
    if not {DENSE, DEFAULT, FP16, ALONE} <= found.keys():
        return ""
    whole = max(run["curve"][-1]["step"] for run in found[DENSE].runs.values())
    needed = {name: method.steps_to_the_end_of(found[DENSE], measure) for name, method in found.items()}
    rows = [
        [
            "links",
            "default: exchange, %",
            "local steps",
            "seeds",
            "seconds",
            "divided by the default's",
            "bound",
            "times fewer than fp16",
        ]
    ]
    for link in links:
        milliseconds = {name: method.milliseconds[link] for name, method in found.items() if link in method.milliseconds}
        taken = {name: milliseconds[name] * needed[name] / 1000 for name in milliseconds if needed[name] is not None}
        ours = {name: value for name, value in taken.items() if methods()[name][1] == "local"}
        defaults = {name: milliseconds[name] for name in (DEFAULT, DDP) if name in milliseconds}
        if not (ours and defaults and needed[DEFAULT] and {FP16, ALONE} <= milliseconds.keys()):
            continue
        best = min(ours, key=ours.__getitem__)
        name = min(defaults, key=defaults.__getitem__)
        default = defaults[name]
        share = 1 - found[name].steps[link].get("alone_ms_per_step", milliseconds[ALONE]) / default
        bound = FASTER if share >= MOSTLY else SLOWER
        against = ours[best] / (default * needed[DEFAULT] / 1000)
        times = milliseconds[FP16] * whole / 1000 / ours[best]
        fewer = f"{times:.1f}"
        if link == SLOW_LINK:
            fewer += f", at least {OF_FP16:g}: {met(times >= OF_FP16)}"
        rows.append(
            [
                link,
                f"{100 * share:.0f}",
                found[best].label,
                str(len(found[best].runs)),
                f"{ours[best]:,.0f}",
                f"{against:.2f}",
                f"at most {bound:.2f}: {met(against <= bound)}",
                fewer,
            ]
        )
    return f"\n\n{SECONDS}\n\n{as_markdown(rows)}" if len(rows) > 1 else ""


def _by_rate(name: str) -> tuple[float, float]:
    rate, delay = name.rsplit("-", 1)
    number, unit = rate[:-4], rate[-4:]
    return float(number) * {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}[unit], float(delay.removesuffix("ms"))


def draw(tasks: dict[str, dict[str, Measured]], path: str) -> None:
    """Draw the loss of each task against steps, bytes and, on the link that most methods were measured on, seconds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(tasks), 3, figsize=(14, 4 * len(tasks)), layout="constrained", squeeze=False)
    for (task, found), (by_steps, by_bytes, by_seconds) in zip(tasks.items(), axes, strict=True):
        names = [name for method in found.values() for name in method.milliseconds]
        link = max(sorted(set(names), key=_by_rate), key=names.count) if names else None
        for number, method in enumerate(SHOWN):
            if method not in found or not found[method].runs:
                continue
            one = found[method]
            curve = next(run["curve"] for _, run in sorted(one.runs.items()))
            scores = [point[TASKS[task].measure] for point in curve]
            look = {"color": f"C{number}", "label": one.label, "marker": ".", "linewidth": 1}
            by_steps.plot([point["step"] for point in curve], scores, **look)
            by_bytes.plot([point["bytes_sent"] / 1e6 for point in curve], scores, **look)
            if link in one.milliseconds:
                by_seconds.plot([point["step"] * one.milliseconds[link] / 1000 for point in curve], scores, **look)
        by_steps.set(
            xlabel="steps of a rank", ylabel=f"{TASKS[task].measure}, held-out, first seed", title=TASKS[task].label
        )
        by_bytes.set(xlabel="MB that a rank has sent", xscale="log")
        by_seconds.set(xlabel=f"seconds with links of {link}", xscale="log")
        by_seconds.set_visible(link is not None)
        for ax in (by_steps, by_bytes, by_seconds):
            ax.grid(alpha=0.3)
        by_steps.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)
