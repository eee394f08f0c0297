#!/usr/bin/env python3
"""Make the environment of this checkout: .venv with PyTorch, TensorFlow, MPI, Horovod and grace_ext itself.

Run by the Makefile; see mpirun/README.md. It is repeatable: what is there is kept, and when nothing changed
since the last run it ends at once. It needs nothing but Python's standard library.
"""

import argparse
import contextlib
import fcntl
import glob
import hashlib
import itertools
import json
import os
import shutil
import subprocess
import time

import gpu
import horovod_wheel
import interpreter
import mpi as mpi_choice
from progress import Progress, fail

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
HERE = os.path.join(ROOT, "mpirun")
VENV = os.path.join(ROOT, ".venv")
BIN = os.path.join(VENV, "bin")
PYTHON = os.path.join(BIN, "python")
STAMP = os.path.join(VENV, "grace_ext-setup.json")
INHERITED_PATH = os.path.join(VENV, "inherited-path")  # read by env.sh
FRAMEWORK_PACKAGES = {"torch": "torch", "tensorflow": "tensorflow-cpu"}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default="", help="the interpreter; its Horovod is used as it is")
    parser.add_argument("--frameworks", default="torch tensorflow", help="what Horovod is built for")
    parser.add_argument("--mpi", default="auto", choices=("auto", "system", "wheel"))
    parser.add_argument("--isolated", default="", help="1: leave the packages of the interpreter aside")
    arguments = parser.parse_args()
    arguments.frameworks = arguments.frameworks.replace(",", " ").split()
    if not arguments.frameworks or not set(arguments.frameworks) <= set(FRAMEWORK_PACKAGES):
        parser.error(f"--frameworks takes some of: {' '.join(FRAMEWORK_PACKAGES)}")
    return arguments


def main():
    arguments = parse_arguments()
    with _lock_of_checkout():
        started = time.monotonic()
        python = interpreter.choose(arguments.python, VENV)
        stamp = {"environment": _digest_of_environment(arguments, python), "kernels": _digest_of_kernels()}
        done = _read_stamp()
        if done == stamp:
            print("[setup] .venv is up to date", flush=True)
            return
        if done.get("environment") == stamp["environment"]:
            compile_kernels(Progress(1, _logs()))
        else:
            set_up(arguments, python)
        with open(STAMP, "w") as out:
            json.dump(stamp, out)
        print(f"[setup] done in {time.monotonic() - started:.0f} s", flush=True)


def set_up(arguments, python):
    has = dict.fromkeys(python["has"], False) if arguments.isolated else python["has"]
    inherits = has["horovod"] or has["torch"]
    progress = Progress(7, _logs())

    version = interpreter.dotted(python["version"])
    progress.step(f"checking this machine: Python {version} ({python['executable']})")
    interpreter.check(python, builds=not has["horovod"])
    if has["horovod"]:
        interpreter.check_horovod(python)
        progress.say("its Horovod is used as it is (ISOLATED=1 would build one)")
    else:
        check_build_tools()

    progress.step("making the virtual environment .venv")
    make_venv(python, inherits, progress)
    if inherits:
        inherit_from(python)

    wanted = [] if has["horovod"] else [name for name in arguments.frameworks if not has[name]]
    progress.step(f"installing Python packages: {', '.join([*wanted, 'numpy', 'numba', 'pytest'])}, ...")
    install_packages(wanted, progress)

    progress.step("looking for MPI")
    if has["horovod"]:
        mpi = mpi_choice.Mpi("beside the Horovod of the interpreter", _path())
    else:
        mpi = mpi_choice.choose(arguments.mpi, VENV, pip_attempt(progress), _path(), progress)
        if mpi.kind == mpi_choice.FROM_SYSTEM and mpi.rpath:
            tell_mpi4py(mpi.rpath)
    progress.say(f"{mpi.name or 'no mpirun'}, {mpi.kind}")
    if mpi.name and not has["mpi4py"]:
        progress.run(pip("install", "mpi4py"), "mpi4py.log")

    progress.step("installing Horovod")
    if not has["horovod"]:
        install_horovod(arguments.frameworks, mpi, progress)

    progress.step("checking that workers find each other")
    if has["horovod"]:
        check_workers(["torch"], progress, is_ours=False)
    else:
        check_workers(arguments.frameworks, progress, is_ours=True)

    compile_kernels(progress)


