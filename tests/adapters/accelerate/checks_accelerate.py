"""What is checked inside the ranks of one job: models that Accelerate prepares."""

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs, DistributedType, set_seed
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
from grace_ext.adapters.accelerate import compress_gradients

NEVER_CALLED = "the hook of a CompressionState was never called"


def prepared(options, make=adamw, seed=1, unused=False, **settings):
    """An Accelerator, what it prepared, and the models' states; options None: without compression."""
    for state in (AcceleratorState, GradientState):  # which hold the settings of the first Accelerator of a process
        state._reset_state()
    accelerator = Accelerator(cpu=True, **settings)
    models = None if options is None else compress_gradients(accelerator, **options)
    net = Net(seed, unused)
    set_seed(3)  # of the sampler
    data = torch.utils.data.DataLoader(Samples(200), BATCH, shuffle=True)
    return accelerator, models, net, *accelerator.prepare(net, make(net), data)


def run(accelerator, model, optimizer, data, steps, skip=0, clip=0.5):
    """Each step has as many batches as the Accelerator accumulates."""
    passes = accelerator.gradient_accumulation_steps
    batches = iter(accelerator.skip_first_batches(data, skip * passes))
    for _ in range(steps * passes):
        batch = next(batches)
        with accelerator.accumulate(model):
            loss = loss_of(model(batch["x"]), batch["labels"])
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()


def trained(options, make=adamw, steps=4, unused=False, **settings):
    accelerator, models, net, *parts = prepared(options, make, unused=unused, **settings)
    run(accelerator, *parts, steps)
    return same_on_all_ranks(flat(net)), models.states[0] if models else None, net


@check_under_every_launcher
def the_default_is_that_of_the_optimizer():
    for make, memory in ((adamw, "adam"), (sgd, "residual")):
        weights, state, _ = trained({}, make)
        assert torch.isfinite(weights).all()
        assert memories(state) == {memory}
        assert state.compression_stats()["steps"] == 4
        assert "first.weight" in [name for part in state.state_dict()["layout"] for name in part]


def given_to_accelerate(net, optimizer, options):
    """See check_containers."""
    accelerator = Accelerator(cpu=True)
    compress_gradients(accelerator, **options)
    model, optimizer = accelerator.prepare(net, optimizer)
    for _ in range(STEPS):
        accelerator.backward(model()["loss"])
        optimizer.step()
        optimizer.zero_grad()


@check_under_every_launcher
def containers_are_those_of_ddp():
    check_containers(given_to_accelerate)


@check
def options_do_what_they_do_in_ddp():
    check_options(given_to_accelerate)


@check
def ways_of_training_are_those_of_accelerate():
    """Lossless, it is what Accelerate gives by itself: accumulation, clipping, bf16, unused parameters, other orders."""
    unused = {"kwargs_handlers": [DistributedDataParallelKwargs(find_unused_parameters=True)], "unused": True}
    for settings in ({"gradient_accumulation_steps": 2}, {"mixed_precision": "bf16"}, unused):
        ours, state, net = trained({"compression": "dense/deflate", "memory": "none"}, sgd, **settings)
        plain, _, _ = trained(None, sgd, **settings)
        torch.testing.assert_close(ours, plain, rtol=0, atol=1e-6)
        assert state.compression_stats()["steps"] == 4
        assert all(net.in_bf16) == ("mixed_precision" in settings)
        trained({}, **settings)


def resumed(options, make, folder, break_files=lambda folder: None, **settings):
    """The weights of a training that stopped in the middle."""
    accelerator, models, net, *parts = prepared(options, make, **settings)
    run(accelerator, *parts, 3)
    accelerator.save_state(folder)
    dist.barrier()
    if accelerator.is_main_process:
        assert len([*folder.glob("grace_ext_*.pt")]) == dist.get_world_size()
        break_files(folder)
    dist.barrier()
    accelerator, models, net, *parts = prepared(options, make, seed=9, **settings)
    accelerator.load_state(folder)
    run(accelerator, *parts, 3, skip=3)
    return same_on_all_ranks(flat(net)), models.states[0]


@check_under_every_launcher
def a_checkpoint_goes_on_bit_by_bit():
    for make in (adamw, sgd):
        for number, options in enumerate(METHODS[: 2 if make is adamw else None]):
            settings = {"gradient_accumulation_steps": 1 + number % 2}
            expected, state, _ = trained(options, make, steps=6, **settings)
            weights, again = resumed(options, make, shared_folder(f"resumed-{make.__name__}-{number}"), **settings)
            assert torch.equal(weights, expected), (make, options)
            assert again.state_dict()["step"] == state.state_dict()["step"] == 6


@check
def memories_that_a_checkpoint_lacks_start_from_zero():
    def remove(folder):
        for path in folder.glob("grace_ext_*.pt"):
            path.unlink()

    with Log() as log:
        weights, _ = resumed({"compression": TOPK}, sgd, shared_folder("without"), remove)
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
        resumed({"compression": TOPK}, sgd, shared_folder("more"), one_rank_more)
    if dist.get_rank() == 0:
        assert f"the checkpoint is of {ranks + 1} ranks, and there are {ranks} now: memories were redistributed" in log.lines


