"""Which faults in the code do the tests notice? Makes one mutation at a time, for each suite; writes docs/reliability.md.

    python benchmarks/mutations.py check
    python benchmarks/mutations.py run --suite quick --baseline
    python benchmarks/mutations.py run --suite test --jobs 2 --resume
    python benchmarks/mutations.py run --suite old --old CHECKOUT --near
    python benchmarks/mutations.py page

The mutations are in benchmarks/mutations.json: "old", which the file contains exactly once, is replaced by "new". The tests
in "near" are likely to notice it: each entry is a path and further arguments of pytest
("tests/adapters/horovod_torch/test_horovod_torch.py -k mpirun-2"). If they do not notice it, or are not in the suite, the
whole suite runs, so that each mutation that it misses takes its whole time. With --near it does not run, and the suite may
notice more than is reported. Results are kept in benchmarks/results/mutations.json after each mutation; --resume continues a
run that was stopped.

Where the code has changed since the old suite, "then" has the "file", "old" and "new" of the same fault in that code, and as
"near" the names of these tests in the old suite.

The code under test is a copy, so that the checkout may change during a run. Copies stay in place, because compiled kernels
are cached by the path of their source.
"""

import argparse
import ast
import collections
import concurrent.futures
import contextlib
import datetime
import hashlib
import json
import os
import queue
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from _lib import ROOT, as_markdown, machine
from _page import commit, write_section

LIST = os.path.join(ROOT, "benchmarks", "mutations.json")
PARTS = (
    "kernels",
    "codecs",
    "container",
    "decoder",
    "exchange",
    "communicators",
    "memories",
    "policy",
    "observe",
    "horovod-torch",
    "onebit",
    "horovod-tensorflow",
    "keras",
    "ddp",
    "mpi",
    "federated",
    "rounds",
)
#: suite -> its title, and the arguments of pytest.
SUITES = {
    "quick": ("`make test-quick`", ["--tier", "quick"]),
    "test": ("`make test`", ["--tier", "test"]),
    "old": ("the old suite", []),
}
#: Whole suites run as the Makefile runs them; the old one knows no groups of tests.
WHOLE = {"quick": ["-n", "auto", "--dist", "loadgroup", "--no-loadscope-reorder"]}
WHOLE |= {"test": WHOLE["quick"], "old": []}
HANGS = 1800  # seconds after which a suite counts as hanging, or twice its baseline if that is longer
# Seconds of processor time after which a process of the near tests counts as in an endless loop: more than a test waits for
# a job, in which MPI may spin.
SPINS = 600
_PASSED, _FAILED, _INTERRUPTED, _NOTHING = 0, 1, 2, 5  # pytest's exit statuses
# Python imports it at its start. It runs after the venv's .pth files, of which one has installed the finder of the editable
# install: that one alone knows where grace_ext.adapters is, and is told of the copy here. PYTHONPATH goes to the ranks, too.
_SITE = '''"""The editable install's finder finds grace_ext in a copy of the checkout."""
import sys

for _finder in [module for name, module in sys.modules.items() if name.startswith("__editable___grace_ext")]:
    _finder.MAPPING = {{"grace_ext": {package!r}, "grace_ext.adapters": {adapters!r}}}
'''


class RunFailed(Exception):
    pass


def load() -> list[dict]:
    with open(LIST, encoding="utf-8") as file:
        return json.load(file)


def digest_of(mutation: dict) -> str:
    """Return a digest of a mutation, so that results of one that has changed since do not count."""
    return hashlib.sha256(json.dumps([mutation[key] for key in ("file", "old", "new")]).encode()).hexdigest()[:16]


def mutated(mutation: dict, text: str) -> str:
    """Return the text with the mutation. Raises RunFailed unless it contains the old text exactly once."""
    count = text.count(mutation["old"])
    if count != 1:
        raise RunFailed(f"{mutation['id']}: its old text is {count} times in {mutation['file']}")
    return text.replace(mutation["old"], mutation["new"])


