"""What is checked inside the ranks of one job: state dicts, checkpoints, and loading them with another number of ranks."""

import copy
import io
import logging
import pickle

import horovod.torch as hvd
import numpy as np
import torch
from harness import batches, compressed, flat, same_on_all_ranks
from support.checking import check, check_under_every_launcher, raises

from grace_ext import ConfigError, ExchangeError


class Net(torch.nn.Module):
    """Its layers are used in another order than they are registered in, and do not fit into one bucket."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.last = torch.nn.Linear(64, 20)
        self.middle = torch.nn.Linear(64, 64)
        self.first = torch.nn.Linear(28 * 28, 64)

    def forward(self, x, whole=True):
        x = torch.relu(self.first(x.flatten(1)))
        return self.last(torch.relu(self.middle(x)) if whole else x)


def setup(spec, seed=1, inner=torch.optim.SGD, **options):
    net = Net(seed)
    kinds = {
        torch.optim.SGD: {"lr": 0.05, "momentum": 0.9},
        torch.optim.Adam: {"lr": 0.001},
        torch.optim.AdamW: {"lr": 0.001},
        torch.optim.Adagrad: {"lr": 0.01},
    }
    optimizer = compressed(spec, bucket_bytes=50_000, **options)(
        inner(net.parameters(), **kinds[inner]), net.named_parameters()
    )
    return net, optimizer


def steps(net, optimizer, data):
    for x, y in data:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def from_rank_0(state):
    return through_a_file(hvd.broadcast_object(state, 0, name="checkpoint"))


def resumed(spec, load, consolidate=False, **options):
    """The parameters after 4 steps, and the same with a stop after 2. load(state) -> what a rank reads from disk."""
    data = list(batches(4))
    net, optimizer = setup(spec, **options)
    steps(net, optimizer, data)
    uninterrupted = flat(net)
    memory = optimizer.state_dict()["grace_ext"]["memories"][hvd.rank()]

    net, optimizer = setup(spec, **options)
    steps(net, optimizer, data[:2])
    if consolidate:
        optimizer.consolidate_state_dict()
    saved = load({"model": net.state_dict(), "optimizer": optimizer.state_dict()})
    net, optimizer = setup(spec, seed=2, **options)
    net.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    steps(net, optimizer, data[2:])
    same_on_all_ranks(flat(net))
    return uninterrupted, flat(net), memory, optimizer.state_dict()["grace_ext"]["memories"][hvd.rank()]


def assert_same(memory, other):
    assert memory.keys() == other.keys() and memory
    for field in memory:
        assert memory[field].keys() == other[field].keys(), field
        assert all(torch.equal(memory[field][name], other[field][name]) for name in memory[field]), field


EXACT = [
    ("topk:0.01/rice/qsgd:7", {"inner": torch.optim.Adam, "schedule": {"density": "warmup:steps=3"}}),
    ("randomk:0.05", {"communicator": "allreduce"}),
    ("powersgd:2", {}),
    ("topk:0.05", {"memory": "ef21"}),
    ("topk:0.01", {"memory": "dgc", "inner": torch.optim.Adagrad}),
    ("topk:0.05", {"memory": "momentum", "inner": torch.optim.AdamW}),
    ("topk:0.05", {"memory": "adam", "inner": torch.optim.AdamW}),
]


@check_under_every_launcher
def resuming_from_a_file_a_rank_is_bit_identical():
    for spec, options in EXACT:
        uninterrupted, weights, memory, after = resumed(spec, through_a_file, **options)
        summed = spec.startswith("powersgd") or options.get("communicator") == "allreduce"
        if summed and hvd.gloo_enabled() and hvd.size() > 2:  # the order of its sums depends on what it fused
            torch.testing.assert_close(weights, uninterrupted, rtol=1e-4, atol=1e-5)
        else:
            assert torch.equal(uninterrupted, weights), (spec, options)
            assert_same(memory, after)


@check
def resuming_from_a_consolidated_file_of_rank_0_is_bit_identical():
    for spec, options in (EXACT[0], EXACT[3]):
        uninterrupted, weights, memory, after = resumed(spec, from_rank_0, consolidate=True, **options)
        assert torch.equal(uninterrupted, weights), (spec, options)
        assert_same(memory, after)


@check
def resuming_keeps_the_order_of_the_buckets():
    results = []
    for stop in (False, True):
        net, optimizer = setup("topk:0.01")
        for step, (x, y) in enumerate(batches(4)):
            if stop and step == 2:
                saved = through_a_file({"model": net.state_dict(), "optimizer": optimizer.state_dict()})
                net, optimizer = setup("topk:0.01")
                net.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["optimizer"])
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(x, whole=step > 0), y).backward()
            optimizer.step()
        results.append((flat(net), [[t.name for t in b.tensors] for b in optimizer._grace.exchange.buckets]))
    assert results[0][1] == results[1][1]
    assert torch.equal(results[0][0], results[1][0])


class Messages(logging.Handler):
    def __init__(self):
        super().__init__(logging.INFO)
        self.texts = []

    def emit(self, record):
        self.texts.append(f"{record.levelname}: {record.getMessage()}")

    def __enter__(self):
        self._level = logging.getLogger("grace_ext").level
        logging.getLogger("grace_ext").setLevel(logging.INFO)
        logging.getLogger("grace_ext").addHandler(self)
        return self.texts

    def __exit__(self, *_):
        logging.getLogger("grace_ext").setLevel(self._level)
        logging.getLogger("grace_ext").removeHandler(self)


def trained(spec="topk:0.01", **options):
    net, optimizer = setup(spec, **options)
    steps(net, optimizer, batches(3))
    return net, optimizer


def own(optimizer):
    return optimizer._grace.exchange.state_dict()


@check
def a_rank_never_takes_the_residual_of_rank_0():
    for spec, memory in (("topk:0.01", "residual"), ("powersgd:2", "residual"), ("topk:0.05", "ef21")):
        options = {"memory": memory}
        net, optimizer = trained(spec, **options)
        saved = from_rank_0(optimizer.state_dict())
        fresh_net, fresh = setup(spec, **options)
        fresh_net.load_state_dict(net.state_dict())
        with Messages() as texts:
            fresh.load_state_dict(saved)
            steps(fresh_net, fresh, batches(0))
            before = own(fresh)
            x, y = next(batches(1))
            torch.nn.functional.cross_entropy(fresh_net(x), y).backward()
            fresh.synchronize()
        fields = [field for field in before if field != "step"]
        assert bool(fields) == (hvd.rank() == 0), "rank 0 alone has a memory in its file"
        assert before["step"] == 3 and own(fresh)["step"] == 4
        if hvd.rank() == 0:
            assert f"1 of {hvd.size()} ranks loaded" in texts[-1] and "consolidate_state_dict" in texts[-1], texts
            assert ("all start from zero" in texts[-1]) == (memory == "ef21"), texts
        with fresh.skip_synchronize():
            fresh.step()
        same_on_all_ranks(flat(fresh_net))


@check
def broadcast_optimizer_state_spreads_no_residual_and_starts_no_exchange():
    net, optimizer = trained()
    before = own(optimizer)
    assert np.count_nonzero(before["residual"]["first.weight"])
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    after = own(optimizer)
    assert all(np.array_equal(before["residual"][name], after["residual"][name]) for name in before["residual"])
    assert optimizer.compression_stats()["steps"] == 3
    # A checkpoint that rank 0 alone loads before the broadcast, as in Horovod's examples.
    for ranks in (hvd.size(), hvd.size() + 1):
        saved = optimizer.state_dict()
        saved["grace_ext"]["ranks"] = ranks
        fresh_net, fresh = setup("topk:0.01")
        fresh_net.load_state_dict(net.state_dict())
        if hvd.rank() == 0:
            fresh.load_state_dict(through_a_file(saved))
        hvd.broadcast_optimizer_state(fresh, root_rank=0)
        assert ("residual" in own(fresh)) == (hvd.rank() == 0 and ranks == hvd.size())
        steps(fresh_net, fresh, batches(2))
        assert own(fresh)["step"] == 5, "the number of the step is the same on all ranks"
        same_on_all_ranks(flat(fresh_net))


@check
def a_state_dict_is_copied_pickled_and_read_by_plain_optimizers():
    net, optimizer = trained()
    state = optimizer.state_dict()
    for copied in (copy.deepcopy(state), pickle.loads(pickle.dumps(state)), through_a_file(state)):
        assert_same(state["grace_ext"]["memories"][hvd.rank()], copied["grace_ext"]["memories"][hvd.rank()])
    plain = torch.optim.SGD(net.parameters(), lr=1.0)
    plain.load_state_dict(state)
    assert plain.param_groups[0]["lr"] == 0.05 and "grace_ext" not in plain.state_dict()
    with Messages() as texts:
        optimizer.load_state_dict(plain.state_dict())
    assert own(optimizer) == {"step": 0}
    assert [text for text in texts if "no state of grace_ext" in text] == texts and len(texts) == (hvd.rank() == 0)
    steps(net, optimizer, batches(1))


@check
def a_scheduler_made_before_wrapping_sets_the_rates_after_a_state_was_loaded():
    _, first = trained()
    saved = through_a_file(first.state_dict())
    net = Net(1)
    plain = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, 0.5)
    optimizer = compressed("topk:0.01")(plain, net.named_parameters())
    optimizer.load_state_dict(saved)
    assert optimizer.state and plain.state is optimizer.state
    steps(net, optimizer, batches(1))
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0] == 0.025


@check
def what_has_no_place_is_left_out_and_told():
    net, optimizer = trained()
    state = through_a_file(optimizer.state_dict())
    renamed = copy.deepcopy(state)
    residuals = renamed["grace_ext"]["memories"][hvd.rank()]["residual"]
    residuals["former.weight"] = residuals.pop("first.weight")
    for spec, memory, saved, text in (
        ("topk:0.05", "ef21", state, "no memory here has residual"),
        ("topk:0.05", "residual", renamed, "no tensor here is named former.weight"),
    ):
        net, fresh = setup(spec, memory=memory)
        with Messages() as texts:
            fresh.load_state_dict(saved)
        assert [text in other and other.startswith("WARNING") for other in texts] == [True] * (hvd.rank() == 0), texts
        steps(net, fresh, batches(2))
        same_on_all_ranks(flat(net))


def made_by_hand(optimizer, ranks):
    """The consolidated dict of other ranks, each with a residual of its own."""
    state = optimizer.state_dict()
    generator = torch.Generator().manual_seed(5)
    names = {name: array.size for name, array in own(optimizer)["residual"].items()}
    memories = {
        rank: {"residual": {name: torch.randn(size, generator=generator) for name, size in names.items()}}
        for rank in range(ranks)
    }
    state["grace_ext"] |= {"ranks": ranks, "memories": memories, "step": 40}
    return state


@check_under_every_launcher
def another_number_of_ranks_follows_the_declared_policy():
    net, optimizer = trained()
    for ranks in (2 * hvd.size(), hvd.size() // 2):
        state = made_by_hand(optimizer, ranks)
        incomplete = copy.deepcopy(state)
        if ranks > 1:
            incomplete["grace_ext"]["memories"].pop(ranks - 1)
        for policy in ("redistribute", "reset", None):
            _, fresh = setup("topk:0.01", on_resize=policy)
            with Messages() as texts:
                fresh.load_state_dict(through_a_file(state))
            if hvd.rank() == 0:
                assert f"of {ranks} ranks, and there are {hvd.size()} now" in texts[0], texts
                assert ("redistributed" in texts[0]) == (policy != "reset"), texts
            got = own(fresh)
            assert got["step"] == 40
            if policy == "reset":
                assert "residual" not in got
                continue
            for name, array in got["residual"].items():
                total = sum(memory["residual"][name] for memory in state["grace_ext"]["memories"].values())
                summed = hvd.allreduce(torch.from_numpy(array), op=hvd.Sum, name=f"sum.{name}")
                assert torch.allclose(summed, total, rtol=0, atol=1e-5), (ranks, name)
            if ranks > 1:
                if policy is None:
                    with Messages() as texts:
                        fresh.load_state_dict(incomplete)
                    assert "residual" not in own(fresh)
                    assert not texts or "start from zero" in texts[0] and "consolidate_state_dict" in texts[0], texts
                else:
                    with raises(ConfigError, "consolidate_state_dict"):
                        fresh.load_state_dict(incomplete)
    with raises(ConfigError, "allowed: None, 'reset', 'redistribute'"):
        setup("topk:0.01", on_resize="keep")


@check
def what_cannot_be_loaded_is_refused():
    net, optimizer = trained()
    state = optimizer.state_dict()
    other = {"residual": {"first.weight": torch.zeros(3)}}
    for change, text in (({"version": 9}, "version 9"), ({"memories": {hvd.rank(): other}}, "first.weight")):
        wrong = {**state, "grace_ext": state["grace_ext"] | change}
        with raises(ConfigError, text):
            optimizer.load_state_dict(wrong)
    optimizer.load_state_dict(state)
    optimizer.zero_grad()
    x, y = next(batches(1))
    torch.nn.functional.cross_entropy(net(x), y).backward()
    with raises(ExchangeError, "load_state_dict"):
        optimizer.load_state_dict(state)
    optimizer.step()
    state["grace_ext"]["step"] += hvd.rank()
    optimizer.load_state_dict(state)
    torch.nn.functional.cross_entropy(net(x), y).backward()
    with raises(ConfigError, "different steps"):
        optimizer.step()


@check
def consolidated_memories_are_those_of_one_step_and_one_rank():
    net, optimizer = trained()
    optimizer.consolidate_state_dict(to=1)
    memories = optimizer.state_dict()["grace_ext"]["memories"]
    assert sorted(memories) == (list(range(hvd.size())) if hvd.rank() == 1 else [hvd.rank()])
    theirs = hvd.allgather(memories[hvd.rank()]["residual"]["first.weight"][None], name="memories")
    assert all(torch.equal(theirs[rank], memory["residual"]["first.weight"]) for rank, memory in memories.items())
    steps(net, optimizer, batches(1))
    assert list(optimizer.state_dict()["grace_ext"]["memories"]) == [hvd.rank()]
    with raises(ConfigError, "allowed: 0 to"):
        optimizer.consolidate_state_dict(to=hvd.size())
