"""What `pip install .` gives: every subpackage, from the wheel and not from the checkout."""

import configparser
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.tier("test")

ROOT = Path(__file__).parents[1]


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
def wheel(tmp_path_factory):
    # A copy, so that neither build/ nor an egg-info of the checkout decides what gets in.
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in tracked.stdout.split("\n"):
        if name and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            str(folder),
            str(source),
        ],
        check=True,
    )
    return next(folder.glob("*.whl"))


def test_every_module_imports_from_the_wheel(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    modules = [
        ".".join(path.relative_to(tmp_path).with_suffix("").parts)
        for path in tmp_path.glob("grace_ext/**/*.py")
        if path.name not in ("__init__.py", "__main__.py")
    ]
    assert len(modules) > 20 and "grace_ext.adapters.horovod_torch" in modules
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport importlib\n"
        f"for name in {sorted(on_disk()) + modules!r}:\n"
        f"    module = importlib.import_module(name)\n"
        f"    assert module.__file__.startswith({str(tmp_path)!r}), (name, module.__file__)\n"
    )
    # First on the path: neither the checkout nor an editable install may stand in for a missing one.
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)


def test_the_core_imports_no_framework(tmp_path):
    program = (
        "import grace_ext, sys, grace_ext.exchange, grace_ext.policy, grace_ext.cli\n"
        "loaded = {'torch', 'tensorflow', 'horovod', 'mpi4py', 'matplotlib'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)


def test_metadata_has_the_extras_and_the_three_dependencies():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    assert set(config["options"]["install_requires"].split()) == {"numpy", "numba", "xxhash"}
    assert {"torch", "tensorflow", "legacy_keras", "mpi", "deflate", "plots", "dev"} <= set(config["options.extras_require"])
