"""Starts Ray on this machine, for one script: loopback only, no dashboard, a small store."""

import contextlib
import os
import tempfile

# On a busy machine Ray needs longer to start than it waits by itself, and its workers are nicer than anything else.
os.environ.update(
    RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled", RAY_raylet_start_wait_time_s="600", RAY_worker_niceness="0"
)

import ray  # noqa: E402
from ray.train import FailureConfig, RunConfig, ScalingConfig  # noqa: E402
from ray.train.torch import TorchTrainer  # noqa: E402


@contextlib.contextmanager
def ray_here(ranks):
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:  # short: sockets are in it
        ray.init(
            num_cpus=ranks,
            include_dashboard=False,
            object_store_memory=80_000_000,
            _node_ip_address="127.0.0.1",
            _temp_dir=folder,
        )
        try:
            yield
        finally:
            ray.shutdown()


def trainer(train, ranks, folder, name="job", failures=0, **config):
    """folder: of the job; train(config) finds it there."""
    return TorchTrainer(
        train,
        train_loop_config={"folder": str(folder), **config},
        scaling_config=ScalingConfig(num_workers=ranks),
        run_config=RunConfig(
            name=name, storage_path=str(folder / "ray"), failure_config=FailureConfig(max_failures=failures)
        ),
    )
