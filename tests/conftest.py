"""What all tests share: how much of the suite runs, which tests stay together in a process, what a run's end prints."""

import contextlib
import os
import re
import signal
from pathlib import Path

import pytest
from hypothesis import settings
from support import reporting

from grace_ext import registry

with contextlib.suppress(ImportError):
    import triton  # noqa: F401  (torch.optim imports it: after TensorFlow that aborts the process, before it does not)

TESTS = Path(__file__).parent
#: From the fewest tests to all of them; each has what the one before has. `@pytest.mark.tier` names a test's first.
TIERS = ("quick", "test", "all")
#: How many examples hypothesis draws for a property.
EXAMPLES = {"quick": 15, "test": 25, "all": 60}
#: The groups of tests that take the longest begin first, so that all processes end together.
LONGEST = (
    "hosts",
    "adapters/horovod_tensorflow/test_horovod_keras",
    "adapters/horovod_torch_elastic/test_horovod_torch_elastic",
    "adapters/horovod_tensorflow/test_horovod_tensorflow",
    "test_cpus",
    "adapters/horovod_torch/test_horovod_torch",
    "fuzz/test_fuzz_programs",
    "fuzz/test_fuzz_faults",
    "adapters/_tensorflow/test_keras_optimizer",
    "adapters/torch_ddp/test_torch_ddp",
    "adapters/fsdp/test_fsdp",
    "test_examples_frameworks",
    "adapters/transformers/test_transformers",
    "adapters/jax/test_jax",
    "adapters/accelerate/test_accelerate",
    "adapters/lightning/test_lightning",
    "adapters/flower/test_flower",
    "adapters/mpi/test_mpi",
    "federated/test_server",
    "pipeline/test_properties",
)


def pytest_addoption(parser):
    parser.addoption("--tier", choices=TIERS, default="all", help="how much of the suite: make test-quick, test or test-all")
    parser.addoption("--record", type=Path, metavar="PAGE", help="keep what the run came to in a section of this page")


def pytest_configure(config):
    # Drawn from a fixed seed: a test run says the same on every machine and on every day.
    settings.register_profile(
        "grace_ext", deadline=None, derandomize=True, database=None, max_examples=EXAMPLES[config.getoption("tier")]
    )
    settings.load_profile("grace_ext")
    # A shell that runs pytest in the background makes it ignore SIGINT, and so would all that tests start and interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # For all jobs: there are more ranks than cores. 33 checks under horovodrun --gloo with 4 ranks on 2 cores took 115 s
    # without naps and 66 s with them.
    os.environ.setdefault("HOROVOD_NAP_MICROSECONDS", "200")
    if not hasattr(config, "workerinput"):  # not in the processes of pytest-xdist, whose results come together in one
        config.pluginmanager.register(reporting)
        if config.getoption("record"):
            config.pluginmanager.register(reporting.Record(config.getoption("record"), config.getoption("tier")))


def pytest_ignore_collect(collection_path, config):
    """A file whose mark puts all of it into a larger tier is not even imported: TensorFlow alone takes seconds."""
    if collection_path.match("test_*.py"):
        mark = re.search(r'^pytestmark = .*\btier\("(\w+)"\)', collection_path.read_text(), re.M)
        if mark and TIERS.index(mark[1]) > TIERS.index(config.getoption("tier")):
            return True
    return None


def tier_of(item) -> int:
    """The smallest tier that a test is in. Of several marks the closest counts, so a parameter's goes before its file's."""
    mark = item.get_closest_marker("tier")
    return TIERS.index(mark.args[0]) if mark else 0


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config, items):
    chosen = TIERS.index(config.getoption("tier"))
    left_out = [item for item in items if tier_of(item) > chosen]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if tier_of(item) <= chosen]
    for item in items:
        if item.get_closest_marker("alone") is None:
            item.add_marker(pytest.mark.xdist_group(group_of(item)))
    items.sort(key=lambda item: next((i for i, name in enumerate(LONGEST) if group_of(item).startswith(name)), len(LONGEST)))


def group_of(item) -> str:
    """Tests of one group run in one process: those of a file share fixtures, those of a job its ranks, those on hosts the
    hosts."""
    if "machine" in item.fixturenames:
        return "hosts"
    file = item.path.relative_to(TESTS).with_suffix("").as_posix()
    job = getattr(item, "callspec", None) and item.callspec.params.get("job")
    return f"{file} {job}" if job else file  # no bracket: pytest-xdist would not find the group


@pytest.hookimpl(optionalhook=True)  # pytest-xdist may not be there
def pytest_xdist_auto_num_workers(config):
    """One process more than cores: many jobs wait for something."""
    return len(os.sched_getaffinity(0)) + 1


@pytest.fixture
def temporary_registry():
    """What a test registers is gone after it."""
    before = {kind: dict(classes) for kind, classes in registry._classes.items()}
    yield registry
    for kind, classes in before.items():
        registry._classes[kind].clear()
        registry._classes[kind].update(classes)
