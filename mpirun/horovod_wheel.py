"""Build Horovod from its release and keep the wheels, so that the next environment has it in seconds.

There is a wheel for each framework, because Horovod compiles everything for each of them anyway. `get` returns the
one that fits a description of the environment: from the cache, or newly built. `merge` makes one wheel of several. The
cache lies outside the checkout ($GRACE_EXT_BUILD_CACHE, or grace_ext/horovod in the user's cache folder) and
has one folder for each description. A lock file lets one build run at a time, and a finished wheel arrives by
a rename, so a reader sees a whole wheel or none. Standard library only.
"""

import base64
import contextlib
import dataclasses
import fcntl
import glob
import hashlib
import json
import os
import re
import tarfile
import tempfile
import zipfile

from progress import fail

VERSION = "0.28.1"
ARCHIVE = f"horovod-{VERSION}.tar.gz"
ARCHIVE_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
PATCH = os.path.join(os.path.dirname(os.path.abspath(__file__)), f"horovod-{VERSION}.patch")
FRAMEWORKS_FILE = "horovod/metadata.json"
# What Horovod itself imports, and what its setup.py wants to find at build time.
REQUIREMENTS = ["cffi", "cloudpickle", "packaging", "psutil", "pyyaml"]
FRAMEWORK_OPTIONS = {"torch": "PYTORCH", "tensorflow": "TENSORFLOW"}
# Settings of the user's that change what is built; they go before ours.
USER_SETTINGS = re.compile(r"HOROVOD_(WITH|GPU|CUDA|NCCL|CPU|BUILD|ALLOW|ROCM|DEBUG)|CCL_|CUDA_HOME$")


def cache_folder():
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = os.environ.get("GRACE_EXT_BUILD_CACHE") or os.path.join(cache, "grace_ext", "horovod")
    return os.path.abspath(folder)


