"""Train a convolutional network on Fashion-MNIST with Accelerate and compressed gradients.

    torchrun --standalone --nproc-per-node 2 examples/accelerate_fashion_mnist.py --data DIR

It differs in two lines from a script without compression: the import, and the call of compress_gradients. With --folder
another run goes on from the last epoch that is saved there.
"""

import argparse
import os

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from fashion_mnist import load, small
from torch.utils.data import DataLoader, TensorDataset

from grace_ext.adapters.accelerate import compress_gradients


def main(args):
    project = ProjectConfiguration(args.folder, automatic_checkpoint_naming=args.folder is not None)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), project_config=project)
    compressed = compress_gradients(accelerator, args.compression)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // accelerator.num_processes))
    set_seed(args.seed)
    module = small()
    optimizer = torch.optim.AdamW(module.parameters(), args.lr)
    train = TensorDataset(*(tensor[: args.train_samples] for tensor in load(args.data, "train")))
    test = DataLoader(TensorDataset(*load(args.data, "t10k")), 500)
    loader = DataLoader(train, args.batch_size, shuffle=True, drop_last=True)
    model, optimizer, loader, test = accelerator.prepare(module, optimizer, loader, test)
    first = 0
    if args.folder and os.path.isdir(os.path.join(args.folder, "checkpoints")):
        first = len(os.listdir(os.path.join(args.folder, "checkpoints")))
        accelerator.load_state()
        project.iteration = first
    for epoch in range(first, args.epochs):
        loader.set_epoch(epoch)
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if args.folder:
            accelerator.save_state()
        with torch.inference_mode():
            right = [accelerator.gather_for_metrics(module(images).argmax(1) == labels) for images, labels in test]
        accelerator.print(f"epoch {epoch + 1}: test accuracy {torch.cat(right).float().mean():.2%}")
    for state in compressed.states if first < args.epochs else ():
        accelerator.print(f"{state.compression_stats()['ratio']:.0f} times fewer bytes")
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="folder of the data set")
    parser.add_argument("--compression", help="a spec; by default that of the optimizer")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64, help="per rank")
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train-samples", type=int, help="use only this many samples")
    parser.add_argument("--folder", help="where checkpoints are")
    main(parser.parse_args())
