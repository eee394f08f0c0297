"""The cache of compiled kernels: where it lies, who compiles, and what happens where nothing can be written."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numba.core import config as numba_config

from grace_ext import kernels
from grace_ext.kernels._compile import ALL_KERNELS

pytestmark = pytest.mark.tier("test")

ROOT = Path(__file__).parents[2]
# A child says that it is ready and waits for an answer, or for the end of its stdin, before it writes its results: who reads
# the first line must not take them in with it.
# This one reports the folder alone.
FOLDER = """
import sys
print("ready", flush=True)
sys.stdin.readline()
from grace_ext.kernels import cache_folder
print(0, 0, cache_folder())
"""
# This one loads some kernels that compile fast, uses one, and reports what Numba found in the cache and what it did not.
USE = """
import sys, numpy as np
from grace_ext.kernels import _compile, pack_bits, bitmap_encode, write_error
print("ready", flush=True)
sys.stdin.readline()
used = [pack_bits, bitmap_encode, write_error]
for kernel in used:
    kernel.load()
out = np.zeros(3, np.uint8)
pack_bits(np.array([1, 2, 3], np.uint32), 8, out)
assert out.tolist() == [1, 2, 3]
stats = [kernel._compiled.stats for kernel in used]
count = lambda which: sum(sum(getattr(s, which).values()) for s in stats)
print(count("cache_hits"), count("cache_misses"), _compile.cache_folder())
"""
LOAD = "for kernel in used:\n    kernel.load()\n"
WARM_UP = USE.replace(
    LOAD,
    """
_compile.ALL_KERNELS[:] = used
seen = []
assert _compile.warmup(lambda *progress: seen.append(progress), jobs=2) == 3
assert [progress[:2] for progress in seen] == [(1, 3), (2, 3), (3, 3)]
assert {progress[2] for progress in seen} == {kernel.__name__ for kernel in used}
""",
)
# One kernel's lock is held, and another kernel is loaded meanwhile.
APART = USE.replace(
    LOAD,
    """
import threading
with _compile._host_lock(pack_bits.name):
    waiting = threading.Thread(target=pack_bits.load)
    waiting.start()
    bitmap_encode.load()
    write_error.load()
    waiting.join(0.5)
    assert waiting.is_alive()