def check_build_tools():
    """What a build of Horovod needs and pip can't bring."""
    missing = [package for tool, package in (("cmake", "cmake"), ("c++", "g++")) if not shutil.which(tool)]
    if missing:
        fail(f"building Horovod needs {' and '.join(missing)}. Run: apt-get install {' '.join(missing)}")


def make_venv(python, inherits, progress):
    """Make .venv, or keep it if it was made from the same interpreter in the same way."""
    settings = {"home": os.path.dirname(python["base"]), "version": interpreter.dotted(python["version"])}
    settings["include-system-site-packages"] = str(inherits).lower()
    with contextlib.suppress(OSError), open(os.path.join(VENV, "pyvenv.cfg")) as lines:
        found = dict(map(str.strip, line.split("=", 1)) for line in lines if "=" in line)
        if all(found.get(key) == value for key, value in settings.items()) and _succeeds(pip("--version")):
            return
        progress.say("making it anew: the one here was made in another way")
    options = ["--system-site-packages"] if inherits else []
    # The log lies in .venv, which this command clears.
    if not _succeeds([python["base"], "-m", "venv", "--clear", *options, VENV]):
        fail(f"this fails: {python['base']} -m venv {VENV}")


def inherit_from(python):
    """Let .venv find an interpreter's programs, and its packages if it is in a virtual environment itself."""
    if python["is_venv"]:
        write_pth(
            "inherited", *(f"import site; site.addsitedir({site!r})" for site in python["site_packages"])
        )
    lib = os.path.join(python["prefix"], "lib")
    if glob.glob(f"{glob.escape(lib)}/libmpi.so*"):
        tell_mpi4py(lib)
    with open(INHERITED_PATH, "w") as out:
        out.write(os.path.join(python["prefix"], "bin") + "\n")


def tell_mpi4py(folders):
    """Where mpi4py finds libmpi; by itself it looks in .venv and where the system looks."""
    write_pth("mpi4py", f"import os; os.environ.setdefault('MPI4PY_LIBMPI', {folders!r})")


def write_pth(name, *lines):
    """Lines that Python carries out when it starts in .venv."""
    with open(os.path.join(mpi_choice.site_packages(VENV), f"grace_ext_{name}.pth"), "w") as out:
        out.writelines(line + "\n" for line in lines)


def pip(command, *arguments):
    if command == "install":
        arguments = ("--disable-pip-version-check", "-c", os.path.join(HERE, "constraints.txt"), *arguments)
    return [PYTHON, "-m", "pip", command, *arguments]


def pip_attempt(progress):
    """A function that installs a package and gives back pip's exit status."""
    return lambda package, log: progress.attempt(pip("install", package), log)


def install_packages(frameworks, progress):
    """grace_ext as an editable package, what its examples and tests need, and what Horovod needs."""
    progress.run(pip("install", "setuptools", "wheel"), "setuptools.log")
    packages = [FRAMEWORK_PACKAGES[name] for name in frameworks] + horovod_wheel.REQUIREMENTS
    command = pip("install", "--no-build-isolation", "-e", f"{ROOT}[plots,dev]", *packages)
    progress.run(command, "packages.log", hint="If TensorFlow is what failed, use FRAMEWORKS=torch.")
    if "tensorflow" in frameworks:
        # Legacy Keras asks for the package `tensorflow`, which would come on top of tensorflow-cpu.
        progress.run(pip("install", "--no-deps", "tf_keras"), "tf_keras.log")


