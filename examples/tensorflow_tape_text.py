"""Train an embedding model that predicts the next word, in a custom tf.function, with compressed sparse gradients.

    horovodrun -np 2 python examples/tensorflow_tape_text.py

The text comes with Python and TensorFlow: the language reference (pydoc's topics) and the docstrings of the standard
library, Keras and TensorFlow. The gradients of the two tables, 50,000 rows of 64 each, are tf.IndexedSlices: they have only
rows of words that the batch contains or that the sampled softmax drew.
"""

import argparse
import collections
import importlib.util
import json
import math
import os
import pydoc_data.topics
import re
import sysconfig
import time
import zlib

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from tqdm import tqdm

from grace_ext.adapters.horovod_tensorflow import DistributedGradientTape, broadcast_variables, compression_stats

ROWS, WIDTH = 50_000, 64
SAMPLED = 1024  # negative words per step
HELD_OUT = 10_000  # words at the end of the text, for the perplexity
HOROVOD = "horovod"
WARM_UP = 10  # steps whose time is not counted


def documents():
    """Yield the text, one docstring at a time, in the same order on every machine with these packages."""
    yield from pydoc_data.topics.topics.values()
    packages = [importlib.util.find_spec(name).submodule_search_locations[0] for name in ("keras", "tensorflow")]
    for root in (sysconfig.get_path("stdlib"), *packages):
        for folder, subfolders, files in os.walk(root):
            subfolders[:] = sorted(set(subfolders) - {"site-packages", "dist-packages", "test", "tests", "idle_test"})
            for name in sorted(files):
                if name.endswith(".py"):
                    with open(os.path.join(folder, name), encoding="utf-8", errors="ignore") as source:
                        yield from re.findall(r'"""(.*?)"""', source.read(), re.DOTALL)


def read_words() -> np.ndarray:
    """Return the text as rows of the tables, int64[words]: the more frequent a word, the lower its row.

    Documents are shuffled, so that all kinds are in the held-out end.
    """
    unique = list(dict.fromkeys(documents()))
    np.random.default_rng(0).shuffle(unique)
    words = re.findall(r"\w+|\S", "\n".join(unique))
    row_of = {word: row for row, (word, _) in enumerate(collections.Counter(words).most_common(ROWS))}
    return np.fromiter((row_of.get(word, ROWS - 1) for word in words), np.int64, len(words))


class Model:
    """6.5 million parameters, all but 37,000 of them in the tables."""

    def __init__(self):
        self.embedding = tf.Variable(tf.random.normal([ROWS, WIDTH], stddev=0.1), name="embedding")
        self.output = tf.Variable(tf.random.normal([ROWS, WIDTH], stddev=0.1), name="output")
        self.bias = tf.Variable(tf.zeros([ROWS]), name="output_bias")
        layers = keras.layers
        self.hidden = keras.Sequential(
            [  # sees a word and the 15 before it
                layers.Conv1D(WIDTH, 4, padding="causal", activation="relu"),
                layers.Conv1D(WIDTH, 4, padding="causal", dilation_rate=4, activation="relu"),
                layers.Dense(WIDTH),
            ]
        )
        self.hidden.build([None, None, WIDTH])
        self.variables = [self.embedding, self.output, self.bias, *self.hidden.trainable_variables]

    def states(self, words):
        """Take int64[batch, length + 1]; return the state before each next word, and the next words."""
        states = self.hidden(tf.gather(self.embedding, words[:, :-1]))
        return tf.reshape(states, [-1, WIDTH]), tf.reshape(words[:, 1:], [-1])

    def sampled_loss(self, words):
        states, following = self.states(words)
        return tf.reduce_mean(
            tf.nn.sampled_softmax_loss(self.output, self.bias, following[:, None], states, SAMPLED, ROWS, seed=hvd.rank())
        )

    def loss(self, words):
        states, following = self.states(words)
        scores = tf.matmul(states, self.output, transpose_b=True) + self.bias
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(following, scores))


