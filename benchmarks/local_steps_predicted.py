"""How long a language model takes over links of the internet, with and without local steps, in virtual time.

    python benchmarks/local_steps_predicted.py

writes its section of docs/simulator.md. A minute or two on one core, in which codecs are measured.
"""

import argparse
import datetime
import os

from _lib import ROOT, as_markdown, machine
from _page import write_section

from grace_ext.policy.advisor import measure_codec
from grace_ext.policy.cost_model import communicators_for
from grace_ext.rounds.presets import PRESETS
from grace_ext.simulate import LocalSetting, fastest
from grace_ext.simulate.traces import constant

PAGE = "simulator.md"
PARAMS = 10**9
TOKENS = 20 * PARAMS
BATCH = 2**21  # tokens of all workers in a local step
STEPS = round(TOKENS / BATCH)
SPEED = 40e12  # floating-point operations a second that a worker makes of a training
SAMPLE = 2**18  # elements of the gradients that codecs are measured with
#: Label, spec, steps, fragments, delay, communicator; None: the fastest.
METHODS = [
    ("float32 gradients in each step", "dense/raw", 1, 1, 0, None),
    ("the default's gradients in each step", "topk:0.01/rice/qsgd:7", 1, 1, 0, None),
    ("DiLoCo", PRESETS["diloco"].compression, PRESETS["diloco"].steps, 1, 0, None),
    ("MuLoCo, 4 bits", PRESETS["muloco"].compression, PRESETS["muloco"].steps, 1, 0, None),
    ("SparseLoCo", PRESETS["sparseloco"].compression, PRESETS["sparseloco"].steps, 1, 0, "allgather"),
    ("SparseLoCo, weighted mean", PRESETS["sparseloco"].compression, PRESETS["sparseloco"].steps, 1, 0, None),
    ("SparseLoCo, weighted mean, 500 steps", PRESETS["sparseloco"].compression, 500, 1, 0, None),
    ("Streaming, 4 bits, 500 steps", "dense/qsgd:4", 500, 4, 120, None),
    ("Streaming, SparseLoCo's containers, weighted mean, 500 steps", PRESETS["sparseloco"].compression, 500, 4, 120, None),
]
SETTINGS = [(16, 100e6, 0.05), (128, 100e6, 0.05), (1024, 100e6, 0.05), (1024, 100e6, 0.001), (1024, 1e9, 0.05)]
HEAD = ["", "spec", "local steps", "fragments, delay", "by", "s an exchange", "GB sent by a worker", "hours", "computing"]


def seconds_of_step(workers: int) -> float:
    """6 operations for each parameter and token."""
    return 6 * PARAMS * BATCH / workers / SPEED


def rows_of(workers: int, bandwidth: float, latency: float, codecs: dict) -> list[list[str]]:
    rows = []
    for label, spec, steps, fragments, delay, chosen in METHODS:
        setting = LocalSetting(
            PARAMS,
            [constant(bandwidth / 8)] * workers,
            compute=seconds_of_step(workers),
            total=STEPS,
            steps=steps,
            fragments=fragments,
            delay=delay,
            latency=latency,
            headers=steps > 1,
        )
        communicators = [chosen] if chosen else communicators_for(spec, workers)
        communicator, found = fastest(setting, codecs[spec], communicators)
        exchange = sum(one.seconds for one in found.transfers) / len(found.transfers)
        streaming = f"{fragments}, {delay}" if fragments > 1 else ""
        cells = [label, f"`{spec}`", str(steps), streaming, communicator, f"{exchange:,.1f}", f"{found.sent / 1e9:,.1f}"]
        rows.append([*cells, f"{found.seconds / 3600:,.1f}", f"{found.efficiency:.1%}"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=os.path.join(ROOT, "docs"), help="folder of the page")
    arguments = parser.parse_args()
    codecs = {spec: measure_codec(spec, SAMPLE) for spec in {method[1] for method in METHODS}}
    text = [
        "Written by `benchmarks/local_steps_predicted.py`; do not edit between the markers. Predicted, not measured.\n",
        f"A language model of {PARAMS / 1e9:g} billion parameters is trained on {TOKENS / 1e9:g} billion tokens, in {STEPS:,} local steps "
        f"with {BATCH:,} tokens of all workers together. A worker makes {SPEED / 1e12:g} TFLOP/s, at 6 operations for each parameter and "
        "token, and has a link of its own, as fast in both directions.\n",
    ]
    for workers, bandwidth, latency in SETTINGS:
        seconds = seconds_of_step(workers)
        text.append(
            f"**{workers:,} workers, {bandwidth / 1e6:,.0f} Mbit/s, {1e3 * latency:g} ms**: {seconds:,.2f} s for a local step, "
            f"{STEPS * seconds / 3600:,.1f} hours of computing.\n"
        )
        text.append(as_markdown([HEAD, *rows_of(workers, bandwidth, latency, codecs)]) + "\n")
    text.append(
        "- The time of the same number of local steps. What the loss is after them, nothing here says: it can be worse the more "
        f"steps there are in a round. 500 steps leave {STEPS // 500} rounds.\n"
        f"- Sizes of containers, and seconds of codecs on one core, were measured on this machine with gradients of heavy tails of "
        f"{SAMPLE:,} elements, and are taken to grow with the number of elements.\n"
        "- Each of 2 (n − 1) messages of an allreduce, and of n − 1 of an allgather or alltoall, waits for the one before. So many "
        "workers pay for latency before they pay for bytes: headers alone are n messages in each exchange. Collectives that are "
        "trees, or hosts that share a link, would change this.\n"
        "- SparseLoCo's own mean, that over the workers that have sent an element, needs each worker's containers: communicator allgather. "
        "The weighted mean goes with all communicators.\n"
        "- A fragment goes as a single bucket (`bucket_bytes` above its size). No worker is slower than others, fails or leaves. "
        "Gradients of each step hide behind nothing.\n"
    )
    text.append(f"Computed on {datetime.date.today()} on {machine()}, by `python benchmarks/local_steps_predicted.py`.")
    print(write_section(arguments.out, "local-steps", "Local steps, predicted", "\n".join(text), PAGE))


if __name__ == "__main__":
    main()
