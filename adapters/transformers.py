"""Compressed gradients for the Trainer of Hugging Face Transformers.

trainer = Trainer(model, arguments, train_dataset=dataset)
compress_gradients(trainer)
trainer.train()
"""

from typing import Any

from transformers import Trainer

from grace_ext import ConfigError
from grace_ext.pipeline.compressor import Compressor

from . import accelerate
from ._common.versions import check_version
from .accelerate import CompressedModels

__all__ = ["CompressedModels", "compress_gradients"]


def compress_gradients(
    trainer: Trainer, compression: str | dict | Compressor | None = None, **options: Any
) -> CompressedModels:
    """Compress the gradients of a Trainer's model, in all its calls of `train`.

    The Trainer's arguments do what they do without it: accumulation, clipping, bf16, activation checkpointing, ddp_*. The
    optimizer is known when training begins, so the default AdamW gets the default for AdamW. Checkpoints have a file of each
    rank beside the optimizer's, which resume_from_checkpoint reads: training goes on as if it had not been interrupted.

    Args:
        trainer: The Trainer, or an object of a class derived from it, before `train` and `evaluate`.
        compression: See CompressionOptions.
        **options: See grace_ext.adapters.accelerate.compress_gradients.

    Returns:
        The model's state, once training has begun.

    Raises:
        ConfigError: Transformers or Accelerate is of a version that is not supported; the Trainer does not use
            DistributedDataParallel, or has trained already; or CompressionState raises it.
        TypeError: An option is unknown.
    """
    check_version("transformers")
    if trainer.accelerator._models:
        raise ConfigError("the Trainer has used its model already: call compress_gradients() before train() and evaluate()")
    models = accelerate.compress_gradients(trainer.accelerator, compression, **options)
    make_accelerator = trainer.create_accelerator_and_postprocess
    save, load = trainer._save_optimizer_and_scheduler, trainer._load_optimizer_and_scheduler

    def make_accelerator_and_compress() -> None:  # a search for hyperparameters makes one for each trial
        make_accelerator()
        models._follow(trainer.accelerator)

    def save_with_memories(folder: str) -> None:
        save(folder)
        models._save(folder)

    def load_with_memories(folder: str | None) -> None:
        load(folder)
        if folder is not None:
            models._load(folder)

    trainer.create_accelerator_and_postprocess = make_accelerator_and_compress
    trainer._save_optimizer_and_scheduler = save_with_memories
    trainer._load_optimizer_and_scheduler = load_with_memories
    return models
