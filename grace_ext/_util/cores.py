"""How many cores there are for this process, and for all of its host."""

import math
import os
from pathlib import Path, PurePosixPath

_ROOT = Path("/sys/fs/cgroup")


def available_cores() -> float:
    """Return how many cores this process may keep busy.

    Returns:
        The number of cores that it is bound to, or `host_cores` where that is less.
    """
    return min(float(len(os.sched_getaffinity(0))), host_cores())


def host_cores() -> float:
    """Return how many cores the processes of this host, or of this container, may keep busy together.

    Launchers bind each rank to a core of its own, so what this process is bound to says nothing about the others.

    Returns:
        The number of cores, or less where a control group, such as a container's, has a quota of time.
    """
    try:
        groups = Path("/proc/self/cgroup").read_text(encoding="utf-8")
    except OSError:  # a kernel without control groups
        groups = ""
    return min(float(os.cpu_count() or 1), quota(groups, _ROOT))


def quota(groups: str, root: Path) -> float:
    """Return the cores for which control groups, of version 1 or 2, give time.

    Args:
        groups: What /proc/self/cgroup says.
        root: Where control groups are mounted. A container sees its own group there, whatever its name is outside.

    Returns:
        The smallest quota of all groups on the way to the root, in cores; inf without any.
    """
    found = math.inf
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        folder = root / "cpu" if "cpu" in controllers.split(",") else root if not controllers else None
        if folder is None or ".." in PurePosixPath(path).parts:
            continue
        group = PurePosixPath(path.lstrip("/"))
        for place in (group, *group.parents):
            found = min(found, _quota_of(folder / place))
    return found


def _quota_of(folder: Path) -> float:
    """The quota of one group; inf if it has none, or none that can be read."""
    try:
        if (folder / "cpu.max").exists():
            allowed, period = (folder / "cpu.max").read_text(encoding="ascii").split()
        else:
            allowed, period = ((folder / f"cpu.cfs_{what}_us").read_text(encoding="ascii") for what in ("quota", "period"))
        return int(allowed) / int(period) if allowed != "max" and int(allowed) > 0 else math.inf
    except (OSError, ValueError):
        return math.inf