def install_horovod(frameworks, mpi, progress):
    """Build the wheel that fits, or take it from the cache, and install it unless it is installed."""
    environment = {"python": ask("import sysconfig; print(sysconfig.get_config_var('SOABI'))")}
    environment.update(mpi=f"{mpi.kind} {mpi.name}", cuda="")
    for name in frameworks:
        # TensorFlow comes as a package of one of several names.
        environment[name] = ask(
            "from importlib.metadata import packages_distributions as packages, version; "
            f"print(version(packages()[{name!r}][0]))"
        )
    if "torch" in frameworks:
        environment["cuda"] = ask("import torch; print(torch.version.cuda or '')")
    links = os.path.join(VENV, "nccl")
    gpu_settings, remark = gpu.build_settings(environment["cuda"], mpi_choice.site_packages(VENV), links)
    settings = horovod_wheel.build_settings(frameworks, mpi.rpath, gpu_settings)
    description = horovod_wheel.describe(environment, settings)

    installed = os.path.join(VENV, "horovod-wheel")
    with contextlib.suppress(OSError), open(installed) as key:
        if key.read() == horovod_wheel.digest(description):
            return progress.say("it is installed")
    names = ", ".join([*(f"{name} {environment[name]}" for name in frameworks), mpi.name])
    note = f"building Horovod {horovod_wheel.VERSION} for {names}, {remark} (about 6 minutes on 2 cores) ..."
    wheel = horovod_wheel.get(description, settings, PYTHON, BIN + os.pathsep + mpi.path, progress, note)
    progress.run(pip("install", "--no-deps", "--force-reinstall", wheel), "horovod.log")
    with open(installed, "w") as key:
        key.write(horovod_wheel.digest(description))


def check_workers(frameworks, progress, is_ours):
    """Two workers exchange a few bytes, for each framework and controller; we only warn if it isn't ours."""
    env = dict(os.environ, PATH=_path(with_venv=True), HOROVOD_GLOO_TIMEOUT_SECONDS="120")
    for framework, controller in itertools.product(frameworks, ("mpi", "gloo")):
        program = [PYTHON, os.path.join(HERE, "check_workers.py"), framework]
        command = ["horovodrun", f"--{controller}", "-np", "2", *program]
        log = f"workers-{framework}-{controller}.log"
        if is_ours:
            progress.run(command, log, env=env)
        elif progress.attempt(command, log, env=env):
            progress.say(f"warning: this failed, see .venv/setup-logs/{log}: {' '.join(command)}")


def compile_kernels(progress):
    progress.step("compiling the kernels")
    progress.run([PYTHON, "-m", "grace_ext", "warmup"], "warmup.log", cwd=ROOT)


def ask(code):
    result = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, cwd=os.sep)
    if result.returncode:
        fail(f"this fails in .venv: {code}\n{result.stderr.strip()}")
    return result.stdout.strip()


def _path(with_venv=False):
    """The PATH of env.sh, with or without .venv itself."""
    parts = [part for part in os.environ.get("PATH", os.defpath).split(os.pathsep) if part and part != BIN]
    with contextlib.suppress(OSError), open(INHERITED_PATH) as inherited:
        parts.insert(0, inherited.read().strip())
    return os.pathsep.join([BIN, *parts] if with_venv else parts)


def _succeeds(command):
    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True).returncode == 0
    except OSError:
        return False


def _logs():
    return os.path.join(VENV, "setup-logs")


@contextlib.contextmanager
def _lock_of_checkout():
    """One set-up at a time in this checkout. The lock is on the folder itself, so no lock file is left."""
    folder = os.open(HERE, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _digest_of_environment(arguments, python):
    identity = [os.path.realpath(python["base"]), python["prefix"], python["version"], python["has"]]
    parts = [json.dumps([vars(arguments), identity], sort_keys=True).encode()]
    sources = glob.glob(f"{HERE}/*.py") + glob.glob(f"{HERE}/*.txt") + glob.glob(f"{HERE}/*.patch")
    for path in sorted([*sources, f"{ROOT}/setup.cfg", f"{ROOT}/pyproject.toml"]):
        with open(path, "rb") as file:
            parts.append(hashlib.sha256(file.read()).digest())
    return hashlib.sha256(b"".join(parts)).hexdigest()


def _digest_of_kernels():
    digest = hashlib.sha256()
    for path in sorted(glob.glob(f"{ROOT}/grace_ext/kernels/*.py")):
        with open(path, "rb") as file:
            digest.update(file.read())
    return digest.hexdigest()


def _read_stamp():
    try:
        with open(STAMP) as file:
            return json.load(file)
    except (OSError, ValueError):
        return {}


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        fail("interrupted")
