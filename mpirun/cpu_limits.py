"""Control groups of Linux that limit the processor time of the hosts of mpirun/hosts."""

import errno
import os
import re
import time

from machine import CANNOT, Failure

LEAST = 0.001  # cores: the kernel's periods have a second at most
_QUOTA = 1000  # microseconds of a period below one core, the least that the kernel allows, so that periods are short
_PERIOD = 10_000  # microseconds, from one core on
_ENDING = 10.0  # seconds that processes may take to end once they have been killed


class Group:
    """The control group of one host. It is made when a limit is set, and holds all processes that were added and their children.

    Args:
        name: Name of the group, unique on this machine.
    """

    def __init__(self, name):
        self._name = name

    def limit(self, cores):
        """Give all processes of the group together this much processor time. None: no limit. Raises Failure."""
        folder, unified = _mount()
        folder = os.path.join(folder, self._name)
        try:
            os.makedirs(folder, exist_ok=True)
            period = _PERIOD if cores is None or cores >= 1 else round(_QUOTA / cores)
            quota = None if cores is None else max(_QUOTA, round(period * cores))
            if unified:
                _write(folder, "cpu.max", f"{'max' if quota is None else quota} {period}")
                return
            _write(folder, "cpu.cfs_quota_us", -1)  # the old one might not fit the new period
            _write(folder, "cpu.cfs_period_us", period)
            _write(folder, "cpu.cfs_quota_us", -1 if quota is None else quota)
        except OSError as error:
            raise Failure(f"this machine can't limit processor time: {error}", CANNOT) from None

    def add(self, pids):
        """Add processes, if a limit has been set. Those that have ended are left out."""
        folder = self._made()
        for pid in pids if folder else ():
            try:
                _write(folder, "cgroup.procs", pid)
            except ProcessLookupError:
                pass

    def remove(self):
        """Remove the group, if there is one, as soon as its processes have ended. Raises Failure if they do not."""
        end = time.monotonic() + _ENDING
        while folder := self._made():
            try:
                os.rmdir(folder)
            except OSError as error:
                if error.errno != errno.EBUSY or time.monotonic() > end:
                    raise Failure(f"{folder} cannot be removed: {error.strerror}") from None
                time.sleep(0.05)

    def _made(self):
        found = _find()
        folder = os.path.join(found[0], self._name) if found else ""
        return folder if os.path.isdir(folder) else None


def _find():
    """Where groups with the controller of processor time are, and whether all controllers share them; None if nowhere."""
    with open("/proc/mounts") as file:
        mounts = [line.split()[1:4] for line in file]
    for path, kind, options in mounts:
        if kind == "cgroup" and "cpu" in options.split(","):
            return path, False
    for path, kind, _ in mounts:
        if kind == "cgroup2" and "cpu" in _read(path, "cgroup.controllers").split():
            return path, True
    return None


def _mount():
    found = _find()
    if found is None:
        raise Failure("this machine can't limit processor time: there are no control groups with the controller cpu", CANNOT)
    path, unified = found
    if unified and "cpu" not in _read(path, "cgroup.subtree_control").split():
        try:
            _write(path, "cgroup.subtree_control", "+cpu")
        except OSError as error:
            raise Failure(
                f"this machine can't limit processor time: {path}/cgroup.subtree_control: {error}", CANNOT
            ) from None
    return found


def parse(text):
    """Read a number of cores, or "none". Raises ValueError, which says what is allowed."""
    if text == "none":
        return None
    if not re.fullmatch(r"\d+(\.\d+)?", text) or not LEAST <= float(text) <= 1000:
        raise ValueError(f"{text!r} is not a number of cores from {LEAST:g} to 1000, or none")
    return float(text)


def _read(*path):
    with open(os.path.join(*path)) as file:
        return file.read()


def _write(folder, name, value):
    with open(os.path.join(folder, name), "w") as file:
        file.write(str(value))
