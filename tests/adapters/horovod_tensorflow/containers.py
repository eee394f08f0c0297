"""Writes the containers that an adapter makes of given gradients: containers.py torch|tensorflow OUT_FOLDER.

Every rank saves its own in OUT_FOLDER/torch0, torch1, ...: a file per spec, bucket and step.
"""

import collections
import sys
from pathlib import Path

import numpy as np

SHAPES = {"first": (300, 40), "second": (7, 300, 3), "bias": (40,), "wide": (40, 900), "half": (64, 64), "brain": (65, 64)}
DTYPES = {"half": "float16", "brain": "bfloat16"}  # the others are float32
# Kinds that depend on bucketing, on names, steps and ranks, on the memory and on transforms.
SPECS = (
    "topk:0.01/rice/qsgd:7",
    "randomk:0.1/raw/fp16",
    "topk:0.1/auto/lloyd:0.1",
    "dct/topk:0.05:per=chunk/rice/minmax:8",
    "topk:0.02/bloom/polyfit",
    "dense/terngrad",
)
CASES = [
    *((spec, {"memory": "none" if spec.startswith("dense") else "residual"}) for spec in SPECS),
    ("topk:0.05/rice/qsgd:7", {"memory": "ef21:momentum=0.5"}),
    ("topk:0.05/rice/qsgd:7", {"memory": "dgc:clip=2"}),
    (
        "topk:0.02/rice/qsgd:7",
        {
            "memory": {"wide": "dgc", "*": "residual:decay=0.9"},
            "schedule": {"density": "warmup:steps=2", "levels": lambda step: 3 + 4 * min(step, 2)},
        },
    ),
]
STEPS = 3


def gradients(rank: int, step: int):
    generator = np.random.default_rng([rank, step])
    return {name: generator.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def main(framework: str, out: str) -> None:
    rank, transport, run = {"torch": in_torch, "tensorflow": in_tensorflow}[framework]()
    folder = Path(out, f"{framework}{rank}")
    folder.mkdir()
    steps = collections.Counter()
    plain = transport.allgather

    def allgather(self, name, payload):
        bucket = name.rsplit(".", 1)[1]
        if bucket.startswith("bucket"):  # there are other messages
            Path(folder, f"{number}-{bucket}-{steps[number, bucket]}").write_bytes(payload.tobytes())
            steps[number, bucket] += 1
        return plain(self, name, payload)

    transport.allgather = allgather
    transport.can_fuse = False  # each container by itself
    for number, (spec, options) in enumerate(CASES):  # noqa: B007  (the function above reads the number)
        run(spec, options, [gradients(rank, step) for step in range(STEPS)])


def in_torch():
    import horovod.torch as hvd
    import torch

    from grace_ext.adapters.horovod_torch import DistributedOptimizer, HorovodTransport

    def run(spec, options, steps):
        dtypes = {name: getattr(torch, DTYPES.get(name, "float32")) for name in SHAPES}
        parameters = {name: torch.nn.Parameter(torch.zeros(shape, dtype=dtypes[name])) for name, shape in SHAPES.items()}
        optimizer = DistributedOptimizer(
            torch.optim.SGD(parameters.values(), lr=0.1), parameters.items(), spec, bucket_bytes=100_000, **options
        )
        for given in steps:
            optimizer.zero_grad()
            total = torch.zeros(())
            for name, p in parameters.items():  # a chain, so that the last parameter's gradient comes first
                total = 1 * total + (p * torch.from_numpy(given[name]).to(dtypes[name])).sum()
            total.backward()
            optimizer.step()

    hvd.init()
    return hvd.rank(), HorovodTransport, run


def in_tensorflow():
    import horovod.tensorflow as hvd
    import tensorflow as tf

    from grace_ext.adapters._tensorflow.reduce import Options, Reducer
    from grace_ext.adapters._tensorflow.transport import GraphTransport

    def run(spec, options, steps):
        dtypes = {name: DTYPES.get(name, "float32") for name in SHAPES}
        variables = [tf.Variable(tf.zeros(shape, dtypes[name]), name=name) for name, shape in SHAPES.items()]
        reducer = Reducer(Options(spec, bucket_bytes=100_000, **options))
        for given in steps:
            reducer.reduce([tf.cast(given[name], dtypes[name]) for name in SHAPES], variables)

    hvd.init()
    return hvd.rank(), GraphTransport, run


main(*sys.argv[1:])