def check(mutations: list[dict]) -> list[str]:
    """Return what is wrong with the list."""
    ids = collections.Counter(mutation["id"] for mutation in mutations)
    wrong = [f"{id}: there are {count} of this name" for id, count in ids.items() if count > 1]
    for mutation in mutations:
        if mutation["part"] not in PARTS:
            wrong.append(f"{mutation['id']}: part {mutation['part']!r} is not known")
        try:
            with open(os.path.join(ROOT, mutation["file"]), encoding="utf-8") as file:
                before = file.read()
            after = mutated(mutation, before)
            if ast.dump(compile(after, mutation["file"], "exec", ast.PyCF_ONLY_AST)) == ast.dump(ast.parse(before)):
                wrong.append(f"{mutation['id']}: it changes nothing but the text")
        except (OSError, SyntaxError, RunFailed) as error:
            wrong.append(f"{mutation['id']}: {error}")
        wrong += [
            f"{mutation['id']}: there is no {path}"
            for path in paths_of(mutation)
            if not os.path.exists(os.path.join(ROOT, path))
        ]
    return wrong


def paths_of(mutation: dict) -> list[str]:
    """Return the files of its near tests."""
    return [shlex.split(near)[0].partition("::")[0] for near in mutation.get("near", ())]


def then(mutation: dict) -> dict:
    """Return the same fault in the code of the old suite."""
    return {**mutation, **mutation.get("then", {})}


class Copy:
    """A copy of a checkout's files in a folder, to which one mutation at a time is applied.

    Python and the ranks that its tests start import grace_ext from there.
    """

    def __init__(self, source: str, folder: str):
        self.source, self.folder = source, os.path.join(folder, "checkout")
        self._site = os.path.join(folder, "site")
        self._process: subprocess.Popen | None = None
        self._stopped = False
        shutil.rmtree(folder, ignore_errors=True)
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=source, check=True, capture_output=True, text=True
        ).stdout
        for name in filter(None, listed.split("\0")):
            if os.path.isfile(os.path.join(source, name)):  # a tracked file may be deleted
                target = os.path.join(self.folder, name)
                os.makedirs(os.path.dirname(target), exist_ok=True)
                shutil.copy2(os.path.join(source, name), target)  # with its time, which identifies compiled kernels
        subprocess.run(["git", "init", "--quiet"], cwd=self.folder, check=True)  # a test asks git for the files
        os.makedirs(self._site)
        with open(os.path.join(self._site, "sitecustomize.py"), "w", encoding="utf-8") as file:
            file.write(
                _SITE.format(package=os.path.join(self.folder, "grace_ext"), adapters=os.path.join(self.folder, "adapters"))
            )
        self._check_imports()

    @property
    def environment(self) -> dict:
        paths = os.pathsep.join(filter(None, [self._site, os.environ.get("PYTHONPATH")]))
        return {**os.environ, "PYTHONPATH": paths, "PATH": os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]}

    def _check_imports(self) -> None:
        """Check what is imported from another folder, as examples and ranks may do."""
        code = "import grace_ext, grace_ext.adapters as a; print(grace_ext.__file__, a.__file__, sep='\\n')"
        found = subprocess.run(
            [sys.executable, "-c", code], cwd=self._site, env=self.environment, check=True, capture_output=True, text=True
        ).stdout.split("\n")[:2]
        expected = [os.path.join(self.folder, *place, "__init__.py") for place in (["grace_ext"], ["adapters"])]
        if found != expected:
            raise RunFailed(f"the tests of the copy would import {found}")

    @contextlib.contextmanager
    def with_(self, mutation: dict):
        path = os.path.join(self.folder, mutation["file"])
        with open(path, encoding="utf-8") as file:
            before = file.read()
        times = os.stat(path)
        with open(path, "w", encoding="utf-8") as file:
            file.write(mutated(mutation, before))
        try:
            yield
        finally:
            with open(path, "w", encoding="utf-8") as file:
                file.write(before)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    def pytest(self, arguments: list[str], seconds: float, spins: int = resource.RLIM_INFINITY) -> tuple[str | None, str]:
        """Run pytest until the first failure.

        Returns None if nothing failed, else "failed", "crashed" or "hung", and the first test that failed or the one that
        was running. seconds: the time that it may take; spins: the processor time that each process may take. Raises
        RunFailed if pytest cannot run these tests.
        """
        # test_mutations.py would notice every mutation: it compares the list with the code.
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-v",
            "-ra",
            "--tb=no",
            "-p",
            "no:cacheprovider",
            "--ignore",
            "tests/test_mutations.py",
            *arguments,
        ]
        output = os.path.join(os.path.dirname(self.folder), "output.txt")
        with open(output, "wb") as file:
            self._process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            resource.prlimit(self._process.pid, resource.RLIMIT_CPU, (spins, resource.RLIM_INFINITY))  # its children, too
            try:
                status = self._process.wait(seconds)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                if self._process.poll() is None:
                    end(self._process)
        if self._stopped:
            raise RunFailed("stopped")
        with open(output, encoding="utf-8", errors="replace") as file:
            lines = file.read().splitlines()
        if status in (_PASSED, _NOTHING):
            return None, ""
        if status is None or status < 0:
            return "hung" if status in (None, -signal.SIGXCPU) else "crashed", running(lines)
        if status in (_FAILED, _INTERRUPTED):  # the latter where a file of tests cannot be imported
            return "failed", first_failure(lines)
        raise RunFailed(f"{' '.join(command)} ended with status {status}:\n" + "\n".join(lines[-20:]))

    def stop(self) -> None:
        """Abort what runs; called from another thread."""
        self._stopped = True
        if self._process is not None and self._process.poll() is None:
            end(self._process)


