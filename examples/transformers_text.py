"""Train a small GPT-2 on the bytes of Python's language reference, with the Trainer and compressed gradients.

    torchrun --standalone --nproc-per-node 2 examples/transformers_text.py

It differs in two lines from a script without compression: the import, and the call of compress_gradients. Nothing is
downloaded: the model is made from a configuration, and the text (pydoc's topics) comes with every Python.
"""

import argparse
import math
import os
import pydoc_data.topics

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from grace_ext.adapters.transformers import compress_gradients

LENGTH = 64  # bytes of a sample
HELD_OUT = 200  # samples at the end of the text


class Text(torch.utils.data.Dataset):
    """Samples of the text: the model predicts each next byte."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, number):
        return {"input_ids": self.samples[number], "labels": self.samples[number]}


def read_samples():
    """Return the text as int64[samples, LENGTH]."""
    text = "\n".join(pydoc_data.topics.topics.values()).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long().unfold(0, LENGTH, LENGTH)


def main(args):
    set_seed(args.seed)
    samples = read_samples()
    sizes = {"vocab_size": 256, "n_positions": LENGTH, "n_embd": args.width, "n_layer": args.layers, "n_head": 4}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    arguments = TrainingArguments(
        args.folder,
        per_device_train_batch_size=args.batch_size,
        learning_rate=args.lr,
        warmup_steps=args.steps // 10,
        lr_scheduler_type="cosine",
        max_steps=args.steps,
        save_strategy="steps" if args.save_steps else "no",
        save_steps=args.save_steps or args.steps,
        logging_steps=50,
        report_to="none",
        seed=args.seed,
        use_cpu=not torch.cuda.is_available(),
        ddp_backend="nccl" if torch.cuda.is_available() else "gloo",
    )
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // arguments.world_size))
    trainer = Trainer(
        GPT2LMHeadModel(config), arguments, train_dataset=Text(samples[:-HELD_OUT]), eval_dataset=Text(samples[-HELD_OUT:])
    )
    compressed = compress_gradients(trainer, args.compression)
    trainer.train(resume_from_checkpoint=args.resume)
    loss = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        ratios = [f"{state.compression_stats()['ratio']:.0f} times fewer bytes" for state in compressed.states]
        print(f"{args.steps} steps: {loss / math.log(2):.2f} bits a byte of held-out text", *ratios, sep=", ")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compression", help="a spec; by default that of the optimizer")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=16, help="per rank")
    parser.add_argument("--lr", type=float, default=0.002)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", default="build/transformers_text", help="where checkpoints are saved")
    parser.add_argument("--save-steps", type=int, help="steps between two checkpoints")
    parser.add_argument("--resume", metavar="CHECKPOINT", help="a checkpoint to go on from")
    main(parser.parse_args())