def rows_once(gradient):
    """Sum rows with the same index, because Keras' Adagrad would apply each one separately.

    After a compressed exchange there are no such rows.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows, slots = tf.unique(gradient.indices)
    return tf.IndexedSlices(tf.math.unsorted_segment_sum(gradient.values, slots, tf.size(rows)), rows, gradient.dense_shape)


def horovod_bytes(model, positions: int) -> tuple[int, int]:
    """Compute the bytes of one rank's gradients of a step in Horovod's own operations.

    Returns those sent as rows (float32 values and int64 indices, by an allgather), and those as dense tensors (by an
    allreduce).
    """
    of_words, of_scores = 4 * WIDTH + 8, 4 * WIDTH + 8 + 4 + 8  # a row of the embedding; of the output and its bias
    rows = positions * of_words + (positions + SAMPLED) * of_scores
    return rows, 4 * sum(math.prod(v.shape) for v in model.hidden.trainable_variables)


class Meter:
    """Measures the bytes that this rank sends, those that Horovod's own operations would send, and the seconds of a step."""

    def __init__(self, args, model):
        self.args, self.model = args, model
        self.steps, self.seconds = 0, 0.0

    def lap(self, started):
        self.steps += 1
        if self.steps > WARM_UP:
            self.seconds += time.perf_counter() - started

    def report(self):
        n = hvd.size()
        rows, dense = horovod_bytes(self.model, self.args.batch_size * self.args.length)
        of_rows, of_all = (n - 1) * rows, (n - 1) * rows + 2 * (n - 1) / n * dense  # an allgather; with a ring's allreduce
        sent = self.steps * of_all
        if self.args.compression != HOROVOD:
            sent = (n - 1) * compression_stats(self.model.variables).get("bytes_out", 0)
        return {
            "steps": self.steps,
            "bytes_sent": sent,
            "horovod_bytes_sent": self.steps * of_all,
            "horovod_bytes_of_rows": self.steps * of_rows,
            "seconds_per_step": self.seconds / max(1, self.steps - WARM_UP),
        }


def main(args):
    hvd.init()
    threads = max(1, len(os.sched_getaffinity(0)) // hvd.local_size())
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    keras.utils.set_random_seed(args.seed)
    words = read_words()
    train, held_out = words[:-HELD_OUT], words[-HELD_OUT:].reshape(-1, 100)[hvd.rank() :: hvd.size()]
    model = Model()
    decay = keras.optimizers.schedules.PolynomialDecay
    tables = keras.optimizers.Adagrad(decay(args.lr, args.steps), initial_accumulator_value=1e-6)  # suits sparse rows
    layers = keras.optimizers.Adam(decay(args.lr / 25, args.steps))
    broadcast_variables(model.variables, root_rank=0)

    @tf.function
    def train_step(words):
        with tf.GradientTape() as tape:
            loss = model.sampled_loss(words)
        if args.compression == HOROVOD:
            gradients = tape.gradient(loss, model.variables)
            gradients = [hvd.allreduce(gradient, name=f"gradient{i}") for i, gradient in enumerate(gradients)]
        else:
            tape = DistributedGradientTape(tape, compression=args.compression, memory=args.memory)
            gradients = tape.gradient(loss, model.variables)
        pairs = list(zip(map(rows_once, gradients), model.variables, strict=True))
        tables.apply_gradients(pairs[:3])
        layers.apply_gradients(pairs[3:])
        return loss

    held_out_loss = tf.function(model.loss)
    generator = np.random.default_rng((args.seed, hvd.rank()))
    meter = Meter(args, model)
    progress = tqdm(range(1, args.steps + 1), unit="step", disable=hvd.rank() > 0)
    for step in progress:
        starts = generator.integers(len(train) - args.length, size=(args.batch_size, 1))
        started = time.perf_counter()
        loss = float(train_step(train[starts + np.arange(args.length + 1)]))
        meter.lap(started)
        report = meter.report()
        ratio = report["horovod_bytes_sent"] / (report["bytes_sent"] or 1)
        saved = f", {ratio:.0f}x fewer bytes" if ratio > 1.5 else ""
        progress.set_postfix_str(f"loss {loss:.3f}{saved}", refresh=False)
        if step % max(1, args.steps // 4) == 0 or step == args.steps:
            losses = [held_out_loss(part) for part in np.array_split(held_out, 10)]
            loss = hvd.allreduce(tf.reduce_mean(losses), name="held_out")
            checksum = zlib.crc32(b"".join(variable.numpy().tobytes() for variable in model.variables))
            result = {"perplexity": math.exp(loss), **report, "checksums": hvd.allgather_object(checksum)}
            if hvd.rank() == 0:
                progress.write(f"{step} steps: perplexity {result['perplexity']:.1f} on {HELD_OUT} held-out words")
                with open(args.log_file, "a") as log:
                    print(json.dumps(result), file=log)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compression", default="dense/lloyd:0.1", help="a spec, or horovod: its own allgather of rows")
    parser.add_argument("--memory", default="residual", help="residual or none")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=128, help="per rank")
    parser.add_argument("--length", type=int, default=16, help="predicted words per sample")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-file", default=os.devnull, help="write a JSON line per evaluation")
    main(parser.parse_args())
