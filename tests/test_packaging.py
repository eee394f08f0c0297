"""What the wheel and the source distribution hold, and that either installs into a bare environment, runs there and is typed."""

import configparser
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.tier("test")

ROOT = Path(__file__).parents[1]
REQUIREMENTS = ("numpy", "numba", "llvmlite", "xxhash")  # llvmlite is numba's
PROGRAM = """
import sys
import numpy as np
import grace_ext

assert grace_ext.__file__.startswith(sys.prefix), grace_ext.__file__
gradient = np.random.default_rng(0).standard_normal(10_000, dtype=np.float32)
blob = grace_ext.compressor("topk:0.01/rice/qsgd:7").compress(gradient)
assert np.count_nonzero(grace_ext.decompress(blob, size=gradient.size)) == 100
blob.tofile(sys.argv[1])
"""


def on_disk() -> set[str]:
    folders = {
        ".".join(init.parent.relative_to(ROOT).parts)
        for part in ("grace_ext", "adapters")
        for init in (ROOT / part).rglob("__init__.py")
    }
    return {f"grace_ext.{folder}" if folder.startswith("adapters") else folder for folder in folders}


def test_setup_cfg_lists_the_packages_on_the_disk():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    assert set(config["options"]["packages"].split()) == on_disk()


@pytest.fixture(scope="module")
def distributions(tmp_path_factory) -> dict[str, Path]:
    """The wheel and the source distribution, the wheel built from the latter, as `make dist` builds both."""
    folder = tmp_path_factory.mktemp("distributions")
    # A copy, so that neither build/ nor an egg-info of the checkout decides what gets in.
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in tracked.stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "source" / name)
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(folder / "source")]
    subprocess.run(build, check=True, capture_output=True)
    return {"wheel": next(folder.glob("*.whl")), "sdist": next(folder.glob("*.tar.gz"))}


def bare_environment(folder: Path, packages: tuple[str, ...]) -> Path:
    """A virtual environment that has these packages of the running one and nothing else, made without a network."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for package in packages:
        distribution = importlib.metadata.distribution(package)
        for name in {Path(file).parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (site / name).exists():
                (site / name).symlink_to(distribution.locate_file(name))
    return folder / "bin/python"


def install(python: Path, distribution: Path) -> None:
    options = ["--quiet", "--no-index", "--no-build-isolation", "--disable-pip-version-check"]
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", *options, str(distribution)], check=True
    )


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_it_installs_into_a_bare_environment_and_runs(distributions, kind, tmp_path):
    # setuptools is what the source distribution is built with.
    python = bare_environment(tmp_path / "venv", (*REQUIREMENTS, *(("setuptools",) if kind == "sdist" else ())))
    install(python, distributions[kind])

    def run(*command: object) -> str:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = tuple(map(str, command))
        return subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True).stdout

    run(python, "-c", PROGRAM, "container.bin")
    assert "topk" in run(python.parent / "grace-ext", "codecs")
    assert "qsgd" in run(python, "-m", "grace_ext", "inspect", "container.bin")


def test_every_module_imports_from_the_wheel(distributions, tmp_path):
    with zipfile.ZipFile(distributions["wheel"]) as archive:
        archive.extractall(tmp_path)
    modules = [
        ".".join(path.relative_to(tmp_path).with_suffix("").parts)
        for path in tmp_path.glob("grace_ext/**/*.py")
        if path.name not in ("__init__.py", "__main__.py")
    ]
    assert len(modules) > 20 and "grace_ext.adapters.horovod_torch" in modules
    program = (
        "import sys; folder, *names = sys.argv[1:]; sys.path.insert(0, folder)\nimport importlib\n"
        "for name in names:\n"
        "    module = importlib.import_module(name)\n"
        "    assert module.__file__.startswith(folder), (name, module.__file__)\n"
    )
    # Apart: TensorFlow and Triton, which torch's users import where it is installed, each bring an LLVM of their own.
    names = sorted(on_disk()) + modules
    if importlib.util.find_spec("ray") is None:  # only `make test-all` installs it
        names = [name for name in names if "adapters.ray" not in name]
    tensorflow = [name for name in names if "tensorflow" in name or "keras" in name]
    for part in (tensorflow, [name for name in names if name not in tensorflow]):
        # First on the path: neither the checkout nor an editable install may stand in for a missing one.
        subprocess.run([sys.executable, "-c", program, str(tmp_path), *part], cwd=tmp_path, check=True)


def test_what_the_distributions_hold(distributions):
    with zipfile.ZipFile(distributions["wheel"]) as archive:
        wheel = archive.namelist()
    assert {"grace_ext/py.typed", "grace_ext/adapters/py.typed", "grace_ext/adapters/torch_ddp.py"} <= set(wheel)
    assert any(name.endswith("licenses/LICENSE") for name in wheel)
    assert {name.split("/")[0] for name in wheel if ".dist-info/" not in name} == {"grace_ext"}
    with tarfile.open(distributions["sdist"]) as archive:
        sdist = {name.partition("/")[2] for name in archive.getnames()}
    needed = {"LICENSE", "README.md", "setup.cfg", "pyproject.toml", "grace_ext/py.typed"}
    assert needed | {"adapters/py.typed", "adapters/torch_ddp.py"} <= sdist
    # Everything to read, build, test and measure, and nothing that running it leaves behind.
    documents = {"ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/training.md", "docs/site/mkdocs.yml"}
    programs = {
        "Makefile",
        "mpirun/setup_env.py",
        "mpirun/hosts",
        "examples/pytorch_fashion_mnist.py",
        "benchmarks/cluster.py",
    }
    assert documents | programs | {"tests/conftest.py", "tests/test_packaging.py"} <= sdist
    left_behind = [name for name in sdist if "__pycache__" in name or name.endswith((".pyc", ".nbi", ".nbc"))]
    assert left_behind == []


def test_the_core_imports_no_framework(tmp_path):
    program = (
        "import grace_ext, sys, grace_ext.exchange, grace_ext.policy, grace_ext.cli\n"
        "loaded = {'torch', 'tensorflow', 'horovod', 'jax', 'mpi4py', 'matplotlib'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)


def test_metadata_has_the_extras_and_the_three_dependencies():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    assert set(config["options"]["install_requires"].split()) == {"numpy", "numba", "xxhash"}
    assert {"torch", "tensorflow", "jax", "legacy_keras", "mpi", "deflate", "plots", "lint", "docs", "dev"} <= set(
        config["options.extras_require"]
    )


def test_all_that_say_for_which_python_this_is_say_the_same():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    oldest = config["options"]["python_requires"].removeprefix(">=")
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    # mypy fails on what this version's standard library lacks: typing.Self kept Python 3.10 from importing the package.
    assert tools["mypy"]["python_version"] == oldest
    assert tools["ruff"]["target-version"] == f"py{oldest.replace('.', '')}"
    for name in ("README.md", "mpirun/README.md"):
        assert re.findall(r"Python (\d\.\d+) to", (ROOT / name).read_text(encoding="utf-8")) == [oldest], name
    assert f"SUPPORTED = (({oldest.replace('.', ', ')})," in (ROOT / "mpirun/interpreter.py").read_text(encoding="utf-8")


RIGHT = """
import numpy as np
import grace_ext
from grace_ext.federated import Client, Median, Server
from grace_ext.policy import Rules, advise

