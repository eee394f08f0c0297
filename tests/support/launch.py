"""Starting real ranks: every way that the README names, with 2 and 4 processes on this machine."""

import ast
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
HANGS = 1200  # seconds after which a job is taken to hang, on however slow a machine
THOROUGH = 3600  # the same where its checks take all their cases
# The variable with the folder for Open MPI's own files. It names them by the number of mpirun's process alone. In /tmp, where
# it keeps them unless told otherwise, it may find those of a killed mpirun that had the same number, and ends without a reason.
OPEN_MPI_FOLDER = "PRTE_MCA_prte_tmpdir_base"

LAUNCHERS = {
    "mpirun-2": ["mpirun", "-np", "2", "--oversubscribe"],
    "mpirun-4": ["mpirun", "-np", "4", "--oversubscribe"],
    "horovodrun-gloo-2": ["horovodrun", "--gloo", "-np", "2", "-H", "localhost:2"],
    "horovodrun-gloo-4": ["horovodrun", "--gloo", "-np", "4", "-H", "localhost:4"],
    "horovodrun-mpi-2": ["horovodrun", "--mpi", "-np", "2", "-H", "localhost:2"],
    "horovodrun-mpi-4": ["horovodrun", "--mpi", "-np", "4", "-H", "localhost:4"],
}
# For torch.distributed without Horovod.
TORCHRUN = {
    "torchrun-2": ["torchrun", "--standalone", "--nproc-per-node", "2", "--no-python"],
    "torchrun-4": ["torchrun", "--standalone", "--nproc-per-node", "4", "--no-python"],
}
# One process whose Triton kernels run in Triton's interpreter, on tensors of the CPU.
INTERPRETER = {"interpreter-1": ["env", "TRITON_INTERPRET=1"]}
# One process that starts as many workers of Ray as it is told.
RAY = {"ray-2": ["env", "RANKS=2"], "ray-4": ["env", "RANKS=4"]}
# One process of its own, without Triton's interpreter.
OWN_PROCESS = {"process-1": ["env"]}
INTERPRETED_TORCHRUN = {"interpreted-torchrun-2": [*INTERPRETER["interpreter-1"], *TORCHRUN["torchrun-2"]]}
MAIN = (
    "mpirun-2",
    "torchrun-2",
    "interpreter-1",
    "process-1",
)  # all checks run under these, with all their cases in `make test-all`


def skip_without(*modules: str) -> None:
    """Skip the calling test module where one of these is not installed. None is imported: TensorFlow takes seconds."""
    for name in modules:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed", allow_module_level=True)


def environment() -> dict[str, str]:
    """Of a launcher."""
    # Horovod's MPI launcher adds what root and oversubscription need itself; mpirun takes it from the environment.
    variables = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "OMPI_MCA_mpi_yield_when_idle": "1",
    }  # there are more ranks than cores
    variables["PATH"] = os.path.dirname(sys.executable) + os.pathsep + variables["PATH"]
    variables["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(TESTS), os.environ.get("PYTHONPATH")])
    )  # ranks import `support`
    return variables


def run(launcher: str, script: Path, *arguments: str, timeout: float = HANGS, variables=None) -> subprocess.CompletedProcess:
    """Run a script under a launcher. On a time-out the whole job is killed and it raises.
    variables: of the environment, on top."""
    command = [
        *(LAUNCHERS | TORCHRUN | INTERPRETER | INTERPRETED_TORCHRUN | RAY | OWN_PROCESS)[launcher],
        sys.executable,
        str(script),
        *arguments,
    ]
    with tempfile.TemporaryDirectory(prefix="grace_ext.", ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            stdin=subprocess.DEVNULL,
            env=environment() | {OPEN_MPI_FOLDER: folder} | (variables or {}),
            start_new_session=True,
        )
        output = _until_the_end(process, timeout)
    return subprocess.CompletedProcess(command, process.returncode, output)


