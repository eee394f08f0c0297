"""What is checked inside the ranks of one job: the Trainer of Transformers."""

import shutil

import torch
import torch.distributed as dist
from support.checking import check, check_under_every_launcher, raises
from support.framework_jobs import (
    BATCH,
    STEPS,
    TOPK,
    Log,
    Net,
    Samples,
    adamw,
    check_containers,
    check_disagreement,
    check_options,
    flat,
    memories,
    same_on_all_ranks,
    sgd,
    shared_folder,
)
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from grace_ext import ConfigError
from grace_ext.adapters.transformers import compress_gradients

WORDS, LENGTH = 80, 16
LOSSLESS = {"compression": "dense/deflate", "memory": "none"}


class Text(torch.utils.data.Dataset):
    """Sequences in which a word follows from the one before it, more often than not."""

    def __init__(self, size=400):
        generator = torch.Generator().manual_seed(0)
        self.words = torch.randint(0, WORDS, (size, LENGTH), generator=generator)
        self.words[:, 1::2] = (self.words[:, ::2] * 7 + 3) % WORDS

    def __len__(self):
        return len(self.words)

    def __getitem__(self, number):
        return {"input_ids": self.words[number], "labels": self.words[number]}


def gpt2(seed=1):
    """From a configuration, with dropout, so that the random state of each rank matters."""
    torch.manual_seed(seed)
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=48, n_layer=2, n_head=2))


def trainer_for(net, folder, data=None, optimizer=None, **settings):
    settings = {
        "per_device_train_batch_size": BATCH,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "ddp_backend": "gloo",
        "seed": 3,
    } | settings
    arguments = TrainingArguments(str(folder), **settings)
    return Trainer(net, arguments, train_dataset=data or Text(), optimizers=(optimizer, None))


def trained(options, steps=4, net=None, folder=None, make=None, resume=None, **settings):
    """The parameters, the state and the Trainer; options None: without compression."""
    net = net or gpt2()
    trainer = trainer_for(net, folder or shared_folder("out"), optimizer=make and make(net), max_steps=steps, **settings)
    models = None if options is None else compress_gradients(trainer, **options)
    trainer.train(resume_from_checkpoint=resume)
    return same_on_all_ranks(flat(net)), models.states[0] if models else None, trainer


@check_under_every_launcher
def the_default_is_that_of_the_optimizer():
    """The Trainer makes an AdamW itself, when training begins."""
    for make, memory in ((None, "adam"), (sgd, "residual")):
        weights, state, trainer = trained({}, make=make)
        assert torch.isfinite(weights).all()
        assert memories(state) == {memory}
        assert state.compression_stats()["steps"] == 4
        assert "transformer.wte.weight" in [name for part in state.state_dict()["layout"] for name in part]
    assert trainer.accelerator.ddp_handler.find_unused_parameters  # as the Trainer sets it


def given_to_the_trainer(net, optimizer, options):
    """See check_containers."""
    settings = {"max_grad_norm": 0, "ddp_find_unused_parameters": False}  # as in a loop that does neither
    trainer = trainer_for(net, shared_folder("out"), Samples(100), optimizer, max_steps=STEPS, **settings)
    compress_gradients(trainer, **options)
    trainer.train()


@check_under_every_launcher
def containers_are_those_of_ddp():
    check_containers(given_to_the_trainer)


@check
def options_do_what_they_do_in_ddp():
    check_options(given_to_the_trainer)


@check
def ways_of_training_are_those_of_the_trainer():
    """Lossless, it is what the Trainer gives by itself: accumulation, clipping, bf16, checkpointing of activations."""
    for settings in (
        {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1},
        {"bf16": True, "ddp_find_unused_parameters": False},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
        {"warmup_steps": 2, "lr_scheduler_type": "linear"},
    ):
        ours, state, _ = trained(LOSSLESS, make=sgd, **settings)
        plain, _, _ = trained(None, make=sgd, **settings)
        torch.testing.assert_close(ours, plain, rtol=0, atol=2e-4 if "bf16" in settings else 2e-6)
        assert state.compression_stats()["steps"] == 4
    net = Net(unused=True)
    trainer = trainer_for(net, shared_folder("out"), Samples(100), max_steps=3)
    compress_gradients(trainer)
    trainer.train()
    same_on_all_ranks(flat(net))


