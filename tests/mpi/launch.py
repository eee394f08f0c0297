"""Starting real ranks: every way that the README names, with 2 and 4 processes on this machine."""

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


def run(launcher: str, script: str, *arguments: str, timeout: float) -> subprocess.CompletedProcess:
    """Run a script of this folder under a launcher. On a time-out the whole process group is killed and it raises."""
    # Horovod's MPI launcher adds what root and oversubscription need itself; mpirun takes it from the environment.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1",
                   "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "TF_CPP_MIN_LOG_LEVEL": "3",
                   "OMPI_MCA_mpi_yield_when_idle": "1"}  # there are more ranks than cores
    environment["PATH"] = os.path.dirname(sys.executable) + os.pathsep + environment["PATH"]
    command = [*LAUNCHERS[launcher], sys.executable, str(HERE / script), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               stdin=subprocess.DEVNULL, env=environment, start_new_session=True)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"{' '.join(command)} did not end within {timeout} s; its output:\n{output[-8000:]}") from None
    return subprocess.CompletedProcess(command, process.returncode, output)