def _until_the_end(process: subprocess.Popen, timeout: float) -> str:
    """What the job printed. Raises AssertionError, and kills the whole job, if it takes more than `timeout` seconds."""
    try:
        return process.communicate(timeout=timeout)[0]
    except subprocess.TimeoutExpired:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.terminate()  # torchrun's workers are in process groups of their own, and it ends them
            process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        command = " ".join(process.args)
        raise AssertionError(f"{command} did not end within {timeout} s; its output:\n{output[-8000:]}") from None


def checks_in(*files: Path) -> dict[str, bool]:
    """The names of the checks in these files, without importing them: name -> whether launchers matter to it."""
    found = {}
    for node in (node for file in files for node in ast.parse(file.read_text()).body):
        for decorator in getattr(node, "decorator_list", ()):
            name = getattr(decorator, "id", None)
            if name in ("check", "check_under_every_launcher"):
                found[node.name] = name != "check"
    return found


def of_jobs(checks: dict[str, bool], others: tuple[str, ...] = (), launchers=LAUNCHERS):
    """Decorator of a test(job, name): which checks run under which launchers, in which tier.

    `quick` runs the checks to which launchers matter under the launcher of MAIN; `test` runs all checks under that one, and
    those to which launchers matter under the others, too; `all` runs all checks everywhere. The module has a fixture `job`.
    """

    def tier(launcher, matters):
        if launcher in MAIN:
            return "quick" if matters else "test"
        return "test" if matters and launcher in others else "all"

    return pytest.mark.parametrize(
        "job, name",
        [
            pytest.param(launcher, name, marks=pytest.mark.tier(tier(launcher, matters)), id=f"{launcher}-{name}")
            for launcher in launchers
            for name, matters in checks.items()
        ],
        indirect=["job"],
        scope="module",
    )


def in_tiers(cases, test: list) -> list:
    """Parameters: all cases in the tier `all`, those listed in `test`, too."""
    cases = list(cases)
    assert set(test) <= set(cases)
    return [
        pytest.param(*case, marks=[pytest.mark.alone, pytest.mark.tier("test" if case in test else "all")]) for case in cases
    ]


class Job:
    """Some checks, run in all ranks of a job. results: of each rank, {} where one wrote none; seconds: of each check."""

    def __init__(
        self, launcher: str, script: Path, folder: Path, checks: list[str], thorough: bool, arguments: tuple[str, ...]
    ):
        (folder / "checks.json").write_text(json.dumps({"checks": checks, "thorough": thorough}))
        self.checks = checks
        ranks = int(launcher.rsplit("-", 1)[1])
        # Horovod puts dense tensors together as they happen to come, and under Gloo the order of more than two ranks' sums
        # depends on where in a message a tensor is: without this, runs that ought to be alike would differ in the last bit.
        variables = {"HOROVOD_FUSION_THRESHOLD": "0"} if ranks > 2 else {}
        self.process = run(
            launcher, script, str(folder), *arguments, timeout=THOROUGH if thorough else HANGS, variables=variables
        )
        self.results, self.seconds = (
            [
                json.loads(file.read_text()) if file.exists() else {}
                for file in (folder / f"{kind}{rank}.json" for rank in range(ranks))
            ]
            for kind in ("rank", "seconds")
        )

    def assert_ok(self, name: str) -> None:
        """The check went well in every rank, and the job ended well if it was its last."""
        for rank, result in enumerate(self.results):
            said = result.get(name, "did not get there")
            assert said == "ok", f"rank {rank}: {said}\n{self.process.stdout[-4000:]}"
        if name == self.checks[-1]:
            assert self.process.returncode == 0, self.process.stdout[-4000:]
            assert all(list(result) == self.checks for result in self.results)


def start_job(request, tmp_path_factory, script: Path, *arguments: str) -> Job:
    """What the fixture `job` of a module is: its script under the launcher of this parameter, with the checks to be run.
    arguments: of the script, after the folder."""
    checks = [
        item.callspec.params["name"]
        for item in request.session.items
        if item.module is request.module
        and getattr(item, "callspec", None)
        and item.callspec.params.get("job") == request.param
    ]
    folder = tmp_path_factory.mktemp(request.param)
    thorough = request.config.getoption("tier") == "all" and request.param in MAIN
    return Job(request.param, script, folder, checks, thorough, arguments)
