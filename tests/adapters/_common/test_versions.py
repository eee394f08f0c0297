"""Which versions of frameworks the adapters take."""

import configparser
import re
from pathlib import Path

import pytest

from grace_ext import ConfigError

pytest.importorskip("packaging")

from grace_ext.adapters._common import versions  # noqa: E402

ROOT = Path(__file__).parents[3]
CASES = {
    "accelerate": (["1.10.0", "1.15.0", "1.99"], ["1.9.9", "0.34", "2.0", "2.0.0rc1"]),
    "transformers": (["5.20.0", "5.24.0"], ["5.19.1", "4.57.3", "6.0"]),
    "lightning": (["2.5.0", "2.6.6", "2.6.0.dev1"], ["2.4.0", "2.7.0", "3.0"]),
    "ray": (["2.60.0", "2.60.3"], ["2.59.0", "2.61.0", "3.0"]),
    "jax": (["0.6.0", "0.10.2"], ["0.5.3", "0.11.0", "1.0"]),
    "flwr": (["1.42.0", "1.42.3"], ["1.41.1", "1.43.0", "2.0"]),
    "optax": (["0.2.4", "0.2.8"], ["0.2.3", "0.3.0"]),
}


@pytest.mark.parametrize("name", CASES)
def test_versions_outside_the_range_are_refused(name, monkeypatch):
    taken, refused = CASES[name]
    for version in taken:
        monkeypatch.setattr(versions, "version", lambda _, found=version: found)
        versions.check_version(name)
    for version in refused:
        monkeypatch.setattr(versions, "version", lambda _, found=version: found)
        with pytest.raises(ConfigError, match=f"{name} {version} is installed; .* supports {name}>=.*pip install"):
            versions.check_version(name)


def test_the_extras_have_the_same_ranges():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    for name, supported in versions.SUPPORTED.items():
        extra = {"optax": "jax", "flwr": "flower"}.get(name, name)
        required = "ray[train]" if name == "ray" else name
        given = [one.partition(";")[0] for one in config["options.extras_require"][extra].split()]
        assert f"{required}{supported}" in given
    assert f"accelerate{versions.SUPPORTED['accelerate']}" in config["options.extras_require"]["transformers"].split()


def test_the_versions_that_tests_run_are_in_the_range():
    text = (ROOT / "mpirun/constraints.txt").read_text()
    constraints = dict(re.findall(r"^([\w-]+)==([^;\s]+)", text, re.M))
    for name, supported in versions.SUPPORTED.items():
        assert versions.SpecifierSet(supported).contains(constraints[name].replace("*", "0"))


def test_the_adapter_is_named_that_needs_a_framework_of_another_name(monkeypatch):
    monkeypatch.setattr(versions, "version", lambda _: "0.1.0")
    with pytest.raises(ConfigError, match="optax 0.1.0 is installed; grace_ext.adapters.jax supports optax>="):
        versions.check_version("optax", "jax")
