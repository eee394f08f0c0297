"""Time to accuracy on four hosts with limited links: Horovod, torch DDP's hooks and grace_ext; writes docs/benchmarks.md.

    python benchmarks/cluster.py --data DIR

It can run in parts and be resumed: --models mlp --rates 100mbit 1gbit --configs horovod-fp16 sharded --resume. Measurements
are kept in benchmarks/results, and the page is written from all of them; --page does only that. Needs root, for mpirun/hosts.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import time

from _cluster_page import document, plot, spread, summary
from _cluster_results import CONFIGURATIONS, MODELS, OURS, RATES, SIDE_BY_SIDE, WITH_HOROVOD, Results, path_of
from _cluster_tasks import TASKS, write_words
from _hosts import LAUNCHERS, OUR_ENVIRONMENT, Hosts, Job, JobFailed
from _lib import ROOT, machine, replace_between
from _page import write_section

WORKER = os.path.join(ROOT, "benchmarks", "_cluster_worker.py")
WORDS = os.path.join(ROOT, "build", "benchmarks")  # folder of the text as numbers
HOSTS = 4
README = ("<!-- cluster:begin -->", "<!-- cluster:end -->")
START = 150  # seconds that a job may take in addition to its steps
SETTLES = {"auto": 400}  # steps until a configuration has made its choices


class Benchmark:
    def __init__(self, args, up: Hosts):
        self.args, self.up, self.failed, self.started, self.done = args, up, [], time.monotonic(), 0
        self.total = len(args.models) * len(args.rates) * (len(args.configs) + 2)

    def all(self) -> None:
        for model in self.args.models:
            for rate in self.args.rates:
                self.up("rate", rate)
                for config in self.args.configs:
                    self.run(model, rate, config, self.options(model, rate, config))
                self.side_by_side(model, rate)

    def options(self, model: str, rate: str, config: str) -> dict:
        _, library, arguments = CONFIGURATIONS[config]
        steps = self.args.steps or TASKS[model].steps
        return {
            "model": model,
            "seed": self.args.seed,
            "steps": steps,
            "evaluations": self.args.evaluations,
            # The run on unlimited links measures accuracy by step for all rates, and the first steps of auto are trials.
            "limit": self.args.limit if rate != "none" and arguments.get("communicator") != "auto" else 10**6,
            "library": library,
            "arguments": arguments,
            "launcher": self.launcher(config, library),
            "env": OUR_ENVIRONMENT if config in OURS else {},
            "hosts": self.up.count,
        }

    def launcher(self, config: str, library: str) -> str:
        if library == "ddp":
            return "torchrun"
        return self.args.our_launcher if config in OURS else self.args.launcher

    def run(self, model: str, rate: str, config: str, options: dict) -> None:
        """Run one job, a second time if it fails, because mpirun occasionally hangs (docs/cluster.md)."""
        self.done += 1
        title = f"{self.done}/{self.total} {model}, {rate}, {config}"
        out = path_of(self.args.raw, model, rate, config)
        if self.args.resume and os.path.exists(out) and self.is_same(out, options):
            say(f"{title}: was measured before")
            return
        if os.path.exists(out):
            os.remove(out)
        given = {**options, "out": out, "data": WORDS if model == "text" else self.args.data, "machine": machine()}
        for attempt in (1, 2):
            began = time.monotonic()
            try:
                program = [WORKER, json.dumps(given)]
                Job(self.up, options["launcher"], self.up.count, program, env=options["env"]).end(self.timeout(options))
            except JobFailed as error:
                say(f"{title}: attempt {attempt}: {error}")
                self.restart()
                continue
            say(
                f"{title}: {self.summary(out)}; {time.monotonic() - began:.0f} s, "
                f"{(time.monotonic() - self.started) / 60:.1f} minutes in all"
            )
            return
        self.failed.append(f"{model}, {rate}, {config}")

    def restart(self) -> None:
        """Restart all hosts, so that nothing of a failed job is left on them."""
        for host in range(1, self.up.count + 1):
            self.up("crash", host)
            self.up("boot", host)

    def timeout(self, options: dict) -> float:
        return START + (3 * self.args.limit if options["limit"] <= self.args.limit else max(900, 3 * self.args.limit))

    @staticmethod
    def is_same(out: str, options: dict) -> bool:
        with open(out) as file:
            before = json.load(file)["options"]
        return all(before.get(key) == value for key, value in options.items() if key != "limit")

    @staticmethod
    def summary(out: str) -> str:
        with open(out) as file:
            result = json.load(file)
        if "instances" in result:
            return ", ".join(f"{label} {spread(steps)} ms" for label, steps in result["instances"].items())
        accuracy = f", accuracy {result['curve'][-1][2]:.2%}" if result["curve"] else ", stopped early"
        return f"{1000 * statistics.median(result['laps']):.1f} ms a step, {result['steps']} steps{accuracy}"

    def side_by_side(self, model: str, rate: str) -> None:
        results = Results(self.args.raw)
        steps = {
            config: results.step(model, rate, config)
            for config in self.args.configs
            if CONFIGURATIONS[config][1] == "horovod" and results.get(model, rate, config)
        }
        near = [config for config, seconds in steps.items() if seconds <= self.args.near * min(steps.values())]
        ours = [config for config in near if config in OURS]
        for comparison, tried, launcher, env in (
            (SIDE_BY_SIDE, ours, self.args.our_launcher, OUR_ENVIRONMENT),
            (WITH_HOROVOD, near if near != ours else [], self.args.launcher, {}),
        ):
            if len(tried) < 2:
                self.done += 1
                continue
            options = {**self.options(model, rate, tried[0]), "launcher": launcher, "env": env}
            options["side_by_side"] = {
                config: {"arguments": CONFIGURATIONS[config][2], "settles": SETTLES.get(config, 8)} for config in tried
            }
            self.run(model, rate, comparison, options)


def say(text: str) -> None:
    print(f"[cluster] {text}", flush=True)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="folder of the data set (see mpirun/fetch_fashion_mnist.py); needed without --page")
    parser.add_argument("--page", action="store_true", help="measure nothing, only write the page from the measurements")
    parser.add_argument("--out", default=os.path.join(ROOT, "docs"), help="folder of benchmarks.md and the plot")
    parser.add_argument("--readme", metavar="FILE", help="also update the table in this file")
    parser.add_argument("--raw", default=os.path.join(ROOT, "benchmarks", "results"), help="folder of measurements")
    parser.add_argument("--resume", action="store_true", help="skip what was measured before with the same options")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rates", nargs="+", default=list(RATES), help="rates of the links, as for mpirun/hosts")
    parser.add_argument("--configs", nargs="+", choices=CONFIGURATIONS, default=list(CONFIGURATIONS))
    parser.add_argument(
        "--limit",
        type=float,
        default=100,
        help="most seconds of a run on limited links but auto's; longer runs are cut (default: %(default)s)",
    )
    parser.add_argument(
        "--near",
        type=float,
        default=2.5,
        help="compare side by side up to this many times the fastest step (default: %(default)s)",
    )
    parser.add_argument("--steps", type=int, help="steps of a full run (default: those of the model)")
    parser.add_argument("--evaluations", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--launcher",
        choices=LAUNCHERS,
        default="mpirun, ring",
        help="launcher for Horovod and all that is "
        "compared side by side with it (default: %(default)s, with which Horovod is the fastest here)",
    )
    parser.add_argument(
        "--our-launcher",
        choices=LAUNCHERS,
        default="horovodrun --gloo",
        help="launcher for grace_ext (default: %(default)s, the fastest one here)",
    )
    parser.add_argument("--hosts", type=int, default=HOSTS)
    parser.add_argument("--name", default="bench-cluster", help="name of the set of hosts (mpirun/hosts --name)")
    args = parser.parse_args()
    args.data, args.raw = args.data and os.path.abspath(args.data), os.path.abspath(args.raw)
    return args


def write_pages(args) -> None:
    """Write the section, its plot and the README's table from all measurements in the folder."""
    results = Results(args.raw)
    plot(results, os.path.join(args.out, "cluster.png"))
    path = write_section(args.out, "cluster", "Time to accuracy", document(results))
    if args.readme:
        replace_between(args.readme, README, f"{summary(results)}\n")
    say(f"written: {path}")


def main() -> int:
    args = parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the hosts are removed
    for folder in (args.raw, args.out):
        os.makedirs(folder, exist_ok=True)
    if args.page:
        write_pages(args)
        return 0
    if args.data is None:
        sys.exit("--data is needed without --page")
    if "text" in args.models:
        write_words(WORDS)
    with Hosts(args.name, args.hosts, "none") as up:
        benchmark = Benchmark(args, up)
        benchmark.all()
    write_pages(args)
    say(f"all in {(time.monotonic() - benchmark.started) / 60:.1f} minutes")
    for what in benchmark.failed:
        say(f"failed: {what}")
    return 1 if benchmark.failed else 0


if __name__ == "__main__":
    sys.exit(main())