gradient = np.zeros((10, 100), np.float32)
compressor: grace_ext.Compressor = grace_ext.compressor("topk:0.01/rice/qsgd:7", seed=1)
blob: np.ndarray = compressor.compress(gradient, name="weight", step=3)
dense: np.ndarray = grace_ext.decompress(blob, size=gradient.size)
grace_ext.decode_add(blob, dense, weight=0.5)
elements: int = grace_ext.inspect(blob).d
memory = grace_ext.memory("residual")
compensated: np.ndarray = memory.compensate("weight", gradient)
memory.update("weight", compensated, dense)
server = Server(dense, clients=4, sampled=2, mean=Median())
client = Client(dense, number=0, memory="residual")
update: np.ndarray = client.update(client.receive(blob), 10)
options: dict = grace_ext.from_params({"compressor": "topk"})
"""
WRONG = [
    'grace_ext.compressor("topk", sead=1)',
    'grace_ext.compressor("topk", seed="one")',
    'grace_ext.decompress(blob, size="many")',
    "grace_ext.decode_add(blob, dense, weight=None)",
    'compressor.compress(gradient, step="first")',
    "compressor.compress(gradient).shapes",
    "memory.update(1, compensated, dense)",
    "memory.forget_all()",
    'grace_ext.inspect(blob).d + "1"',
    'Server(dense, clients="four")',
    "Client(dense, memory=3)",
    "grace_ext.from_params([])",
    "torch_ddp.comm_hook(1, 2)",
    "torch_ddp.no_such_hook",
    'horovod_torch.DistributedOptimizer(None, num_groups="one")',
    'horovod_tensorflow.DistributedOptimizer(None, num_groups="one")',
    "FederatedServer(server, timeout='long')",
]
ADAPTERS = """
from grace_ext.adapters import horovod_tensorflow, horovod_torch, torch_ddp
from grace_ext.adapters.mpi import FederatedServer
"""


def test_types_reach_users(distributions, tmp_path):
    """mypy accepts a program that uses the installed package as it is meant, and refuses each wrong use."""
    python = bare_environment(tmp_path / "venv", REQUIREMENTS)
    install(python, distributions["wheel"])
    lines = [*(RIGHT + ADAPTERS).splitlines(), *WRONG]
    (tmp_path / "program.py").write_text("\n".join(lines))
    settings = "[mypy]\n" + "".join(
        f"[mypy-{library}.*]\nignore_missing_imports = True\nfollow_imports = skip\n"
        for library in ("horovod", "keras", "mpi4py", "numba", "tensorflow", "tf_keras", "torch")
    )
    (tmp_path / "mypy.ini").write_text(settings)
    command = [sys.executable, "-m", "mypy", "--python-executable", str(python), "--show-absolute-path", "program.py"]
    checked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    refused = {int(line.split(":")[1]) for line in checked.stdout.splitlines() if ": error:" in line}
    assert refused == set(range(len(lines) - len(WRONG) + 1, len(lines) + 1)), checked.stdout + checked.stderr