waiting.join()
""",
)
NO_TEMPORARY_FOLDER = "import tempfile; tempfile._candidate_tempdir_list = lambda: ['/proc/not/there']\n"


class Child:
    """A process with its own home and temporary folder and nothing else in its surroundings."""

    def __init__(self, place, code=USE, **changes):
        for folder in ("home", "tmp"):
            (place / folder).mkdir(exist_ok=True)
        env = {key: value for key, value in os.environ.items() if not key.startswith(("GRACE_EXT_", "XDG_", "NUMBA_"))}
        env |= {"HOME": str(place / "home"), "TMPDIR": str(place / "tmp"), **{k: str(v) for k, v in changes.items()}}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=env,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self.process.stdout.readline() == "ready\n", self.process.communicate()[1]

    def go(self):
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def result(self):
        """(kernels found in the cache, kernels compiled, the cache folder, stderr)."""
        out, error = self.process.communicate(timeout=300)
        assert self.process.returncode == 0, error
        hits, misses, folder = out.split(maxsplit=2)
        return int(hits), int(misses), folder.strip(), error


def run(place, code=USE, **changes):
    return Child(place, code, **changes).result()


def compiled_below(place):
    return sorted(path.name.split("-")[0] for path in place.rglob("*.nbc"))


def announcement(error):
    return [line for line in error.splitlines() if line.startswith("grace_ext: compiling kernels")]


THREE = ["bits.bitmap_encode", "bits.pack_bits", "accumulate.write_error"]


def test_the_cache_is_filled_once_and_then_used(tmp_path):
    hits, misses, folder, error = run(tmp_path)
    assert (hits, misses) == (0, 3)
    assert Path(folder).parent == tmp_path / "home/.cache/grace_ext"
    assert compiled_below(tmp_path) == compiled_below(Path(folder)) == sorted(THREE)
    assert len(announcement(error)) == 1 and f"kept in {folder}" in error
    assert os.stat(folder).st_mode & 0o077 == 0

    hits, misses, again, error = run(tmp_path)
    assert (hits, misses, again) == (3, 0, folder)
    assert not announcement(error)

    for path in tmp_path.rglob("*.nbc"):  # a cache that lost its code, as after a full disk
        path.unlink()
    assert run(tmp_path)[:2] == (0, 3)


def test_the_cache_goes_where_it_is_told(tmp_path):
    folder = run(tmp_path, GRACE_EXT_CACHE=tmp_path / "there")[2]
    assert Path(folder).parent == tmp_path / "there"
    assert compiled_below(tmp_path) == compiled_below(tmp_path / "there") == sorted(THREE)
    folder = run(tmp_path, XDG_CACHE_HOME=tmp_path / "xdg")[2]
    assert Path(folder).parent == tmp_path / "xdg/grace_ext"


def test_an_unwritable_home_falls_back_to_the_temporary_folder(tmp_path):
    (tmp_path / "file").touch()  # even root cannot make a folder below a file
    hits, misses, folder, _ = run(tmp_path, HOME=tmp_path / "file/home")
    assert misses == 3 and Path(folder).parent == tmp_path / f"tmp/grace_ext-{os.getuid()}"
    assert run(tmp_path, HOME=tmp_path / "file/home")[:2] == (3, 0)


@pytest.mark.parametrize("code", [USE, NO_TEMPORARY_FOLDER + USE], ids=["no cache", "no temporary folder either"])
def test_nothing_writable_still_works(tmp_path, code):
    (tmp_path / "file").touch()
    _, _, folder, error = run(tmp_path, code, HOME=tmp_path / "file/home", GRACE_EXT_CACHE=tmp_path / "file/cache")
    assert folder == "None" and "not kept: no writable cache folder, set GRACE_EXT_CACHE to one" in error
    assert compiled_below(tmp_path) == []


def test_no_temporary_folder_and_an_unwritable_home(tmp_path):
    (tmp_path / "file").touch()
    assert run(tmp_path, NO_TEMPORARY_FOLDER + USE, HOME=tmp_path / "file/home")[2] == "None"


def test_processes_that_start_together_compile_once_in_all(tmp_path):
    children = [Child(tmp_path) for _ in range(4)]
    for child in children:
        child.go()
    results = [child.result() for child in children]
    assert sum(misses for _, misses, _, _ in results) == 3, "a kernel was compiled twice"
    assert sum(hits for hits, _, _, _ in results) == 9
    assert len({folder for _, _, folder, _ in results}) == 1
    assert 1 <= sum(len(announcement(error)) for *_, error in results) <= 3


def test_a_kernel_waits_for_nobody_who_compiles_another(tmp_path):
    assert run(tmp_path, APART)[:2] == (0, 3)
    assert compiled_below(tmp_path) == sorted(THREE)


def test_the_warm_up_compiles_in_several_processes(tmp_path):
    hits, misses, folder, error = run(tmp_path, WARM_UP)
    assert (hits, misses) == (3, 0), "this process loads what the others have compiled"
    assert compiled_below(tmp_path) == compiled_below(Path(folder)) == sorted(THREE)
    assert not announcement(error)
    assert run(tmp_path, WARM_UP)[:2] == run(tmp_path)[:2] == (3, 0)


def test_the_warm_up_without_a_cache_compiles_here(tmp_path):
    (tmp_path / "file").touch()
    folder, error = run(tmp_path, WARM_UP, HOME=tmp_path / "file/home", GRACE_EXT_CACHE=tmp_path / "file/cache")[2:]
    assert folder == "None" and len(announcement(error)) == 1


def test_another_cpu_has_another_folder(tmp_path):
    folders = {
        run(tmp_path, FOLDER, **cpu)[2] for cpu in ({}, {"NUMBA_CPU_NAME": "generic"}, {"NUMBA_CPU_FEATURES": "+sse2"})
    }
    assert len(folders) == 3


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
@pytest.mark.parametrize("stranger", ["base", "folder"])
def test_a_strangers_folder_is_not_used(tmp_path, stranger):
    """Who owns a folder can put any code in it."""
    (tmp_path / "file").touch()
    folder = Path(run(tmp_path, FOLDER, HOME=tmp_path / "file/home")[2])
    os.chown({"base": folder.parent, "folder": folder}[stranger], 12345, 12345)
    assert run(tmp_path, FOLDER, HOME=tmp_path / "file/home")[2] == "None"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_strangers_folder_of_locks_is_not_used(tmp_path):
    locks = tmp_path / f"tmp/grace_ext-{os.getuid()}.locks"
    locks.mkdir(parents=True)
    os.chown(locks, 12345, 12345)
    assert run(tmp_path)[:2] == (0, 3)
    assert not list(locks.iterdir())


# In this process


def test_each_kernel_is_compiled_for_one_signature():
    seen = []
    before = numba_config.CACHE_DIR
    assert kernels.warmup(lambda *progress: seen.append(progress)) == len(ALL_KERNELS) > 10
    assert numba_config.CACHE_DIR == before, "the user's own functions would be cached with ours"
    assert seen == [(i, len(ALL_KERNELS), kernel.__name__) for i, kernel in enumerate(ALL_KERNELS, 1)]
    for kernel in ALL_KERNELS:
        assert len(kernel._compiled.signatures) == 1, kernel.__name__
    assert len({kernel.name for kernel in ALL_KERNELS}) == len(ALL_KERNELS), "two kernels with one lock"


def test_a_kernel_is_never_compiled_for_other_types():
    for numbers in (np.zeros(3, np.float64), np.zeros((3, 1), np.uint32), np.zeros(6, np.uint32)[::2]):
        with pytest.raises(TypeError):
            kernels.pack_bits(numbers, 8, np.zeros(3, np.uint8))
    assert len(kernels.pack_bits._compiled.signatures) == 1


def test_every_kernel_is_registered_for_the_warm_up():
    """Also those that only one module uses: `import grace_ext.kernels` loads every file of the folder."""
    public = {name for name in kernels.__all__ if name not in ("NON_FINITE", "cache_folder", "warmup")}
    assert public <= {kernel.__name__ for kernel in ALL_KERNELS}
    code = "import sys, grace_ext.kernels; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    files = {path.stem for path in Path(kernels.__file__).parent.glob("[!_]*.py")}
    assert {f"grace_ext.kernels.{name}" for name in files} <= set(loaded)


def test_kernels_share_only_what_the_name_of_the_cache_folder_contains():
    """Numba watches the file of a kernel alone. What it takes from a kernel of another file could be out of date."""
    folder = Path(kernels.__file__).parent
    sources = {path.stem: ast.parse(path.read_text(encoding="utf-8")) for path in folder.glob("*.py")}
    wrong = [
        f"{name} imports from {module}"
        for name, tree in sources.items()
        if name != "__init__"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level
        for module in ([node.module] if node.module else [alias.name for alias in node.names])
        if not module.startswith("_") or node.level > 1
    ]
    assert len(sources) > 20 and not wrong
