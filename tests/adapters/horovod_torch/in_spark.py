"""Two ranks of Horovod that Spark starts: prints what they come to, as JSON."""

import json
import os

os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"

import horovod.spark  # noqa: E402
from pyspark.sql import SparkSession  # noqa: E402


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


if __name__ == "__main__":
    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    spark = spark.config("spark.driver.host", "127.0.0.1").getOrCreate()
    found = horovod.spark.run(train, num_proc=2, use_gloo=True, start_timeout=600, nics={"lo"})
    print("found", json.dumps(found), flush=True)
    spark.stop()
