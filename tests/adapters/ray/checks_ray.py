"""What is checked inside the workers of one TorchTrainer: models that Ray Train prepares."""

import contextlib
import tempfile
import time
from pathlib import Path

import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from ray.train import Checkpoint, CheckpointUploadMode
from ray.train.v2._internal.execution.train_fn_utils import DistributedTrainFnUtils, set_train_fn_utils
from support.checking import check, check_under_every_launcher, raises
from support.framework_jobs import (
    BATCH,
    METHODS,
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
    loss_of,
    memories,
    same_on_all_ranks,
    sgd,
    shared_folder,
)

from grace_ext import ConfigError
from grace_ext.adapters.ray import compress_gradients

NEVER_CALLED = "the hook of a CompressionState was never called"


def prepared(options, make=adamw, seed=1, unused=False, checkpoint=None):
    """A model, its optimizer, a loader and the state, as in a training function that starts; options None: no compression."""
    set_train_fn_utils(DistributedTrainFnUtils())
    net = Net(seed, unused)
    model = ray.train.torch.prepare_model(net, parallel_strategy_kwargs={"find_unused_parameters": unused})
    optimizer = make(model)
    state = None if options is None else compress_gradients(model, optimizer, checkpoint=checkpoint, **options)
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder, "training.pt"), weights_only=True)
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    data = ray.train.torch.prepare_data_loader(torch.utils.data.DataLoader(Samples(200), BATCH, shuffle=True))
    return net, model, optimizer, data, state


def run(model, optimizer, data, steps, first=0, passes=1, bf16=False):
    """Each step has as many batches as `passes`, and clips what they add up to."""
    data.sampler.set_epoch(0)
    for number, batch in enumerate(data):
        if not first * passes <= number < (first + steps) * passes:
            continue
        last = number % passes == passes - 1
        with contextlib.nullcontext() if last else model.no_sync():
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                logits = model(batch["x"])
            (loss_of(logits, batch["labels"]) / passes).backward()
        if last:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()


def trained(options, make=adamw, steps=4, unused=False, **settings):
    net, *parts, state = prepared(options, make, unused=unused)
    run(*parts, steps, **settings)
    return same_on_all_ranks(flat(net)), state, net


def reported(net, optimizer, givers=(0,), **arguments):
    """The checkpoint that is kept of what these ranks give."""
    before = ray.train.get_checkpoint()
    if dist.get_rank() in givers:
        folder = tempfile.mkdtemp()
        torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, Path(folder, "training.pt"))
        ray.train.report({}, checkpoint=Checkpoint.from_directory(folder), **arguments)
    else:
        ray.train.report({}, **arguments)
    while (checkpoint := ray.train.get_checkpoint()) is None or checkpoint is before:
        time.sleep(0.01)  # it is uploaded behind our back
    dist.barrier()
    return checkpoint


@check_under_every_launcher
def the_default_is_that_of_the_optimizer():
    for make, memory in ((adamw, "adam"), (sgd, "residual")):
        weights, state, _ = trained({}, make)
        assert torch.isfinite(weights).all()
        assert memories(state) == {memory}
        assert state.compression_stats()["steps"] == 4
        assert "first.weight" in [name for part in state.state_dict()["layout"] for name in part]


