"""Train a convolutional network on Fashion-MNIST with Lightning and compressed gradients.

    python examples/lightning_fashion_mnist.py --data DIR

Lightning starts the processes. It differs in two lines from a script without compression: the import, and the strategy.
"""

import argparse
import os

import torch
import torch.nn.functional as F
from fashion_mnist import load, small
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader, TensorDataset

from grace_ext.adapters.lightning import CompressedDDPStrategy


class Classifier(LightningModule):
    """The network, its loss and its optimizer."""

    def __init__(self, lr):
        super().__init__()
        self.network, self.lr = small(), lr

    def training_step(self, batch, number):
        images, labels = batch
        return F.cross_entropy(self.network(images), labels)

    def validation_step(self, batch, number):
        images, labels = batch
        self.log("accuracy", (self.network(images).argmax(1) == labels).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), self.lr)


def main(args):
    seed_everything(args.seed, verbose=False)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // args.processes))
    train = TensorDataset(*(tensor[: args.train_samples] for tensor in load(args.data, "train")))
    test = DataLoader(TensorDataset(*load(args.data, "t10k")), 500)
    strategy = CompressedDDPStrategy(args.compression)
    trainer = Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=args.processes,
        strategy=strategy,
        max_epochs=args.epochs,
        gradient_clip_val=1.0,
        default_root_dir=args.folder,
        enable_checkpointing=args.folder is not None,
        logger=False,
    )
    loader = DataLoader(train, args.batch_size, shuffle=True, drop_last=True)
    trainer.fit(Classifier(args.lr), loader, test, ckpt_path=args.resume)
    if trainer.is_global_zero:
        ratio = strategy.compression_state.compression_stats()["ratio"]
        print(f"test accuracy {trainer.callback_metrics['accuracy']:.2%}, {ratio:.0f} times fewer bytes")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="folder of the data set")
    parser.add_argument("--compression", help="a spec; by default that of the optimizer")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64, help="per rank")
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train-samples", type=int, help="use only this many samples")
    parser.add_argument("--folder", help="where checkpoints are saved")
    parser.add_argument("--resume", metavar="CKPT", help="a checkpoint to go on from")
    main(parser.parse_args())
