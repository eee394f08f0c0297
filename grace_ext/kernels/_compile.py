"""Numba compilation: lazy, cached on disk, once for each host.

A kernel is compiled for one explicit signature at its first call, and kept in a cache folder. There is a file lock for each
kernel: of the ranks of one host that want it, one compiles and the others load what it has written. (Numba has an index
file for each function, so processes that compile different kernels at the same time do not conflict.)
"""

import concurrent.futures
import contextlib
import fcntl
import functools
import hashlib
import multiprocessing
import os
import sys
import tempfile
import threading
from pathlib import Path

import numba
from numba.core import config as numba_config
from numba.core.registry import cpu_target

ALL_KERNELS: list["Kernel"] = []


def kernel(signature: str):
    """Decorator: compile the function for `signature` (a Numba signature string), without the GIL, on first use."""
    return lambda function: Kernel(function, signature)


class Kernel:
    """A compiled function. Call it with arrays and scalars that match its signature; it never touches Python."""

    def __init__(self, function, signature: str):
        self.function = function
        self.signature = signature
        self._compiled = None
        functools.update_wrapper(self, function)
        self.name = f"{_module(function)}.{function.__qualname__}"
        ALL_KERNELS.append(self)

    def __call__(self, *args):
        if self._compiled is None:
            self.load()
        return self._compiled(*args)

    def load(self) -> None:
        """Compile the kernel, or load it from the cache when a process of this user has compiled it before."""
        folder = cache_folder()
        with _host_lock(self.name):
            if folder is None or not any(folder.glob(f"*/{self.name}-*.nbi")):
                _announce(self.__name__, folder)
            self._compiled = _jit(self.function, self.signature, folder)


_jit_lock = threading.Lock()  # CACHE_DIR is global to the process, and Numba lets only one thread compile at a time anyway


def _jit(function, signature, folder):
    if folder is None:
        return numba.njit(signature, nogil=True)(function)
    with _jit_lock:
        # Numba reads CACHE_DIR while decorating; it is restored at once for the user's own functions.
        before, numba_config.CACHE_DIR = numba_config.CACHE_DIR, str(folder)
        try:
            return numba.njit(signature, nogil=True, cache=True)(function)
        finally:
            numba_config.CACHE_DIR = before


def _module(function) -> str:
    """Return the last part of the module's name, as in the names of Numba's files."""
    return function.__module__.rsplit(".", 1)[-1]


@functools.lru_cache(maxsize=1)
def cache_folder() -> Path | None:
    """Return the writable folder for compiled kernels, or None if there is none (then every process compiles for itself).

    GRACE_EXT_CACHE names it. The default is the user's cache folder or, where that cannot be written, the temporary folder.
    The name of the subfolder contains everything that the machine code depends on, so hosts of different kinds can share one
    home.
    """
    wanted = os.environ.get("GRACE_EXT_CACHE")
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    for base in [wanted] if wanted else [os.path.join(home, "grace_ext"), _temporary()]:
        if base is None:
            continue
        folder = Path(base) / f"kernels-{_fingerprint()}"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # If another user owns a folder of this name, code from there must not be run.
            if any(place.stat().st_uid != os.getuid() for place in ([folder] if wanted else [folder, folder.parent])):
                continue
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError:
            continue
    return None


def _temporary() -> str | None:
    """Return a path of this user's own in the temporary folder of this host, or None if there is no such folder."""
    try:
        return os.path.join(tempfile.gettempdir(), f"grace_ext-{os.getuid()}")
    except OSError:
        return None


@functools.lru_cache(maxsize=1)
def _fingerprint() -> str:
    digest = hashlib.blake2b(digest_size=8)
    digest.update(repr((sys.version, numba.__version__, cpu_target.target_context.codegen().magic_tuple())).encode())
    # Numba watches only the file that a kernel is in. What kernels of several files have in common is in _*.py.
    for source in sorted(Path(__file__).parent.glob("_*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()


@contextlib.contextmanager
def _host_lock(name: str):
    """Hold the lock of a kernel, which one thread on this host can hold at a time."""
    # There is a lock for each host on purpose: it is in the local temporary folder, never in a shared home.
    try:
        descriptor = os.open(_lock_file(name), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        yield  # there is no place for a lock; compiling twice is a waste, not an error
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _lock_file(name: str) -> Path:
    """Return the path of a kernel's lock, in a folder of this user's own. Raises OSError."""
    path = _temporary()
    if path is None:
        raise OSError("no temporary folder")
    folder = Path(path + ".locks")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.lstat().st_uid != os.getuid():
        raise OSError(f"{folder} is somebody else's")
    return folder / name


_announced = False


def _announce(name: str, folder: Path | None) -> None:
    global _announced
    if not _announced:
        place = f"kept in {folder}" if folder else "not kept: no writable cache folder, set GRACE_EXT_CACHE to one"
        print(f"grace_ext: compiling kernels for this machine, once, some seconds, {place}", file=sys.stderr, flush=True)
        _announced = True


def warmup(progress=None, jobs: int = 1) -> int:
    """Compile every kernel now; returns how many there are. `progress(done, total, name)` is called after each.

    jobs: how many processes compile. They are started anew and import the program's main module, as multiprocessing does.
    With one job, or no folder that they could share, this process compiles.
    """
    kernels = {item.name: item for item in ALL_KERNELS}
    if jobs > 1 and cache_folder() is not None and any(item._compiled is None for item in ALL_KERNELS):
        ready = _compile_elsewhere(list(kernels), jobs)
    else:
        ready = kernels
    for done, name in enumerate(ready, 1):
        if kernels[name]._compiled is None:
            kernels[name].load()
        if progress:
            progress(done, len(kernels), kernels[name].__name__)
    return len(kernels)


def _compile_elsewhere(names: list[str], jobs: int):
    """Have processes fill the cache; yields the name of each kernel that is in it."""
    spawn = multiprocessing.get_context("spawn")  # a process that is forked from one with threads may hang
    with concurrent.futures.ProcessPoolExecutor(jobs, spawn, _be_quiet) as pool:
        tasks = [pool.submit(_compile_one, name) for name in names]
        for task in concurrent.futures.as_completed(tasks):
            yield task.result()


def _be_quiet() -> None:
    """Suppress the message about compiling, in a process of `warmup`, which shows its progress itself."""
    global _announced
    _announced = True


def _compile_one(name: str) -> str:
    from grace_ext import kernels  # noqa: F401, all of them have to be known

    next(item for item in ALL_KERNELS if item.name == name).load()
    return name
