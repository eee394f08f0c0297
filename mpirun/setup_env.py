#!/usr/bin/env python3
"""Make the environment of this checkout, .venv, as far as it is needed: tools, PyTorch and grace_ext, MPI and Horovod, all.

Run by the Makefile; see mpirun/README.md. It is repeatable: what is there is kept, and when nothing changed
since the last run it ends at once. It needs nothing but Python's standard library.
"""

import argparse
import concurrent.futures
import configparser
import contextlib
import fcntl
import glob
import hashlib
import itertools
import json
import os
import shutil
import subprocess
import tempfile

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
TIMES = os.path.join(VENV, "grace_ext-setup-times.json")  # how long the last set-up took
INSTALLED_HOROVOD = os.path.join(VENV, "grace_ext-horovod.json")  # which wheels are installed
INHERITED_PATH = os.path.join(VENV, "inherited-path")  # read by env.sh
FRAMEWORK_PACKAGES = {"torch": "torch", "tensorflow": "tensorflow-cpu"}
# An optimizer imports what is not imported by PyTorch itself, half of the whole.
IMPORTS = {
    "torch": "import grace_ext.adapters.torch_ddp, matplotlib.pyplot, torch, tqdm; torch.optim.SGD([torch.zeros(1)], 0.1)",
    "tensorflow": "import keras, tensorflow, tf_keras",
    "trainers": "import grace_ext.adapters.lightning, grace_ext.adapters.transformers",
    "ray": "import grace_ext.adapters.ray",
    "jax": "import jax.numpy, optax; jax.numpy.ones(3).sum()",
    "flower": "import grace_ext.adapters.flower",
}
# What .venv can be needed for, and the needs that each one satisfies. `lint`: the linter, the type checker and what builds
# distributions. `docs`: what builds the documentation site. `ddp`: PyTorch and grace_ext. `demo`: MPI and Horovod for PyTorch.
# `all`: Horovod for TensorFlow, JAX, Flower, Accelerate, Transformers and Lightning, what the tests need, and the kernels compiled.
# `test-all`: also what only the tests before a release need, Ray and PySpark.
NEEDS = {
    "lint": {"lint"},
    "docs": {"docs"},
    "ddp": {"ddp"},
    "demo": {"ddp", "demo"},
    "all": {"lint", "ddp", "demo", "all"},
    "test-all": {"lint", "ddp", "demo", "all", "test-all"},
}
WHOLE = ("all", "test-all")  # these are for all frameworks
TOOLS = ("lint", "docs")  # these take only the packages of the extra of their name, and not grace_ext itself
STEPS = {"lint": 3, "docs": 3, "ddp": 3, "demo": 6, "all": 7, "test-all": 7}


