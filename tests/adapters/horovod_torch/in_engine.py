"""Two ranks of Horovod that Spark or Ray starts, in_engine.py spark|ray: prints what they come to, as JSON."""

import json
import os
import sys
import tempfile

os.environ.update(SPARK_LOCAL_IP="127.0.0.1", RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled", RAY_worker_niceness="0")
os.environ["RAY_raylet_start_wait_time_s"] = "600"  # on a busy machine Ray needs longer than it waits by itself


def train():
    import horovod.torch as hvd
    import torch

    from grace_ext.adapters.horovod_torch import DistributedOptimizer

    hvd.init()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = torch.nn.Linear(50, 40)
    optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), named_parameters=net.named_parameters())
    generator = torch.Generator().manual_seed(hvd.rank())
    for _ in range(5):
        optimizer.zero_grad()
        net(torch.randn(8, 50, generator=generator)).square().mean().backward()
        optimizer.step()
    weights = [p.detach().flatten().tolist() for p in net.parameters()]
    return {"rank": hvd.rank(), "weights": weights, "stats": optimizer.compression_stats()["steps"]}


def by_spark():
    import horovod.spark
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    spark = spark.config("spark.driver.host", "127.0.0.1").getOrCreate()
    found = horovod.spark.run(train, num_proc=2, use_gloo=True, start_timeout=600, nics={"lo"})
    spark.stop()
    return found


def by_ray():
    import ray
    from horovod.ray import RayExecutor

    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:  # short: sockets are in it
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=80_000_000,
            _node_ip_address="127.0.0.1",
            _temp_dir=folder,
        )
        executor = RayExecutor(RayExecutor.create_settings(timeout_s=600), num_workers=2, use_gpu=False)
        executor.start()
        found = executor.run(train)
        executor.shutdown()
        ray.shutdown()
    return found


if __name__ == "__main__":
    print("found", json.dumps({"spark": by_spark, "ray": by_ray}[sys.argv[1]]()), flush=True)
