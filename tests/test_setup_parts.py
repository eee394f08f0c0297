"""The set-up's own decisions, without network: what is needed, what is there already, and one wheel of two."""

import base64
import csv
import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def scripts():
    """mpirun/setup_env.py, which imports the others there."""
    names = ("setup_env", "gpu", "horovod_wheel", "interpreter", "mpi", "progress")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "mpirun"))
        import setup_env

        yield setup_env
        for name in names:
            sys.modules.pop(name, None)


def stamp(need, environment="e", kernels="k"):
    whole = ["all", "ddp", "demo", "lint"]
    needs = {"demo": ["ddp", "demo"], "all": whole, "test-all": [*whole, "test-all"]}.get(need, [need])
    return {"environment": environment, "needs": needs, "kernels": kernels if "all" in needs else None}


@pytest.mark.parametrize("there", ["lint", "docs", "ddp", "demo", "all", "test-all"])
@pytest.mark.parametrize("need", ["lint", "docs", "ddp", "demo", "all", "test-all"])
def test_a_smaller_need_is_satisfied_by_a_larger_one(scripts, there, need):
    smaller = {"demo": {"ddp"}, "all": {"lint", "ddp", "demo"}, "test-all": {"lint", "ddp", "demo", "all"}}
    assert scripts.satisfies(stamp(there), stamp(need)) == (need == there or need in smaller.get(there, ()))
    assert not scripts.satisfies(stamp(there, environment="other"), stamp(need))
    assert not scripts.satisfies({}, stamp(need))


def test_other_kernels_are_for_those_who_want_them_compiled(scripts):
    assert not scripts.satisfies(stamp("all", kernels="older"), stamp("all"))
    assert scripts.satisfies(stamp("all", kernels="older"), stamp("demo"))


def test_needs_add_up_while_the_environment_is_the_same(scripts):
    both = scripts.joined(stamp("docs"), stamp("test-all"))
    assert all(scripts.satisfies(both, stamp(need)) for need in scripts.NEEDS)
    assert scripts.joined(both, stamp("lint")) == both
    assert scripts.joined(stamp("all", environment="other"), stamp("docs")) == stamp("docs")
    assert scripts.joined({}, stamp("docs")) == stamp("docs")


def test_tools_are_installed_without_frameworks(scripts):
    assert scripts.frameworks_for("lint", ["torch"]) == scripts.frameworks_for("docs", ["tensorflow"]) == []
    assert scripts.parse_arguments(["--need", "lint", "--frameworks", "tensorflow"]).need == "lint"
    assert {"ruff", "mypy"} <= set(scripts.extra("lint")) and "mkdocs-material" in scripts.extra("docs")


def test_frameworks_of_a_need(scripts):
    both = ["torch", "tensorflow"]
    assert scripts.frameworks_for("ddp", both) == scripts.frameworks_for("demo", both) == ["torch"]
    assert scripts.frameworks_for("all", both) == scripts.frameworks_for("test-all", both) == both
    assert scripts.parse_arguments(["--need", "all", "--frameworks", "tensorflow"]).frameworks == ["tensorflow"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--need", "some"], "choose from"),
        (["--frameworks", "jax"], "--frameworks takes some of: torch tensorflow"),
        (["--need", "demo", "--frameworks", "tensorflow"], "--frameworks must have torch in it"),
    ],
)
def test_arguments_that_cannot_work(scripts, capsys, arguments, message):
    with pytest.raises(SystemExit):
        scripts.parse_arguments(arguments)
    assert message in capsys.readouterr().err


def test_the_environment_does_not_depend_on_the_need(scripts):
    python = {"base": sys.executable, "prefix": "p", "version": [3, 11, 7], "has": {}}
    digests = {scripts._digest_of_environment(scripts.parse_arguments(["--need", need]), python) for need in scripts.NEEDS}
    assert len(digests) == 1
    assert scripts._digest_of_environment(scripts.parse_arguments(["--mpi", "wheel"]), python) not in digests