def parse_arguments(given=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--need", default="all", choices=NEEDS, help="what it is for (default: %(default)s)")
    parser.add_argument("--python", default="", help="the interpreter; its Horovod is used as it is")
    parser.add_argument("--frameworks", default="torch tensorflow", help="what Horovod is built for")
    parser.add_argument("--mpi", default="auto", choices=("auto", "system", "wheel"))
    parser.add_argument("--isolated", default="", help="1: leave the packages of the interpreter aside")
    arguments = parser.parse_args(given)
    arguments.frameworks = arguments.frameworks.replace(",", " ").split()
    if not arguments.frameworks or not set(arguments.frameworks) <= set(FRAMEWORK_PACKAGES):
        parser.error(f"--frameworks takes some of: {' '.join(FRAMEWORK_PACKAGES)}")
    if arguments.need not in TOOLS and not frameworks_for(arguments.need, arguments.frameworks):
        parser.error(f"--need {arguments.need} is for PyTorch: --frameworks must have torch in it")
    return arguments


def frameworks_for(need, frameworks):
    """Return those of the frameworks that a need has to do with."""
    if need in TOOLS:
        return []
    return [name for name in frameworks if need in WHOLE or name == "torch"]


def main():
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # what the set-up imports need not be compiled once more
    arguments = parse_arguments()
    with _lock_of_checkout():
        python = interpreter.choose(arguments.python, VENV)
        wanted = {
            "environment": _digest_of_environment(arguments, python),
            "needs": sorted(NEEDS[arguments.need]),
            "kernels": _digest_of_kernels() if arguments.need in WHOLE else None,
        }
        done = _read(STAMP)
        if satisfies(done, wanted):
            print("[setup] .venv is up to date", flush=True)
            return
        if satisfies({**done, "kernels": wanted["kernels"]}, wanted):
            progress = Progress(1, _logs())
            compile_kernels(progress)
        else:
            progress = set_up(arguments, python)
        _write(STAMP, joined(done, wanted))
        tell_times(arguments.need, progress.seconds())


def satisfies(done, wanted):
    """Return whether what one stamp says is there is all that another one wants."""
    if done.get("environment") != wanted["environment"]:
        return False
    if not set(wanted["needs"]) <= set(done["needs"]):
        return False
    return wanted["kernels"] in (None, done["kernels"])


def joined(done, wanted):
    """Return the stamp of an environment that had what `done` says when what `wanted` says was added."""
    if done.get("environment") != wanted["environment"]:
        return wanted
    needs = sorted({*done["needs"], *wanted["needs"]})
    return {**wanted, "needs": needs, "kernels": wanted["kernels"] or done["kernels"]}


def tell_times(need, steps):
    """Print how long the steps took and write it beside the stamp, for whoever wants to show it later."""
    total = round(sum(steps.values()), 1)
    _write(TIMES, {"need": need, "seconds": total, "steps": steps})
    parts = ", ".join(f"{name} {seconds:.0f}" for name, seconds in steps.items() if seconds >= 0.5)
    print(f"[setup] done in {total:.0f} s ({parts})", flush=True)


def set_up(arguments, python):
    """Make .venv, or let it grow; returns the Progress, which knows how long each step took."""
    has = dict.fromkeys(python["has"], False) if arguments.isolated else python["has"]
    need, frameworks = arguments.need, frameworks_for(arguments.need, arguments.frameworks)
    progress = Progress(STEPS[need], _logs())

    version = interpreter.dotted(python["version"])
    progress.step("machine", f"checking this machine: Python {version} ({python['executable']})")
    has_mpi = need in ("demo", *WHOLE)
    builds = has_mpi and not has["horovod"]
    interpreter.check(python, builds)
    if has["horovod"] and need not in TOOLS:
        interpreter.check_horovod(python)
        progress.say("its Horovod is used as it is (ISOLATED=1 would build one)")
    if builds:
        check_build_tools()

    progress.step("venv", "making the virtual environment .venv")
    inherits = has["horovod"] or has["torch"]
    make_venv(python, inherits, progress)
    if inherits:
        inherit_from(python)

    if need in TOOLS:
        packages = extra(need)
        progress.step("packages", f"installing Python packages: {', '.join(packages)}")
        progress.run(pip("install", *packages), f"{need}.log")
        return progress
    wanted = [] if has["horovod"] else [name for name in frameworks if not has[name]]
    progress.step("packages", f"installing Python packages: {', '.join([*wanted, 'numpy', 'numba'])}, ...")
    install_packages(need, wanted, progress)
    if has_mpi:
        add_horovod(arguments.mpi, frameworks, has, progress)
    if need in WHOLE:
        compile_kernels(progress)
    return progress


def add_horovod(mpi_setting, frameworks, has, progress):
    """Install MPI, mpi4py and Horovod, unless the interpreter has them; then two workers must find each other."""
    progress.step("MPI", "looking for MPI")
    if has["horovod"]:
        mpi = mpi_choice.Mpi("beside the Horovod of the interpreter", _path())
    else:
        mpi = mpi_choice.choose(mpi_setting, VENV, pip_attempt(progress), _path(), progress)
        if mpi.kind == mpi_choice.FROM_SYSTEM and mpi.rpath:
            tell_mpi4py(mpi.rpath)
    progress.say(f"{mpi.name or 'no mpirun'}, {mpi.kind}")
    if mpi.name and not has["mpi4py"]:
        progress.run(pip("install", "mpi4py"), "mpi4py.log")

    progress.step("Horovod", "installing Horovod")
    if not has["horovod"]:
        install_horovod(frameworks, mpi, progress)

    progress.step("workers", "checking that workers find each other")
    if has["horovod"]:
        check_workers(["torch"], progress, is_ours=False)
    else:
        check_workers(frameworks, progress, is_ours=True)


def check_build_tools():
    """End the set-up if what a build of Horovod needs and pip can't bring is missing."""
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
        write_pth("inherited", *(f"import site; site.addsitedir({site!r})" for site in python["site_packages"]))
    lib = os.path.join(python["prefix"], "lib")
    if glob.glob(f"{glob.escape(lib)}/libmpi.so*"):
        tell_mpi4py(lib)
    with open(INHERITED_PATH, "w") as out:
        out.write(os.path.join(python["prefix"], "bin") + "\n")


def tell_mpi4py(folders):
    """Tell mpi4py where libmpi is; by itself it looks in .venv and where the system looks."""
    write_pth("mpi4py", f"import os; os.environ.setdefault('MPI4PY_LIBMPI', {folders!r})")


def write_pth(name, *lines):
    """Write the lines that Python carries out when it starts in .venv."""
    with open(os.path.join(mpi_choice.site_packages(VENV), f"grace_ext_{name}.pth"), "w") as out:
        out.writelines(line + "\n" for line in lines)


def pip(command, *arguments):
    if command == "install":
        # Compiling whole packages would take longer than what is imported of them at the first import.
        options = ("--disable-pip-version-check", "--no-compile", "-c", os.path.join(HERE, "constraints.txt"))
        arguments = (*options, *arguments)
    return [PYTHON, "-m", "pip", command, *arguments]


def pip_attempt(progress):
    """Return a function that installs a package and returns pip's exit status."""
    return lambda package, log: progress.attempt(pip("install", package), log)


def extra(name):
    """Return the requirements of one of the extras in setup.cfg."""
    config = configparser.ConfigParser()
    config.read(os.path.join(ROOT, "setup.cfg"))
    return config["options.extras_require"][name].split()


def install_packages(need, frameworks, progress):
    """Install grace_ext as an editable package, what its demos need and, as far as needed, what Horovod and the tests need."""
    progress.run(pip("install", "setuptools", "wheel"), "setuptools.log")
    packages = [FRAMEWORK_PACKAGES[name] for name in frameworks]
    if need != "ddp":
        packages += horovod_wheel.REQUIREMENTS
    extras, imports = "plots", list(frameworks)
    if need in WHOLE:
        extras = "plots,lint,dev,jax,flower"
        imports += ["jax", "flower"]
        if "torch" in frameworks:
            extras += ",accelerate,transformers,lightning,triton"
            imports.append("trainers")
        if "torch" in frameworks and need == "test-all":
            extras += ",ray"
            packages.append("pyspark")
            imports.append("ray")
    command = pip("install", "--no-build-isolation", "-e", f"{ROOT}[{extras}]", *packages)
    progress.run(command, "packages.log", hint="If TensorFlow is what failed, use FRAMEWORKS=torch.")
    if "tensorflow" in frameworks:
        # Legacy Keras asks for the package `tensorflow`, which would come on top of tensorflow-cpu.
        progress.run(pip("install", "--no-deps", "tf_keras"), "tf_keras.log")
    import_packages(imports, progress)


def import_packages(names, progress):
    """See that what programs use can be imported. It leaves their compiled code, which pip was told not to make."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        runs = [pool.submit(progress.run, [PYTHON, "-c", IMPORTS[name]], f"import-{name}.log") for name in names]
    for finished in runs:
        finished.result()


def install_horovod(frameworks, mpi, progress):
    """Build the wheels that fit, one for each framework, or take them from the cache; install them as one."""
    environment = {"python": ask("import sysconfig; print(sysconfig.get_config_var('SOABI'))")}
    environment.update(mpi=f"{mpi.kind} {mpi.name}", cuda="")
    if "torch" in frameworks:
        environment["cuda"] = ask("import torch; print(torch.version.cuda or '')")
    links = os.path.join(VENV, "nccl")
    gpu_settings, remark = gpu.build_settings(environment["cuda"], mpi_choice.site_packages(VENV), links)

    builds = []
    for name in frameworks:
        # TensorFlow comes as a package of one of several names.
        version = ask(
            "from importlib.metadata import packages_distributions as packages, version; "
            f"print(version(packages()[{name!r}][0]))"
        )
        settings = horovod_wheel.build_settings(name, mpi.rpath, gpu_settings)
        description = horovod_wheel.describe({**environment, name: version}, settings)
        note = f"building Horovod {horovod_wheel.VERSION} for {name} {version}, {mpi.name}, {remark} ..."
        builds.append(horovod_wheel.Build(description, settings, f"horovod-build-{name}.log", note))

    if {build.digest for build in builds} <= set(_read(INSTALLED_HOROVOD).get("wheels", [])):
        return progress.say("it is installed")
    path = BIN + os.pathsep + mpi.path
    wheels = [horovod_wheel.get(build, PYTHON, path, progress) for build in builds]
    with tempfile.TemporaryDirectory() as folder:
        wheel = horovod_wheel.merge(wheels, folder) if len(wheels) > 1 else wheels[0]
        progress.run(pip("install", "--no-deps", "--force-reinstall", wheel), "horovod.log")
    _write(INSTALLED_HOROVOD, {"wheels": [build.digest for build in builds]})


def check_workers(frameworks, progress, is_ours):
    """Let two workers exchange a few bytes, for each framework and controller; we only warn if it isn't ours."""
    env = dict(os.environ, PATH=_path(with_venv=True), HOROVOD_GLOO_TIMEOUT_SECONDS="120")

    def check(framework, controller):
        program = [PYTHON, os.path.join(HERE, "check_workers.py"), framework]
        command = ["horovodrun", f"--{controller}", "-np", "2", *program]
        log = f"workers-{framework}-{controller}.log"
        if is_ours:
            progress.run(command, log, env=env)
        elif progress.attempt(command, log, env=env):
            progress.say(f"warning: this failed, see .venv/setup-logs/{log}: {' '.join(command)}")

    with concurrent.futures.ThreadPoolExecutor(2) as pool:  # they wait for each other most of the time
        checks = [pool.submit(check, *which) for which in itertools.product(frameworks, ("mpi", "gloo"))]
    for finished in checks:
        finished.result()


def compile_kernels(progress):
    progress.step("kernels", "compiling the kernels")
    progress.run([PYTHON, "-m", "grace_ext", "warmup"], "warmup.log", cwd=ROOT)


def ask(code):
    result = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, cwd=os.sep)
    if result.returncode:
        fail(f"this fails in .venv: {code}\n{result.stderr.strip()}")
    return result.stdout.strip()


def _path(with_venv=False):
    """Return the PATH of env.sh, with or without .venv itself."""
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
    """Allow one set-up at a time in this checkout. The lock is on the folder itself, so no lock file is left."""
    folder = os.open(HERE, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _digest_of_environment(arguments, python):
    identity = [os.path.realpath(python["base"]), python["prefix"], python["version"], python["has"]]
    settings = {name: value for name, value in vars(arguments).items() if name != "need"}
    parts = [json.dumps([settings, identity], sort_keys=True).encode()]
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


def _read(path):
    """Return the dict in one of the files that the set-up leaves in .venv; an empty one if there is none."""
    try:
        with open(path) as file:
            return json.load(file)
    except (OSError, ValueError):
        return {}


def _write(path, content):
    with open(path, "w") as out:
        json.dump(content, out, indent=2)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        fail("interrupted")