def resumed(options, folder, change=lambda folder: None, **settings):
    trained(options, 3, folder=folder, save_strategy="steps", save_steps=3, **settings)
    dist.barrier()
    if dist.get_rank() == 0:
        change(folder / "checkpoint-3")
    dist.barrier()
    return trained(options, 6, gpt2(seed=9), folder, resume=str(folder / "checkpoint-3"), **settings)


@check_under_every_launcher
def a_checkpoint_goes_on_bit_by_bit():
    for number, (options, settings) in enumerate(
        (
            ({}, {"gradient_accumulation_steps": 2}),
            ({"compression": TOPK}, {"make": sgd}),
            ({"compression": "powersgd:2"}, {"make": sgd, "bf16": True}),
        )
    ):
        expected, state, _ = trained(options, 6, **settings)
        weights, again, _ = resumed(options, shared_folder(f"resumed-{number}"), **settings)
        assert torch.equal(weights, expected), options
        assert again.state_dict()["step"] == state.state_dict()["step"] == 6


@check
def memories_that_a_checkpoint_lacks_start_from_zero():
    def remove(folder):
        for path in folder.glob("grace_ext_*.pt"):
            path.unlink()

    folder = shared_folder("without")
    with Log() as log:
        weights, _, _ = resumed({"compression": TOPK}, folder, remove, make=sgd)
    assert not torch.equal(weights, trained({"compression": TOPK}, 6, make=sgd)[0])
    assert ("the checkpoint has no state of grace_ext: memories start from zero" in log.lines) == (dist.get_rank() == 0)
    shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()
    folder = shared_folder("weights")
    trained({}, 3, folder=folder, save_strategy="steps", save_steps=3, save_only_model=True)
    assert not list(folder.glob("*/grace_ext_*.pt"))


@check
def a_trainer_may_train_again():
    """With the same optimizer, and from its own checkpoint."""
    folder = shared_folder("again")
    expected, _, _ = trained({}, 6)
    _, state, trainer = trained({}, 4, folder=folder, save_strategy="steps", save_steps=2)
    trainer.args.max_steps = 6
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert torch.equal(same_on_all_ranks(flat(trainer.model)), expected)
    assert state.state_dict()["step"] == 6


@check
def a_search_makes_accelerators_of_its_own():
    net = Net()
    trainer = trainer_for(net, shared_folder("out"), Samples(100), max_steps=2)
    models = compress_gradients(trainer)
    trainer.create_accelerator_and_postprocess()
    trainer.train()
    assert [state.compression_stats()["steps"] for state in models.states] == [2]
    same_on_all_ranks(flat(net))


@check
def ranks_that_disagree_are_told():
    check_disagreement(trained)


@check
def what_cannot_be_is_refused():
    _, _, trainer = trained({})
    with raises(ConfigError, "call compress_gradients() before train() and evaluate()"):
        compress_gradients(trainer)
    trainer = trainer_for(Net(), shared_folder("out"), Samples(100), max_steps=2)
    for options, error, text in (
        ({"compression": "topk:0.01/rise"}, ConfigError, "rice"),
        ({"memori": "none"}, TypeError, "unknown option 'memori'"),
        ({"named_parameters": ()}, TypeError, "named_parameters comes from the Accelerator"),
    ):
        with raises(error, text):
            compress_gradients(trainer, **options)
    models = compress_gradients(trainer)
    with raises(ConfigError, "was called for this Accelerator already"):
        compress_gradients(trainer)
    trainer.accelerator.ddp_handler = None  # as a version of the Trainer may do that sets its own
    with raises(ConfigError, "the hook of a CompressionState was never called"):
        trainer.train()
    assert not models.states
    _, state, _ = trained({"compression": TOPK}, make=adamw)
    assert memories(state) == {"residual"}