def test_the_times_are_left_for_others(scripts, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(scripts, "TIMES", str(tmp_path / "times.json"))
    progress = scripts.Progress(2, str(tmp_path))
    progress.step("venv", "making")
    progress.step("packages", "installing")
    assert list(progress.seconds()) == ["venv", "packages"]
    scripts.tell_times("ddp", {"venv": 4.2, "packages": 60.1})
    assert json.loads((tmp_path / "times.json").read_text()) == {
        "need": "ddp",
        "seconds": 64.3,
        "steps": {"venv": 4.2, "packages": 60.1},
    }
    assert "done in 64 s (venv 4, packages 60)" in capsys.readouterr().out


def test_a_wheel_is_built_for_one_framework(scripts, monkeypatch):
    monkeypatch.setenv("HOROVOD_WITH_TENSORFLOW", "1")
    monkeypatch.setenv("HOROVOD_CPU_OPERATIONS", "GLOO")
    settings = scripts.horovod_wheel.build_settings("torch", "$ORIGIN", {})
    frameworks = {name: value for name, value in settings.items() if name.endswith(("PYTORCH", "TENSORFLOW"))}
    assert frameworks == {"HOROVOD_WITH_PYTORCH": "1", "HOROVOD_WITHOUT_TENSORFLOW": "1"}
    assert settings["HOROVOD_CPU_OPERATIONS"] == "GLOO"


def test_cuda_is_left_out_unless_it_is_wanted(scripts, monkeypatch, tmp_path):
    for_cpus, _ = scripts.gpu.build_settings("", str(tmp_path), str(tmp_path))
    settings = scripts.horovod_wheel.build_settings("torch", "$ORIGIN", for_cpus)
    assert settings["HOROVOD_WITHOUT_CUDA"] == settings["HOROVOD_WITHOUT_NVTX"] == "1"
    monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "NCCL")
    assert "HOROVOD_WITHOUT_CUDA" not in scripts.horovod_wheel.build_settings("torch", "$ORIGIN", for_cpus)


NAME = "horovod-0.28.1-py3-none-any.whl"


def wheel(folder, library, framework, requirement):
    folder.mkdir()
    files = {
        "horovod/__init__.py": "",
        library: "code",
        "horovod/metadata.json": json.dumps({framework: "2", "dummy": "none"}),
        "horovod-0.28.1.dist-info/METADATA": f"Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\nRequires-Dist: {requirement}\n",
        "horovod-0.28.1.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "horovod-0.28.1.dist-info/RECORD": "not looked at",
    }
    with zipfile.ZipFile(folder / NAME, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return str(folder / NAME)


def test_one_wheel_of_two(scripts, tmp_path):
    first = wheel(tmp_path / "torch", "horovod/torch/lib.so", "pytorch", "cffi")
    second = wheel(tmp_path / "tensorflow", "horovod/tensorflow/lib.so", "tensorflow", "psutil")
    merged = scripts.horovod_wheel.merge([first, second], str(tmp_path))
    with zipfile.ZipFile(merged) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    assert {"horovod/torch/lib.so", "horovod/tensorflow/lib.so"} < set(content)
    assert json.loads(content["horovod/metadata.json"]) == {"pytorch": "2", "tensorflow": "2", "dummy": "none"}
    assert b"cffi" in content["horovod-0.28.1.dist-info/METADATA"]
    rows = list(csv.reader(content["horovod-0.28.1.dist-info/RECORD"].decode().splitlines()))
    assert {row[0] for row in rows} == set(content)
    for name, digest, size in rows:
        if digest:
            expected = base64.urlsafe_b64encode(hashlib.sha256(content[name]).digest()).decode().rstrip("=")
            assert (digest, int(size)) == (f"sha256={expected}", len(content[name]))


def test_pip_installs_the_merged_wheel(scripts, tmp_path):
    parts = [wheel(tmp_path / name, f"horovod/{name}/lib.so", name, "psutil") for name in ("torch", "tensorflow")]
    merged = scripts.horovod_wheel.merge(parts, str(tmp_path))
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--no-index",
            "--target",
            str(tmp_path / "site"),
            merged,
        ],
        check=True,
    )
    assert (tmp_path / "site/horovod/torch/lib.so").exists() and (tmp_path / "site/horovod/tensorflow/lib.so").exists()
