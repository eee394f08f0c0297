"""Train a perceptron on Fashion-MNIST with JAX, Optax and compressed gradients.

    mpirun -np 2 python examples/jax_fashion_mnist.py --data DIR

It differs in two lines from a script for one process: the import, and exchange_gradients() in the chain; and each process takes
other images. With --folder another run goes on from the last epoch that is saved there.
"""

import argparse
import os
import pickle
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _idx import read_idx
from mpi4py import MPI

from grace_ext.adapters.jax import exchange_gradients

WIDTHS = (784, 512, 512, 10)


def load(folder, part, samples=None):
    """Load images, float32[n, 784] with mean 0 and variance 1 over the training set, and labels, int32[n]."""
    images, labels = read_idx(folder, f"{part}-images-idx3-ubyte"), read_idx(folder, f"{part}-labels-idx1-ubyte")
    images = (images[:samples].reshape(-1, WIDTHS[0]).astype(np.float32) / 255 - 0.286) / 0.353
    return images, labels[:samples].astype(np.int32)


def make_model(seed):
    """Make the parameters, the same on all ranks."""
    keys = jax.random.split(jax.random.key(seed), len(WIDTHS) - 1)
    return [
        {"kernel": jax.random.normal(key, (before, after)) * jnp.sqrt(2 / before), "bias": jnp.zeros(after)}
        for key, before, after in zip(keys, WIDTHS[:-1], WIDTHS[1:], strict=True)
    ]


def logits_of(params, images):
    *hidden, last = params
    for layer in hidden:
        images = jax.nn.relu(images @ layer["kernel"] + layer["bias"])
    return images @ last["kernel"] + last["bias"]


def loss_of(params, images, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits_of(params, images), labels).mean()


def main(args):
    comm = MPI.COMM_WORLD
    rank, ranks = comm.rank, comm.size
    images, labels = load(args.data, "train", args.train_samples)
    test_images, test_labels = load(args.data, "t10k")
    exchange = exchange_gradients(args.compression, seed=args.seed)
    optimizer = optax.chain(exchange, optax.sgd(args.lr, momentum=0.9))
    params = make_model(args.seed)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, images, labels):
        loss, gradients = jax.value_and_grad(loss_of)(params, images, labels)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    correct = jax.jit(lambda params, images, labels: (logits_of(params, images).argmax(1) == labels).sum())
    first, training, memory = 0, None, None
    if args.folder:
        os.makedirs(args.folder, exist_ok=True)
        training, memory = (os.path.join(args.folder, name) for name in ("training.pickle", f"grace_ext_rank{rank}.npz"))
        if os.path.exists(memory):
            with open(training, "rb") as file:
                first, params, state = pickle.load(file)
            exchange.load(memory)
    batches = len(images) // (args.batch_size * ranks)
    for epoch in range(first, args.epochs):
        began = time.perf_counter()
        order = np.random.default_rng([args.seed, epoch]).permutation(len(images))  # the same on all ranks
        for batch in order[: batches * ranks * args.batch_size].reshape(batches, ranks, args.batch_size)[:, rank]:
            params, state, loss = step(params, state, images[batch], labels[batch])
        accuracy = correct(params, test_images, test_labels) / len(test_labels)
        if args.folder:
            exchange.save(memory)
            if rank == 0:
                with open(training, "wb") as file:
                    pickle.dump((epoch + 1, *jax.device_get((params, state))), file)
            comm.Barrier()
        if rank == 0:
            print(f"epoch {epoch + 1}: test accuracy {accuracy:.2%}, {time.perf_counter() - began:.1f} s", flush=True)
    if rank == 0 and ranks > 1 and first < args.epochs:
        print(f"{exchange.compression_stats()['ratio']:.0f} times fewer bytes")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="folder of the data set")
    parser.add_argument("--compression", help="a spec (default: topk:0.01/rice/qsgd:7)")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64, help="per rank")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train-samples", type=int, help="use only this many samples")
    parser.add_argument("--folder", help="where to save after each epoch, and what to go on from")
    main(parser.parse_args())
