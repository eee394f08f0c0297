"""What is checked inside the ranks of one job: CompressedDDPStrategy of Lightning."""

import pickle

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from support.checking import check, check_under_every_launcher, raises
from support.framework_jobs import (
    BATCH,
    METHODS,
    STEPS,
    TOPK,
    Given,
    Log,
    Net,
    Samples,
    adamw,
    check_containers,
    check_disagreement,
    check_options,
    flat,
    loss_of,
    memories,
    same_on_all_ranks,
    sgd,
    shared_folder,
)

from grace_ext import ConfigError
from grace_ext.adapters.lightning import CompressedDDPStrategy
from grace_ext.adapters.torch_ddp import CompressionState, comm_hook

EPOCH = 3  # steps


class Module(LightningModule):
    """A model for automatic optimization, with one optimizer or, by hand, with two."""

    def __init__(self, net, make=adamw, by_hand=False):
        super().__init__()
        self.net, self.make, self.automatic_optimization = net, make, not by_hand
        self.clipped = []

    def configure_optimizers(self):
        if self.automatic_optimization:
            return self.make(self.net)
        return adamw(self.net.first), adamw(torch.nn.ModuleList([self.net.second, self.net.last]))

    def training_step(self, batch, number):
        loss = loss_of(self.net(batch["x"]), batch["labels"])
        if self.automatic_optimization:
            return loss
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        return None

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        if gradient_clip_val:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
            self.clipped.append(torch.nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None]))


def trainer_for(strategy, epochs=1, folder=None, **settings):
    settings = {
        "accelerator": "cpu",
        "devices": dist.get_world_size(),
        "logger": False,
        "enable_checkpointing": folder is not None,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "limit_train_batches": EPOCH,
        "max_epochs": epochs,
        "callbacks": [ModelCheckpoint(folder, save_top_k=-1)] if folder else None,
    } | settings
    return Trainer(strategy=strategy, **settings)


def trained(
    options, make=adamw, epochs=1, seed=1, folder=None, resume=None, by_hand=False, unused=False, ddp=(), **settings
):
    """The parameters, the state and the module; options None: without compression."""
    strategy = DDPStrategy(**dict(ddp)) if options is None else CompressedDDPStrategy(**options, **dict(ddp))
    module = Module(Net(seed, unused), make, by_hand)
    data = torch.utils.data.DataLoader(Samples(200), BATCH, shuffle=True)
    trainer_for(strategy, epochs, folder, **settings).fit(module, data, ckpt_path=resume)
    return same_on_all_ranks(flat(module)), options is not None and strategy.compression_state, module


@check_under_every_launcher
def the_default_is_that_of_the_optimizer():
    for make, memory in ((adamw, "adam"), (sgd, "residual")):
        weights, state, _ = trained({}, make)
        assert torch.isfinite(weights).all()
        assert memories(state) == {memory}
        assert state.compression_stats()["steps"] == EPOCH
        assert "net.first.weight" in [name for part in state.state_dict()["layout"] for name in part]


class GivenModule(Given, LightningModule):
    """Given is the module itself, so its parameters have the names that they have in DDP."""

    def __init__(self, optimizer):
        super().__init__()
        self.made = optimizer

    def training_step(self, batch, number):
        return self()["loss"]

    def configure_optimizers(self):
        return self.made


def given_to_lightning(net, optimizer, options):
    """See check_containers."""
    module = GivenModule(optimizer)
    for name, p in net.named_parameters():
        setattr(module, name, p)
    strategy = CompressedDDPStrategy(**options)
    data = torch.utils.data.DataLoader(Samples(100), BATCH)
    trainer_for(strategy, limit_train_batches=STEPS).fit(module, data)
    net.step = module.step


@check_under_every_launcher
def containers_are_those_of_ddp():
    check_containers(given_to_lightning)


@check
def options_do_what_they_do_in_ddp():
    check_options(given_to_lightning)


