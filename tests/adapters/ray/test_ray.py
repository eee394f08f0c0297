"""Models that Ray Train prepares, in the workers of a TorchTrainer. The checks are in checks_ray.py and run in the workers.

Ray is installed by `make test-all` only.
"""

import json
from pathlib import Path

import pytest
from support.launch import RAY, checks_in, of_jobs, run, skip_without, start_job

from grace_ext import ConfigError

HERE = Path(__file__).parent
pytestmark = [pytest.mark.mpi, pytest.mark.tier("all")]
skip_without("torch", "ray")

CHECKS = checks_in(*sorted(HERE.glob("checks_*.py")))


@pytest.fixture(scope="module")
def job(request, tmp_path_factory):
    return start_job(request, tmp_path_factory, HERE / "worker.py")


@of_jobs(CHECKS, launchers=RAY)
def test_check(job, name, record_property):
    record_property("seconds", job.seconds[0].get(name, 0.0))
    job.assert_ok(name)


@pytest.mark.alone
def test_a_run_that_ray_starts_again_goes_on_bit_by_bit(tmp_path):
    """A worker dies in the middle: Ray starts all of them again, from the last checkpoint."""
    done = run("ray-2", HERE / "restarting.py", str(tmp_path))
    assert done.returncode == 0, done.stdout[-4000:]
    whole, restarted, alone = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("whole", "restarted", "alone")
    )
    assert restarted["starts"] == 2 and whole["starts"] == 1
    assert restarted["weights"] == whole["weights"] and restarted["step"] == whole["step"] == 6
    assert alone["step"] is None  # one worker, which has nobody to send to


def test_it_is_for_the_workers_of_ray_train_v2(monkeypatch):
    import torch

    from grace_ext.adapters.ray import compress_gradients

    net = torch.nn.Linear(2, 2)
    arguments = net, torch.optim.SGD(net.parameters(), 0.1)
    with pytest.raises(ConfigError, match="is for the training function of a TorchTrainer"):
        compress_gradients(*arguments)
    monkeypatch.setenv("RAY_TRAIN_V2_ENABLED", "0")
    with pytest.raises(ConfigError, match="RAY_TRAIN_V2_ENABLED=0 switches Ray Train V1 on"):
        compress_gradients(*arguments)