@dataclasses.dataclass
class Build:
    """A wheel that is wanted. settings: Horovod's build options; note: what to say when it has to be built."""

    description: dict
    settings: dict
    log: str
    note: str

    @property
    def digest(self):
        return hashlib.sha256(json.dumps(self.description, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def folder(self):
        return os.path.join(cache_folder(), f"horovod-{VERSION}-{self.digest}")


def build_settings(framework, rpath, gpu_settings):
    """Return Horovod's build options for one framework, as environment variables."""
    settings = {
        "HOROVOD_WITH_MPI": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_RPATH": rpath,  # read by our patch: where the built libraries look for libmpi
        # Gloo asks for CMake 2.8, which CMake 4 refuses unless told otherwise.
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        "LDFLAGS": "-Wl,--strip-debug",  # what the C++ library brings along of it
    }
    settings.update(gpu_settings)
    settings.update({name: value for name, value in os.environ.items() if USER_SETTINGS.match(name)})
    if any(name.startswith("HOROVOD_GPU") for name in settings):
        settings.pop("HOROVOD_WITHOUT_CUDA", None)
    for name, option in FRAMEWORK_OPTIONS.items():
        settings.pop(f"HOROVOD_WITH_{option}", None)
        settings.pop(f"HOROVOD_WITHOUT_{option}", None)
        settings[f"HOROVOD_WITH{'' if name == framework else 'OUT'}_{option}"] = "1"
    return settings


def describe(environment, settings):
    """Collect everything that the wheel depends on; `environment` names Python, the framework, MPI and CUDA."""
    with open(PATCH, "rb") as patch:
        patch_sha256 = hashlib.sha256(patch.read()).hexdigest()
    # The folders of a CUDA build differ from checkout to checkout; what is in them is named by the versions.
    folders = {"HOROVOD_NCCL_INCLUDE", "HOROVOD_NCCL_LIB"}
    options = {name: value for name, value in settings.items() if name not in folders}
    release = {"horovod": VERSION, "archive": ARCHIVE_SHA256, "patch": patch_sha256}
    return {**release, **environment, "options": options, "cpu": _cpu_flags()}


def get(build, python, path, progress):
    """Return the path of the wheel for a Build; `path` is the PATH under which mpicxx is the right one."""
    os.makedirs(cache_folder(), exist_ok=True)
    with _lock(os.path.join(cache_folder(), "lock"), progress):
        if not _wheel_in(build.folder):
            progress.say(build.note)
            _build(build, python, path, progress)
        else:
            progress.say(f"using the wheel built before, in {build.folder}")
    return _wheel_in(build.folder)


def merge(wheels, folder):
    """Write one wheel with the files of several into a folder and return its path.

    They differ in their compiled libraries and in metadata.json, which names the frameworks; of what else differs, the
    first counts.
    """
    files, frameworks = {}, {}
    for wheel in reversed(wheels):
        with zipfile.ZipFile(wheel) as archive:
            files.update({entry.filename: (entry, archive.read(entry)) for entry in archive.infolist()})
        frameworks.update(json.loads(files[FRAMEWORKS_FILE][1]))
    files[FRAMEWORKS_FILE] = files[FRAMEWORKS_FILE][0], json.dumps(frameworks).encode()
    record = next(name for name in files if name.endswith(".dist-info/RECORD"))
    entry, _ = files.pop(record)
    lines = [f"{name},sha256={_record_digest(content)},{len(content)}\n" for name, (_, content) in files.items()]
    files[record] = entry, "".join([*lines, f"{record},,\n"]).encode()
    merged = os.path.join(folder, os.path.basename(wheels[0]))
    with zipfile.ZipFile(merged, "w") as archive:
        for entry, content in files.values():
            archive.writestr(entry, content)
    return merged


def _record_digest(content):
    """Return a SHA-256 as a wheel's RECORD has it."""
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def _wheel_in(folder):
    return next(iter(glob.glob(os.path.join(glob.escape(folder), "*.whl"))), None)


@contextlib.contextmanager
def _lock(path, progress):
    with open(path, "w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.say("waiting for another set-up that is building Horovod ...")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _build(build, python, path, progress):
    with tempfile.TemporaryDirectory(prefix="building-", dir=cache_folder()) as work:
        source = _unpack(_archive(python, progress), work)
        with open(PATCH) as patch:
            apply_patch(patch.read(), source)
        env = dict(os.environ, **build.settings, PATH=path, TMPDIR=work)
        # Not the outer make's flags, whose job server is not ours.
        env["MAKEFLAGS"] = f"-j{len(os.sched_getaffinity(0))}"
        done = os.path.join(work, "done")
        pip_wheel = [python, "-m", "pip", "wheel", "-v", "--no-build-isolation", "--no-deps"]
        progress.run([*pip_wheel, "-w", done, source], build.log, env=env)
        with open(os.path.join(done, "description.json"), "w") as out:
            json.dump(build.description, out, indent=2, sort_keys=True)
        os.rename(done, build.folder)


def _archive(python, progress):
    """Return the release's source archive, which is kept in the cache and checked every time."""
    kept = os.path.join(cache_folder(), ARCHIVE)
    if not os.path.exists(kept):
        with tempfile.TemporaryDirectory(dir=cache_folder()) as work:
            pip_download = [python, "-m", "pip", "download", "--no-build-isolation", "--no-deps"]
            wanted = ["--no-binary", "horovod", f"horovod=={VERSION}"]
            progress.run([*pip_download, "-d", work, *wanted], "horovod-download.log")
            os.replace(os.path.join(work, ARCHIVE), kept)
    with open(kept, "rb") as archive:
        found = hashlib.sha256(archive.read()).hexdigest()
    if found != ARCHIVE_SHA256:
        fail(f"{kept} has the SHA-256 {found}, not {ARCHIVE_SHA256}. Delete it and try again")
    return kept


def _unpack(archive, work):
    with tarfile.open(archive) as tar:
        if hasattr(tarfile, "data_filter"):
            tar.extractall(work, filter="data")
        else:
            tar.extractall(work)
    return os.path.join(work, ARCHIVE.removesuffix(".tar.gz"))


def apply_patch(patch, root):
    """Apply a unified diff exactly: every line of context is where the diff says, or the set-up ends.

    (So neither patch nor git has to be there; git apply skips files silently inside another repository.)
    """
    for part in re.split(r"^--- ", patch, flags=re.MULTILINE)[1:]:
        header, *hunks = re.split(r"^(?=@@ )", part, flags=re.MULTILINE)
        name = header.splitlines()[1].split()[1].removeprefix("b/")
        with open(os.path.join(root, name)) as file:
            old = file.read().splitlines(keepends=True)
        new, position = [], 0
        for hunk in hunks:
            title, *lines = hunk.splitlines(keepends=True)
            start = int(re.match(r"@@ -(\d+)", title).group(1)) - 1
            before = [line[1:] for line in lines if line[0] in " -"]
            if start < position or old[start : start + len(before)] != before:
                fail(f"{os.path.basename(PATCH)} does not fit {name} at line {start + 1}")
            new += old[position:start] + [line[1:] for line in lines if line[0] in " +"]
            position = start + len(before)
        with open(os.path.join(root, name), "w") as file:
            file.writelines(new + old[position:])


def _cpu_flags():
    """Return which of the three extensions that Horovod is compiled for this processor has."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as cpuinfo:
        flags = set(cpuinfo.read().split())
        return [flag for flag in ("f16c", "avx", "fma") if flag in flags]
    return []
