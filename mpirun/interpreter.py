"""Find the Python interpreter that the environment is made from, and what it has. Standard library only."""

import json
import os
import shutil
import subprocess

from progress import fail

SUPPORTED = ((3, 11), (3, 13))
TESTED_MOST = [3, 11]
CANDIDATES = ("python3", "python3.11", "python3.12", "python3.13")

_DESCRIBE = """
import importlib.util, json, os, sys, sysconfig
has = lambda name: importlib.util.find_spec(name) is not None
paths = sysconfig.get_paths()
print(json.dumps({
    "executable": sys.executable,
    "base": getattr(sys, "_base_executable", sys.executable),
    "prefix": sys.prefix,
    "version": list(sys.version_info[:3]),
    "is_venv": sys.prefix != sys.base_prefix,
    "site_packages": sorted({paths["purelib"], paths["platlib"]}),
    "can_compile": os.path.exists(paths["include"] + "/Python.h"),
    "can_make_venv": has("venv") and has("ensurepip"),
    "has": {name: has(name) for name in ("torch", "tensorflow", "horovod", "mpi4py")},
}))
"""


def choose(wanted, venv):
    """Find the interpreter: the one the user wants; else python3 if it has Horovod; else Python 3.11; else any."""
    if wanted:
        python = _describe(wanted, venv) or fail(f"PYTHON={wanted} does not run")
        if not _is_supported(python):
            fail(f"PYTHON={wanted} is Python {dotted(python['version'])}; {_range()} are supported")
        return python
    found = [python for python in (_describe(name, venv) for name in CANDIDATES) if python and _is_supported(python)]
    if not found:
        fail(f"no Python {_range()} found. Run: apt-get install python3.11 python3.11-venv python3.11-dev")
    if found[0]["has"]["horovod"]:
        return found[0]
    return next((python for python in found if python["version"][:2] == TESTED_MOST), found[0])


def check(python, builds):
    """End the set-up if the interpreter lacks what the set-up needs of it."""
    name = f"python{dotted(python['version'][:2])}"
    if not python["can_make_venv"]:
        fail(f"{python['executable']} can't make virtual environments. Run: apt-get install {name}-venv")
    if builds and not python["can_compile"]:
        fail(f"{python['executable']} has no header files. Run: apt-get install {name}-dev")


def check_horovod(python):
    """End the set-up if the interpreter's Horovod doesn't import: it is the user's, not ours to replace."""
    command = [python["executable"], "-c", "import horovod.torch"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=os.sep)
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or ["no message"])[-1]
        fail(
            f"{python['executable']} has Horovod, but 'import horovod.torch' fails ({reason}). Mend it, or "
            "set ISOLATED=1 to leave that interpreter's packages aside and build Horovod here"
        )


def _range():
    return " to ".join(map(dotted, SUPPORTED))


def dotted(version):
    return ".".join(map(str, version))


def _is_supported(python):
    low, high = SUPPORTED
    return low <= tuple(python["version"][:2]) <= high


def _describe(command, venv):
    """Describe an interpreter; return None if it doesn't run. For `venv` itself, describe the one it was made from."""
    found = shutil.which(command)
    result = found and subprocess.run([found, "-c", _DESCRIBE], capture_output=True, text=True, cwd=os.sep)
    if not result or result.returncode:
        return None
    python = json.loads(result.stdout)
    if os.path.realpath(python["prefix"]) == os.path.realpath(venv):
        return _describe(python["base"], venv)
    return python
