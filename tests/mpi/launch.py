"""Starting real ranks: every way that the README names, with 2 and 4 processes on this machine."""

import ast
import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent

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


def run(launcher: str, script: str, *arguments: str, timeout: float) -> subprocess.CompletedProcess:
    """Run a script, relative to this folder, under a launcher. On a time-out the whole job is killed and it raises."""
    # Horovod's MPI launcher adds what root and oversubscription need itself; mpirun takes it from the environment.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1",
                   "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "TF_CPP_MIN_LOG_LEVEL": "3",
                   "OMPI_MCA_mpi_yield_when_idle": "1"}  # there are more ranks than cores
    environment["PATH"] = os.path.dirname(sys.executable) + os.pathsep + environment["PATH"]
    command = [*(LAUNCHERS | TORCHRUN)[launcher], sys.executable, str(HERE / script), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               stdin=subprocess.DEVNULL, env=environment, start_new_session=True)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.terminate()  # torchrun's workers are in process groups of their own, and it ends them
            process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"{' '.join(command)} did not end within {timeout} s; its output:\n{output[-8000:]}") from None
    return subprocess.CompletedProcess(command, process.returncode, output)


def checks_in(*files: str) -> list[str]:
    """The names of the checks in files of this folder, without importing them."""
    nodes = [node for file in files for node in ast.parse((HERE / file).read_text()).body]
    return [node.name for node in nodes if isinstance(node, ast.FunctionDef)
            and any(getattr(decorator, "id", None) == "check" for decorator in node.decorator_list)]


def run_worker(launcher: str, script: str, folder: Path, timeout: float = 1200):
    """Run a script that writes rankN.json: (results by rank, {} where a rank wrote none; the process)."""
    done = run(launcher, script, str(folder), timeout=timeout)
    files = [folder / f"rank{rank}.json" for rank in range(int(launcher.rsplit("-", 1)[1]))]
    return [json.loads(file.read_text()) if file.exists() else {} for file in files], done


def assert_ended_well(job, checks: list[str]) -> None:
    """The job of run_worker ended with status 0, and these are all the checks that it ran."""
    results, done = job
    assert done.returncode == 0, done.stdout[-4000:]
    assert all(sorted(result) == sorted(checks) for result in results)


def assert_ok(job, name: str) -> None:
    """The check of that name went well in every rank of what run_worker gave."""
    results, done = job
    for rank, result in enumerate(results):
        assert result.get(name) == "ok", f"rank {rank}: {result.get(name, 'did not get there')}\n{done.stdout[-4000:]}"
