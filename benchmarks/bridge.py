"""The cost of moving gradients from TensorFlow to the codecs and back, without codecs and network; writes docs/bridge.md.

    python benchmarks/bridge.py

A step's gradients pass through the nodes that training uses, with an exchange that encodes nothing and sends nothing. Ends
with status 1 if a bar is missed.
"""

import argparse
import datetime
import os
import statistics
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import horovod.tensorflow as hvd  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from _lib import ROOT, as_markdown, tensorflow_machine  # noqa: E402

import grace_ext  # noqa: E402
from grace_ext.adapters._tensorflow import exchange_graph, nodes, transport  # noqa: E402
from grace_ext.communicators.base import Communicator, Pending  # noqa: E402
from grace_ext.exchange.bucketing import build_buckets  # noqa: E402
from grace_ext.exchange.buckets import Tensor  # noqa: E402
from grace_ext.exchange.engine import Exchange  # noqa: E402
from grace_ext.exchange.scheduler import CallersThread  # noqa: E402
from grace_ext.policy import Rules  # noqa: E402

MEMCPYS, MILLISECONDS = 1.0, 1.0  # the bar
MODELS = {  # about 10 million parameters each
    "perceptron": [(784, 2048), (2048,), (2048, 2048), (2048,), (2048, 2048), (2048,), (2048, 10), (10,)],
    "convolutions": [
        (3, 3, 3, 64),
        *[(3, 3, 64, 64)] * 8,
        (3, 3, 64, 128),
        *[(3, 3, 128, 128)] * 8,
        (3, 3, 128, 256),
        *[(3, 3, 256, 256)] * 8,
        (3, 3, 256, 512),
        *[(512,)] * 24,
        (3, 3, 512, 512),
        (512, 1000),
        (1000,),
    ],
}


class Nothing(Communicator):
    """Encodes nothing and sends one byte; the result is arbitrary."""

    name = "nothing"
    collectives = ("allgather",)

    def check(self, compressor):
        pass

    def start(self, transport, name, compressor, gradient, state, stream, sizes=None):
        return Pending(transport.allgather(name, np.zeros(1, np.uint8)), 1, {})

    def finish(self, pending, transport, out, weight):
        return True


def build(shapes) -> exchange_graph.ExchangeGraph:
    """Build the nodes for these gradients, with the default buckets and memory."""
    tensors = [Tensor(str(i), int(np.prod(shape)), len(shape), shape=shape) for i, shape in enumerate(shapes)]
    exchange = Exchange(
        transport.GraphTransport(hvd.global_process_set), grace_ext.memory("residual"), 1.0, executor=CallersThread()
    )
    exchange.set_buckets(build_buckets(exchange, [tensors], set(), Rules(), Nothing(), "bridge", 25 * 2**20))
    return exchange_graph.ExchangeGraph(exchange, hvd.global_process_set, 1.0)


def measure(shapes, repeats: int) -> dict[str, float]:
    """Measure medians in milliseconds: the step with the bridge, the same step without it, and a copy of the gradient."""
    graph = build(shapes)
    given = {
        str(i): tf.constant(np.random.default_rng(i).standard_normal(shape), tf.float32) for i, shape in enumerate(shapes)
    }
    source = np.concatenate([one.numpy().ravel() for one in given.values()])
    target = source.copy()

    def step(way):
        gradients = {name: tf.identity(gradient) for name, gradient in given.items()}
        results = graph.add(gradients) if way == "bridge" else gradients
        with tf.control_dependencies(results.values()):
            return tf.constant(0)

    traced = tf.function(step)
    ways = {"bridge": lambda: traced("bridge"), "step": lambda: traced("step"), "memcpy": lambda: np.copyto(target, source)}
    seconds = {name: [] for name in ways}
    for _ in range(repeats + 10):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - started)
    return {name: 1e3 * statistics.median(times[10:]) for name, times in seconds.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=os.path.join(ROOT, "docs", "bridge.md"))
    parser.add_argument("--repeats", type=int, default=200)
    args = parser.parse_args()
    hvd.init()
    # Horovod's operation is not part of the bridge; with one rank it would take a cycle of its background thread.
    nodes.collective = lambda kind, sent, name, process_set: tf.identity(sent[0])
    rows = [["model", "tensors", "million parameters", "one memcpy", "bridge", "in memcpys", "target", "met"]]
    met = True
    for model, shapes in MODELS.items():
        times = measure(shapes, args.repeats)
        spent = times["bridge"] - times["step"]
        bar = MEMCPYS * times["memcpy"] + MILLISECONDS
        met &= spent <= bar
        rows.append(
            [
                model,
                str(len(shapes)),
                f"{sum(int(np.prod(shape)) for shape in shapes) / 1e6:.1f}",
                f"{times['memcpy']:.2f} ms",
                f"{spent:.2f} ms",
                f"{spent / times['memcpy']:.2f}",
                f"{bar:.2f} ms",
                "yes" if spent <= bar else "**no**",
            ]
        )
    text = (
        "\n\n".join(
            [
                "# Cost of the bridge between TensorFlow and the codecs",
                "Written by `benchmarks/bridge.py`; do not edit. Milliseconds per step that it takes to move the "
                "gradients from TensorFlow into the buckets and back, without codecs and network, inside `tf.function`. "
                f"The times are medians of {args.repeats} steps, each measured next to the same step without the bridge "
                "and a copy of the gradient in memory.",
                as_markdown(rows),
                f"The target, set before measuring: at most {MEMCPYS:.0f} memcpy of the gradient plus {MILLISECONDS:.0f} ms.",
                f"Measured on {datetime.date.today().isoformat()} on {tensorflow_machine()}, by "
                "`python benchmarks/bridge.py`.",
            ]
        )
        + "\n"
    )
    with open(args.out, "w") as out:
        out.write(text)
    print(text)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