def train_two(nets, *optimizers, folder=None, first=0, options=None):
    """The weights of two models after four steps, and the states; a single optimizer steps when both have their gradients."""
    accelerator = Accelerator(cpu=True)
    models = compress_gradients(accelerator, **options or {})
    first_model, second_model, *optimizers = accelerator.prepare(*nets, *optimizers)
    if first:
        accelerator.load_state(folder)
    for step in range(first, 4):
        batch = Samples(8 * dist.get_world_size())[slice(dist.get_rank() * 8, None)]
        for model, optimizer in (
            (first_model, optimizers[0] if len(optimizers) > 1 else None),
            (second_model, optimizers[-1]),
        ):
            accelerator.backward(loss_of(model(batch["x"][:8] + step), batch["labels"][:8]))
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
        if step == 1 and folder and not first:
            accelerator.save_state(folder)
    return torch.cat([same_on_all_ranks(flat(net)) for net in nets]), models.states


@check
def several_models_have_their_own_states():
    def train(**given):
        nets = Net(1), Net(2)
        weights, states = train_two(nets, adamw(nets[0]), sgd(nets[1]), folder=shared_folder("several"), **given)
        assert [memories(state) for state in states] == [{"adam"}, {"residual"}]
        return weights

    assert torch.equal(train(), train(first=2))


def sharing():
    nets = Net(1), Net(2)
    nets[1].first = nets[0].first
    return nets


def sharing_all():
    net = Net(1)
    return net, torch.nn.Sequential(net)


@check
def models_that_share_parameters_have_their_own_states():
    for make, memory, make_nets in ((adamw, "adam", sharing), (sgd, "residual", sharing), (sgd, "residual", sharing_all)):
        folder = shared_folder(f"{make_nets.__name__}-{memory}")

        def train(make=make, memory=memory, make_nets=make_nets, folder=folder, **given):
            nets = make_nets()
            weights, states = train_two(nets, *map(make, nets), folder=folder, **given)
            assert [memories(state) for state in states] == [{memory}] * 2
            assert len([*folder.glob("grace_ext_*.pt")]) == 2 * dist.get_world_size()
            return weights

        assert torch.equal(train(), train(first=2)), (memory, make_nets)


@check
def models_may_have_one_optimizer():
    for make in (adamw, sgd):
        nets, others = (Net(1), Net(2)), (Net(1), Net(2))
        apart, _ = train_two(nets, *map(make, nets))
        assert torch.equal(apart, train_two(others, make(torch.nn.ModuleList(others)))[0])
    nets = sharing()
    with raises(ConfigError, "two states with memory 'adam' would make the step of 'first."):
        train_two(nets, adamw(torch.nn.ModuleList(nets)))
    nets = sharing_all()
    with raises(ConfigError, "two states with memory 'adam' would make the step of '0.first."):
        train_two(nets, *map(adamw, nets))
    nets = sharing()
    train_two(nets, adamw(torch.nn.ModuleList(nets)), options={"compression": TOPK})


@check
def a_model_may_be_prepared_once_more():
    """As after free_memory(): the first state leaves the optimizer alone."""
    accelerator, models, net, *parts = prepared({})
    run(accelerator, *parts, 2)
    first = models.states[0]
    accelerator.free_memory()
    optimizer = parts[1].optimizer
    model, optimizer = accelerator.prepare(net, optimizer)
    run(accelerator, model, optimizer, parts[2], 2)
    assert len(models.states) == 1 and models.states[0] is not first
    assert models.states[0].compression_stats()["steps"] == 2
    same_on_all_ranks(flat(net))
    accelerator.free_memory()
    accelerator.prepare(torch.nn.Sequential(net), optimizer.optimizer)  # the same parameters in another module
    assert len(models.states) == 1 and models.states[0]._buckets is None


@check
def ranks_that_disagree_are_told():
    check_disagreement(trained)


@check
def what_cannot_be_is_refused():
    accelerator, _, net, model, optimizer, data = prepared({})
    with raises(ConfigError, "call compress_gradients() before prepare()"):
        compress_gradients(accelerator)
    accelerator.free_memory()
    with raises(ConfigError, "was called for this Accelerator already"):
        compress_gradients(accelerator)
    handler = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    with raises(ConfigError, "has comm_hook=fp16: a model takes one hook"):
        compress_gradients(Accelerator(cpu=True, kwargs_handlers=[handler]))
    accelerator = Accelerator(cpu=True)
    accelerator.state.distributed_type = DistributedType.FSDP  # as on accelerators; on CPU its settings are ignored
    with raises(ConfigError, "the Accelerator uses FSDP; gradients are compressed where it uses DistributedDataParallel"):
        compress_gradients(accelerator)
    AcceleratorState._reset_state()
    for options, error, text in (
        ({"compression": "topk:0.01/rise"}, ConfigError, "rice"),
        ({"memori": "none"}, TypeError, "unknown option 'memori'"),
        ({"optimizer": optimizer}, TypeError, "optimizer comes from the Accelerator"),
    ):
        with raises(error, text):
            compress_gradients(Accelerator(cpu=True), **options)
    accelerator = Accelerator(cpu=True)
    compress_gradients(accelerator)
    net = Net()
    model = accelerator.prepare(net)
    with raises(ConfigError, "prepare the optimizer with the same Accelerator"):
        accelerator.backward(loss_of(model(torch.ones(1, 48)), torch.zeros(1, dtype=torch.long)))
    accelerator = Accelerator(cpu=True)
    models = compress_gradients(accelerator)
    accelerator.ddp_handler = None
    net = Net()
    model, optimizer = accelerator.prepare(net, adamw(net))
    accelerator.backward(loss_of(model(torch.ones(1, 48)), torch.zeros(1, dtype=torch.long)))
    with raises(ConfigError, NEVER_CALLED):
        optimizer.step()
    trained({})  # of which the models above know nothing
    assert not models.states
