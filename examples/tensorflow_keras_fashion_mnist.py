"""Train a convolutional network on Fashion-MNIST with Keras' compile and fit, Horovod and compressed gradients.

    horovodrun -np 2 python examples/tensorflow_keras_fashion_mnist.py --data DIR

With TF_USE_LEGACY_KERAS=1 in the environment, the same script runs on legacy Keras.
"""

import argparse
import json
import os
import time
import zlib

import horovod.tensorflow as hvd
import tensorflow as tf
from _idx import read_idx
from tqdm.keras import TqdmCallback

from grace_ext.adapters.horovod_tensorflow import (
    BroadcastGlobalVariablesCallback,
    CompressionStatsCallback,
    DistributedOptimizer,
    LearningRateWarmupCallback,
    MetricAverageCallback,
)

keras = tf.keras
HOROVOD = {"none": hvd.Compression.none, "fp16": hvd.Compression.fp16}  # Horovod's allreduce, of float32 or fp16


def dataset(folder, part, samples=None):
    """Make a data set of images, uint8[28, 28, 1], and labels."""
    images, labels = read_idx(folder, f"{part}-images-idx3-ubyte"), read_idx(folder, f"{part}-labels-idx1-ubyte")
    return tf.data.Dataset.from_tensor_slices((images[:samples, ..., None], labels[:samples].astype("i4")))


def make_model():
    """Make a network of 1.2 million parameters, nearly all of them in the first fully connected layer."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Rescaling(1 / 90, -0.81),
            layers.Conv2D(16, 4, strides=2, padding="same", activation="relu"),
            layers.Conv2D(48, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(512, activation="relu"),
            layers.Dense(10),
        ]
    )


class Log(keras.callbacks.Callback):
    """Writes a JSON line after each epoch. It belongs on every rank, after MetricAverageCallback."""

    def __init__(self, optimizer, compression, path):
        super().__init__()
        self.optimizer, self.path = optimizer, path
        self.ring = (
            2 * (hvd.size() - 1) / hvd.size()
        )  # how many times an allreduce sends its payload; an allgather: size - 1
        self.gather = self.ring if compression in HOROVOD else hvd.size() - 1

    def on_epoch_begin(self, epoch, logs=None):
        self.ends = []  # of the steps; the first step, which may trace, is not counted

    def on_train_batch_end(self, batch, logs=None):
        self.ends.append(time.perf_counter())

    def on_epoch_end(self, epoch, logs=None):
        weights = b"".join(weight.tobytes() for weight in self.model.get_weights())
        result = {
            "epoch": epoch + 1,
            "accuracy": logs["val_accuracy"],
            "loss": logs["val_loss"],
            "seconds_per_step": (self.ends[-1] - self.ends[0]) / max(1, len(self.ends) - 1),
            "checksums": hvd.allgather_object(zlib.crc32(weights)),  # must be equal on all ranks
            **self.volume(),
        }
        if hvd.rank() == 0:
            with open(self.path, "a") as log:
                print(json.dumps(result), file=log)

    def volume(self):
        """Return what this rank sent since the start; empty if it is the only one."""
        stats = self.optimizer.compression_stats()
        if not stats["steps"]:
            return {}
        layers = stats["compressed"]
        sent = self.ring * (stats["bytes_out"] - layers["bytes_out"]) + self.gather * layers["bytes_out"]
        return {
            "steps": stats["steps"],
            "bytes_sent": round(sent),
            "ratio": self.ring * stats["bytes_in"] / sent,
            "compressed_layers_ratio": layers["ratio"],
        }


def main(args):
    hvd.init()
    threads = max(1, len(os.sched_getaffinity(0)) // hvd.local_size())
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    keras.utils.set_random_seed(args.seed)
    train = dataset(args.data, "train", args.train_samples)
    train = train.shuffle(len(train), args.seed).shard(hvd.size(), hvd.rank()).batch(args.batch_size, drop_remainder=True)
    test = dataset(args.data, "t10k").shard(hvd.size(), hvd.rank()).batch(500)
    model = make_model()
    optimizer = DistributedOptimizer(
        keras.optimizers.SGD(args.lr, momentum=0.9, nesterov=True),
        compression=HOROVOD.get(args.compression, args.compression),
        memory=args.memory,
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False)  # XLA cannot call Horovod
    callbacks = [
        BroadcastGlobalVariablesCallback(0),
        MetricAverageCallback(),
        CompressionStatsCallback(),
        keras.callbacks.LearningRateScheduler(lambda epoch, lr: args.lr * (1 - epoch / args.epochs)),
        LearningRateWarmupCallback(args.lr, warmup_epochs=1),
        Log(optimizer, args.compression, args.log_file),
    ]
    if hvd.rank() == 0:
        callbacks.append(TqdmCallback(verbose=2))
    model.fit(train.prefetch(2), epochs=args.epochs, validation_data=test, callbacks=callbacks, shuffle=False, verbose=0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train on Fashion-MNIST with compressed gradients.")
    parser.add_argument("--data", required=True, help="folder of the data set")
    parser.add_argument(
        "--compression", default="topk:0.01/rice/qsgd:7", help="a spec, or Horovod's allreduce: none (float32), fp16"
    )
    parser.add_argument("--memory", default="residual", help="residual or none")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64, help="per rank")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate after the warm-up; decays with every epoch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train-samples", type=int, help="use only this many samples")
    parser.add_argument("--log-file", default=os.devnull, help="write a JSON line per epoch")
    main(parser.parse_args())