def given_to_ray(net, optimizer, options):
    """See check_containers."""
    model = ray.train.torch.prepare_model(net)
    compress_gradients(model, optimizer, checkpoint=None, **options)
    for _ in range(STEPS):
        model()["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()


@check_under_every_launcher
def containers_are_those_of_ddp():
    check_containers(given_to_ray)


@check
def options_do_what_they_do_in_ddp():
    check_options(given_to_ray)


@check
def ways_of_training_are_those_of_ray():
    """Lossless, it is what Ray Train gives by itself: accumulation, clipping, bf16, unused parameters."""
    for settings in ({"passes": 2}, {"bf16": True}, {"unused": True}):
        ours, state, net = trained({"compression": "dense/deflate", "memory": "none"}, sgd, **settings)
        plain, _, _ = trained(None, sgd, **settings)
        torch.testing.assert_close(ours, plain, rtol=0, atol=1e-6)
        assert state.compression_stats()["steps"] == 4
        assert all(net.in_bf16) == ("bf16" in settings)
        trained({}, **settings)


def resumed(options, make, break_files=lambda folder: None, passes=1, **giving):
    """The weights of a training that stopped in the middle."""
    net, *parts, _ = prepared(options, make)
    run(*parts, 3, passes=passes)
    checkpoint = reported(net, parts[1], **giving)
    folder = Path(checkpoint.path)
    if dist.get_rank() == 0:
        assert sorted(path.name for path in folder.iterdir()) == sorted(
            [*(f"grace_ext_0_rank{rank}.pt" for rank in range(dist.get_world_size())), "training.pt"]
        )
        break_files(folder)
    dist.barrier()
    net, *parts, state = prepared(options, make, 9, checkpoint=checkpoint)
    run(*parts, 3, first=3, passes=passes)
    return same_on_all_ranks(flat(net)), state


@check_under_every_launcher
def a_checkpoint_goes_on_bit_by_bit():
    everyone = range(dist.get_world_size())
    ways = ({}, {"givers": everyone}, {"givers": (1,)}, {"checkpoint_upload_mode": CheckpointUploadMode.ASYNC})
    for make in (adamw, sgd):
        for number, options in enumerate(METHODS[: 2 if make is adamw else None]):
            expected, state, _ = trained(options, make, steps=6, passes=1 + number % 2)
            weights, again = resumed(options, make, passes=1 + number % 2, **ways[number])
            assert torch.equal(weights, expected), (make, options)
            assert again.state_dict()["step"] == state.state_dict()["step"] == 6


@check
def memories_that_a_checkpoint_lacks_start_from_zero():
    def remove(folder):
        for path in folder.glob("grace_ext_*.pt"):
            path.unlink()

    with Log() as log:
        weights, _ = resumed({"compression": TOPK}, sgd, remove)
    assert not torch.equal(weights, trained({"compression": TOPK}, sgd, steps=6)[0])
    assert ("the checkpoint has no state of grace_ext: memories start from zero" in log.lines) == (dist.get_rank() == 0)


@check
def a_checkpoint_of_another_number_of_ranks_is_redistributed():
    ranks = dist.get_world_size()

    def one_rank_more(folder):
        for rank in range(ranks):
            path = folder / f"grace_ext_0_rank{rank}.pt"
            saved = torch.load(path, weights_only=True) | {"ranks": ranks + 1}
            torch.save(saved, path)
        saved["memories"] = {ranks: saved["memories"][ranks - 1]}
        torch.save(saved, folder / f"grace_ext_0_rank{ranks}.pt")

    with Log() as log:
        resumed({"compression": TOPK}, sgd, one_rank_more)
    if dist.get_rank() == 0:
        assert f"the checkpoint is of {ranks + 1} ranks, and there are {ranks} now: memories were redistributed" in log.lines


@check
def several_models_have_their_own_states():
    def train(checkpoint, steps=4):
        set_train_fn_utils(DistributedTrainFnUtils())
        nets = Net(1), Net(2)
        models = [ray.train.torch.prepare_model(net) for net in nets]
        optimizers = adamw(models[0]), sgd(models[1])
        states = [compress_gradients(*each, checkpoint=checkpoint) for each in zip(models, optimizers, strict=True)]
        if checkpoint:
            saved = torch.load(Path(checkpoint.path, "training.pt"), weights_only=True)
            for part, state in zip((*nets, *optimizers), saved, strict=True):
                part.load_state_dict(state)
        for step in range(4 - steps, 4):
            batch = Samples(8 * dist.get_world_size())[slice(dist.get_rank() * 8, None)]
            for model, optimizer in zip(models, optimizers, strict=True):
                loss_of(model(batch["x"][:8] + step), batch["labels"][:8]).backward()
                optimizer.step()
                optimizer.zero_grad()
            if step == 1 and not checkpoint:
                folder = shared_folder("several")
                if dist.get_rank() == 0:
                    torch.save([part.state_dict() for part in (*nets, *optimizers)], folder / "training.pt")
                ray.train.report({}, checkpoint=Checkpoint.from_directory(folder) if dist.get_rank() == 0 else None)
                dist.barrier()
        assert [memories(state) for state in states] == [{"adam"}, {"residual"}]
        return torch.cat([same_on_all_ranks(flat(net)) for net in nets])

    expected = train(None)
    assert torch.equal(train(ray.train.get_checkpoint(), 2), expected)


@check
def a_model_may_be_prepared_once_more():
    """The first state leaves the optimizer alone, and the second one takes its place in checkpoints."""
    net, model, optimizer, data, first = prepared({})
    run(model, optimizer, data, 2)
    model = ray.train.torch.prepare_model(net)
    state = compress_gradients(model, optimizer, checkpoint=None)
    run(model, optimizer, data, 2)
    assert first.compression_stats()["steps"] == state.compression_stats()["steps"] == 2
    same_on_all_ranks(flat(net))
    kept = {path.name for path in Path(reported(net, optimizer).path).glob("grace_ext_*")}
    assert kept == {f"grace_ext_0_rank{rank}.pt" for rank in range(dist.get_world_size())}


@check
def ranks_that_disagree_are_told():
    check_disagreement(trained)


@check
def what_cannot_be_is_refused():
    net, model, optimizer, data, state = prepared({})
    with raises(ConfigError, "the model takes no hook"):
        compress_gradients(model, optimizer)
    plain = ray.train.torch.prepare_model(Net(), parallel_strategy=None)
    with raises(ConfigError, "register takes a DistributedDataParallel, not Net"):
        compress_gradients(plain, adamw(plain))
    model = ray.train.torch.prepare_model(Net())
    for options, error, text in (
        ({"compression": "topk:0.01/rise"}, ConfigError, "rice"),
        ({"memori": "none"}, TypeError, "unknown option 'memori'"),
        ({"process_group": None}, TypeError, "process_group comes from the model"),
        ({"checkpoint": "last"}, ConfigError, "checkpoint='last'; allowed: 'latest', None, a ray.train.Checkpoint"),
    ):
        with raises(error, text):
            compress_gradients(model, adamw(model), **options)
    stored = Checkpoint.from_directory(shared_folder("ray/job/stored"))
    run(*prepared({})[1:4], 2)
    with raises(ConfigError, "ray.train.report has no checkpoint on ranks [0"):
        ray.train.report(
            {}, checkpoint=stored if dist.get_rank() == 1 else None, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD
        )
    ray.train.report({}, checkpoint=stored, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)
    dist.barrier()
    assert len([*Path(stored.path).glob("grace_ext_*")]) == dist.get_world_size()


@check
def a_hook_that_is_not_called_is_noticed():
    net, model, optimizer, data, state = prepared({})
    loss_of(net(torch.ones(1, 48)), torch.zeros(1, dtype=torch.long)).backward()  # past the model that was prepared
    with raises(ConfigError, NEVER_CALLED):
        optimizer.step()
    state._release()