def running(lines: list[str]) -> str:
    """Return the test that pytest -v named last."""
    return next((line.split(" ")[0] for line in reversed(lines) if "::" in line and line.startswith("tests")), "")


def first_failure(lines: list[str]) -> str:
    """Return the first failure of pytest's short summary."""
    found = next((line.split(" - ")[0] for line in lines if line.startswith(("FAILED ", "ERROR "))), "")
    return found.partition(" ")[2]


def end(process: subprocess.Popen) -> None:
    """End a process and all that it has started: launchers and their ranks are in sessions of their own."""
    for pid in [*descendants(process.pid), process.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def descendants(pid: int) -> list[int]:
    children = collections.defaultdict(list)
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", encoding="utf-8", errors="replace") as file:
            parent = int(file.read().rpartition(")")[2].split()[1])  # behind the name, which may hold anything
            children[parent].append(int(entry))
    found = [pid]
    for one in found:
        found += children[one]
    return found[1:]


def able_to_notice(copy: Copy, mutation: dict) -> list[str]:
    """Return the tests to run: all or, for a mutation of an adapter, those that may load adapters.

    These start ranks or name adapters, examples or benchmarks. The others never load an adapter, because the core imports
    none.
    """
    if not mutation["file"].startswith("adapters/"):
        return []
    tests, core = Path(copy.folder, "tests"), Path(copy.folder, "grace_ext")
    found = []
    for path in sorted(tests.rglob("test_*.py")):
        folder = path.relative_to(tests).parts[0]
        of_the_core = path.parent == tests or (core / folder).is_dir()
        if not of_the_core or re.search("adapters|examples|benchmarks", path.read_text()):
            found.append(str(path.relative_to(copy.folder)))
    return found


def measure(copy: Copy, mutation: dict, suite: str, seconds: float, near_only: bool = False) -> dict:
    """Measure a mutation with one suite: first the near tests, then the others unless only near ones are wanted."""
    near = [
        shlex.split(one)
        for one, path in zip(mutation.get("near", ()), paths_of(mutation), strict=True)
        if os.path.exists(os.path.join(copy.folder, path))
    ]
    started = time.monotonic()
    how, test = None, ""
    with copy.with_(mutation):
        for arguments in near:
            how, test = copy.pytest([*SUITES[suite][1], *arguments], seconds, SPINS)
            if how is not None:
                break
        if how is None and not near_only:
            how, test = copy.pytest([*SUITES[suite][1], *WHOLE[suite], *able_to_notice(copy, mutation)], seconds)
    outcome = {"caught": how is not None, "how": how, "test": test, "seconds": round(time.monotonic() - started, 1)}
    return outcome | ({"near_only": True} if how is None and near_only else {})


def is_measured(outcome: dict | None, digest: str, near_only: bool) -> bool:
    """Return whether it need not be measured again. near_only: as far as the near tests go."""
    return outcome is not None and outcome["digest"] == digest and (near_only or not outcome.get("near_only"))


def noticed_by_less(results: dict, suite: str, mutation: dict) -> dict | None:
    """Return the result of `quick` if it noticed the mutation: its tests are in `test`, too."""
    outcome = results["suites"].get("quick", {"mutations": {}})["mutations"].get(mutation["id"])
    if suite == "test" and outcome and outcome["caught"] and outcome["digest"] == digest_of(mutation):
        return {key: outcome[key] for key in ("caught", "how", "test", "seconds")}
    return None


def run(args) -> int:
    mutations = load()
    if wrong := check(mutations):
        raise RunFailed("\n".join(wrong))
    unknown = {*args.only} - {mutation["id"] for mutation in mutations}
    if unknown:
        raise RunFailed(f"no mutations are called {', '.join(sorted(unknown))}")
    if (args.suite == "old") != (args.old is not None):
        raise RunFailed("--suite old needs --old, the checkout with that suite, and no other suite takes it")
    source = os.path.abspath(args.old or ROOT)
    results = read(args.results)
    kept = results["suites"].setdefault(args.suite, {"baseline": None, "mutations": {}})
    digests = {mutation["id"]: digest_of(mutation) for mutation in mutations}
    left = [
        mutation
        for mutation in mutations
        if mutation["id"] in (args.only or digests)
        and not (args.resume and is_measured(kept["mutations"].get(mutation["id"]), digests[mutation["id"]], args.near))
    ]
    slots: queue.SimpleQueue[Copy] = queue.SimpleQueue()
    work = os.path.join(os.path.abspath(args.work), "old" if args.old else "new")
    copies = [Copy(source, f"{work}{number}") for number in range(args.jobs)]
    of_source = commit(source)
    if args.baseline:
        started = time.monotonic()
        how, test = copies[0].pytest([*SUITES[args.suite][1], *WHOLE[args.suite]], args.most)
        if how is not None:
            raise RunFailed(f"without a mutation the suite {how}: {test}")
        kept["baseline"] = round(time.monotonic() - started, 1)
        write(args.results, results)
        say(f"{args.suite}: {kept['baseline']:.0f} s without a mutation")
    seconds = max(HANGS, 2 * (kept["baseline"] or 0))
    for copy in copies:
        slots.put(copy)
    lock = threading.Lock()

    def one(mutation: dict) -> None:
        copy = slots.get()
        try:
            outcome = noticed_by_less(results, args.suite, mutation) or measure(
                copy, then(mutation) if args.old else mutation, args.suite, seconds, args.near
            )
        finally:
            slots.put(copy)
        with lock:
            kept["mutations"][mutation["id"]] = {
                **outcome,
                "digest": digests[mutation["id"]],
                "commit": of_source,
                "date": datetime.date.today().isoformat(),
                "machine": machine(),
            }
            write(args.results, results)
            what = f"{outcome['how']}: {outcome['test']}" if outcome["caught"] else "missed"
            say(f"{args.suite}: {mutation['id']}: {what} ({outcome['seconds']:.0f} s)")

    with concurrent.futures.ThreadPoolExecutor(args.jobs) as threads:
        futures = [threads.submit(one, mutation) for mutation in left]
        try:
            for future in concurrent.futures.as_completed(futures):
                future.result()
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            for copy in copies:
                copy.stop()
            raise
    return 0


def read(path: str) -> dict:
    if not os.path.exists(path):
        return {"suites": {}}
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def write(path: str, results: dict) -> None:
    """Replace the file as a whole."""
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        json.dump(results, file, indent=1, sort_keys=True)
        file.write("\n")
    os.replace(f"{path}.new", path)


def document(mutations: list[dict], results: dict) -> str:
    suites = [suite for suite in SUITES if results["suites"].get(suite, {}).get("mutations")]
    found = {
        suite: {
            mutation["id"]: outcome
            for mutation in mutations
            if (outcome := results["suites"][suite]["mutations"].get(mutation["id"]))
            and outcome["digest"] == digest_of(mutation)
        }
        for suite in suites
    }
    titles = [SUITES[suite][0] for suite in suites]
    parts = {part: [mutation["id"] for mutation in mutations if mutation["part"] == part] for part in PARTS}
    parts = {**{part: ids for part, ids in parts.items() if ids}, "**all**": [mutation["id"] for mutation in mutations]}
    shares = [
        ["part", "mutations", *titles],
        *([part, str(len(ids)), *(share(found[suite], ids) for suite in suites)] for part, ids in parts.items()),
    ]
    single = [
        ["mutation", "what a user would suffer", *titles],
        *(
            [f"`{one['id']}`", one["says"], *(outcome_of(found[suite].get(one["id"]), suite) for suite in suites)]
            for one in mutations
        ),
    ]
    outcomes = [outcome for by_id in found.values() for outcome in by_id.values()]
    dates, commits, machines = (sorted({outcome[key] for outcome in outcomes}) for key in ("date", "commit", "machine"))
    return (
        "\n\n".join(
            [
                f"Written by `benchmarks/mutations.py`; do not edit. {len(mutations)} faults, made one at a time in the code "
                "(`benchmarks/mutations.json`), and the share of them that each suite notices. The *old suite* is that of commit "
                "a5fb4b8, the last one before the tests had tiers; the same faults were made in the code of that commit. The *near "
                "tests* of a mutation are those that `benchmarks/mutations.json` lists as likely to notice it; they run first. "
                "*At least*: where the near tests did not notice a mutation, the rest of the suite was not run.",
                as_markdown(shares),
                "Each mutation, and the first test by which each suite noticed it. A suite that takes more than "
                f"{HANGS // 60} minutes, or twice its own time if that is longer, hangs, which counts as noticed; so does a process "
                f"of the near tests that computes for more than {SPINS // 60} minutes.",
                as_markdown(single).replace("|---|" + "--:|" * (len(single[0]) - 1), "|" + "---|" * len(single[0])),
                f"Measured on {', '.join(dates)} at {', '.join(commits)} on {'; '.join(machines)}, by "
                "`python benchmarks/mutations.py run`.",
            ]
        )
        + "\n"
    )


def share(found: dict, ids: list[str]) -> str:
    measured = [found[id] for id in ids if id in found]
    if not measured:
        return "–"
    caught = sum(outcome["caught"] for outcome in measured)
    least = "at least " if any(outcome.get("near_only") for outcome in measured) else ""
    return f"{least}{caught} of {len(measured)} ({100 * caught / len(measured):.0f} %)"


def outcome_of(outcome: dict | None, suite: str) -> str:
    """Say which test noticed a mutation; the old suite's without their files, which are not in this checkout."""
    if outcome is None:
        return "–"
    if not outcome["caught"]:
        return "not by its near tests" if outcome.get("near_only") else "**missed**"
    test = outcome["test"].replace("|", "\\|")
    test = test.rpartition("::")[2] if suite == "old" else test
    return f"`{test}`" + ("" if outcome["how"] == "failed" else f" ({outcome['how']})")


def page(args) -> int:
    results = read(args.results)
    if not any(suite["mutations"] for suite in results["suites"].values()):
        raise RunFailed(f"{args.results} has no results")
    path = write_section(args.out, "mutations", "Mutation tests", document(load(), results), "reliability.md")
    say(f"written: {path}")
    return 0


def check_list(_) -> int:
    mutations = load()
    wrong = check(mutations)
    for line in wrong:
        say(line)
    counts = collections.Counter(mutation["part"] for mutation in mutations)
    say(f"{len(mutations)} mutations: " + ", ".join(f"{counts[part]} {part}" for part in PARTS))
    return 1 if wrong else 0


def say(text: str) -> None:
    print(f"[mutations] {text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    kept = argparse.ArgumentParser(add_help=False)
    kept.add_argument("--results", default=os.path.join(ROOT, "benchmarks", "results", "mutations.json"))
    command = commands.add_parser("run", parents=[kept], help="measure which mutations a suite notices")
    command.add_argument("--suite", choices=SUITES, required=True)
    command.add_argument("--old", metavar="CHECKOUT", help="the checkout with the old suite")
    command.add_argument("--near", action="store_true", help="only the tests near to each mutation, not the whole suite")
    command.add_argument("--only", nargs="+", default=[], metavar="ID")
    command.add_argument("--jobs", type=int, default=1, help="mutations at a time, each in a copy of its own")
    command.add_argument("--work", default=os.path.join(ROOT, "build", "mutations"), help="folder of the copies")
    command.add_argument("--baseline", action="store_true", help="run the suite without a mutation before; it must pass")
    command.add_argument("--most", type=float, default=4 * 3600, help="seconds that the baseline may take")
    command.add_argument(
        "--resume", action="store_true", help="skip what has a result of this suite; without --near, one of the whole suite"
    )
    command.set_defaults(run=run)
    command = commands.add_parser("page", parents=[kept], help="write the section of reliability.md")
    command.add_argument("--out", default=os.path.join(ROOT, "docs"), help="folder of reliability.md")
    command.set_defaults(run=page)
    commands.add_parser("check", help="check the list of mutations").set_defaults(run=check_list)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that tests and their ranks are ended
    return args.run(args)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RunFailed as error:
        sys.exit(f"[mutations] error: {error}")