@check
def ways_of_training_are_those_of_lightning():
    """Lossless, it is what Lightning gives by itself: accumulation, clipping, bf16, unused parameters, manual steps."""
    for settings in (
        {"accumulate_grad_batches": 2, "limit_train_batches": 2 * EPOCH, "gradient_clip_val": 0.1},
        {"precision": "bf16-mixed"},
        {"ddp": {"find_unused_parameters": True}, "unused": True},
        {"ddp": {"gradient_as_bucket_view": True, "static_graph": True}},
        {"by_hand": True},
    ):
        ours, state, module = trained({"compression": "dense/deflate", "memory": "none"}, sgd, **settings)
        plain, _, _ = trained(None, sgd, **settings)
        torch.testing.assert_close(ours, plain, rtol=0, atol=1e-5 if "by_hand" in settings else 1e-6)
        assert state.compression_stats()["steps"] == EPOCH
        assert all(module.net.in_bf16) == ("precision" in settings)
        _, state, module = trained({}, **settings)
        assert memories(state) == {"adam"}
        if "gradient_clip_val" in settings:  # inside the step, and of all parameters, those of the memory too
            assert len(module.clipped) == EPOCH and max(module.clipped) < 0.1001, module.clipped


@check_under_every_launcher
def a_checkpoint_goes_on_bit_by_bit():
    for make in (adamw, sgd):
        for number, options in enumerate(METHODS[: 2 if make is adamw else None]):
            settings = {"accumulate_grad_batches": 1 + number % 2, "limit_train_batches": EPOCH * (1 + number % 2)}
            settings["gradient_clip_val"] = 0.5
            folder = shared_folder(f"resumed-{make.__name__}-{number}")
            expected, state, _ = trained(options, make, 2, folder=folder, **settings)
            path = folder / f"epoch=0-step={EPOCH}.ckpt"
            saved = torch.load(path, weights_only=True)["grace_ext"]
            assert sorted(saved["memories"]) == list(range(dist.get_world_size())), saved["memories"].keys()
            weights, again, _ = trained(options, make, 2, seed=9, resume=path, **settings)
            assert torch.equal(weights, expected), (make, options)
            assert again.state_dict()["step"] == state.state_dict()["step"] == 2 * EPOCH


@check
def memories_that_a_checkpoint_lacks_start_from_zero():
    folder = shared_folder("without")
    expected, _, _ = trained({"compression": TOPK}, sgd, 2, folder=folder)
    path = folder / f"epoch=0-step={EPOCH}.ckpt"
    if dist.get_rank() == 0:
        checkpoint = torch.load(path, weights_only=True)
        del checkpoint["grace_ext"]
        torch.save(checkpoint, path)
    dist.barrier()
    with Log() as log:
        weights, _, _ = trained({"compression": TOPK}, sgd, 2, seed=9, resume=path)
    assert not torch.equal(weights, expected)
    assert ("the checkpoint has no state of grace_ext: memories start from zero" in log.lines) == (dist.get_rank() == 0)
    folder = shared_folder("weights")
    trained({}, callbacks=[ModelCheckpoint(folder, save_weights_only=True)], enable_checkpointing=True)
    dist.barrier()
    assert all("grace_ext" not in torch.load(path, weights_only=True) for path in folder.glob("*.ckpt"))


@check
def a_strategy_may_fit_again():
    strategy = CompressedDDPStrategy()
    module = Module(Net())
    data = torch.utils.data.DataLoader(Samples(200), BATCH)
    trainer = trainer_for(strategy)
    trainer.fit(module, data)
    first = strategy.compression_state
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, data)
    assert strategy.compression_state is not first
    assert strategy.compression_state.compression_stats()["steps"] == EPOCH
    same_on_all_ranks(flat(module))


@check
def ranks_that_disagree_are_told():
    check_disagreement(trained)


@check
def what_cannot_be_is_refused():
    for options, error, text in (
        ({"compression": "topk:0.01/rise"}, ConfigError, "rice"),
        ({"memori": "none"}, TypeError, "unknown option 'memori'; allowed: compression, "),
        ({"ddp_comm_hook": comm_hook}, ConfigError, "ddp_comm_hook="),
        ({"find_unused_parameter": True}, TypeError, "unknown option 'find_unused_parameter'"),
    ):
        with raises(error, text):
            CompressedDDPStrategy(**options)
    strategy = pickle.loads(pickle.dumps(CompressedDDPStrategy(TOPK, memory="none")))  # as starting by spawn does
    assert strategy.compression_state is None
    # What CompressedDDPStrategy is for: Lightning's own strategy drops the hook without a word.
    state = CompressionState()
    strategy = DDPStrategy(ddp_comm_state=state, ddp_comm_hook=comm_hook)
    with raises(ConfigError, "use grace_ext.adapters.lightning.CompressedDDPStrategy"):
        trainer_for(strategy).fit(Module(Net()), torch.utils.data.DataLoader(Samples(200), BATCH))
