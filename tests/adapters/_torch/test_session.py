"""Ranks that come and go, as threads of one process; tests/adapters/horovod_torch_elastic does the same with Horovod."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from grace_ext import ConfigError  # noqa: E402
from grace_ext.adapters._common import state_files  # noqa: E402
from grace_ext.adapters._torch import saved_state  # noqa: E402
from grace_ext.adapters._torch.buckets import TorchBuckets  # noqa: E402
from grace_ext.adapters._torch.session import MembershipSession  # noqa: E402
from grace_ext.adapters._torch.torch_options import TorchOptions  # noqa: E402
from grace_ext.exchange.engine import Exchange  # noqa: E402
from grace_ext.transport import CollectiveHandle, InProcessGroup  # noqa: E402

SIZE = 40 * 40


class Options(TorchOptions):
    hvd = SimpleNamespace(Average="average", Sum="sum", Compression=SimpleNamespace(none=None, fp16=None))


class Worker:
    """One process: what it belongs to is set from outside, as Horovod's init does."""

    def __init__(self, group, rank, spec="topk:0.1/rice/raw", memory="residual", on_resize=None):
        self.join(group, rank)
        self.weight = torch.nn.Parameter(torch.zeros(40, 40))
        self.random = np.random.default_rng(rank)

        def build(parameters):
            exchange = Exchange(self.group.transport(self.rank), memory, 1 / self.group.size)
            return TorchBuckets(parameters, exchange, Options(spec, memory, op="average"), prefix="p")

        self.connection = MembershipSession({"w": self.weight}, lambda: (self.rank, self.group.size), build, on_resize)

    def join(self, group, rank):
        self.group, self.rank = group, rank

    def step(self):
        """(this rank's gradient, what was exchanged), float32[d] each."""
        own = self.random.standard_normal(SIZE).astype(np.float32)
        self.weight.grad = None
        (self.weight * torch.from_numpy(own).view(40, 40)).sum().backward()
        self.connection.synchronize()
        return own, self.weight.grad.flatten().numpy().copy()

    def memory(self, field="residual"):
        saved = self.connection.save()
        return saved["memories"][self.rank].get(field, {}).get("w", np.zeros(SIZE, np.float32)).copy()


def form(workers):
    """These and no others are connected from now on."""
    group = InProcessGroup(len(workers), timeout=600)
    for rank, worker in enumerate(workers):
        worker.join(group, rank)


def step(workers):
    with ThreadPoolExecutor(len(workers)) as pool:
        return list(zip(*pool.map(Worker.step, workers), strict=True))


def start(ranks, **options):
    group = InProcessGroup(ranks, timeout=600)
    return [Worker(group, rank, **options) for rank in range(ranks)]


def missing_from_the_sum(workers, before):
    """How much the sum of residuals is off after a step that began with the sum `before`."""
    own, exchanged = step(workers)
    assert all(np.array_equal(exchanged[0], other) for other in exchanged)
    return np.abs(before + sum(own) - len(workers) * exchanged[0] - sum(worker.memory() for worker in workers)).max()


@pytest.mark.parametrize("on_resize", [None, "redistribute", "reset"])
def test_memories_when_ranks_are_removed_and_added(on_resize):
    workers = start(3, on_resize=on_resize)
    for _ in range(3):
        step(workers)
    survivors = workers[1:]
    before = sum(worker.memory() for worker in survivors)
    assert np.abs(before).max() > 0.1
    form(survivors)
    assert missing_from_the_sum(survivors, before if on_resize != "reset" else 0) < 1e-5
    before = sum(worker.memory() for worker in survivors)
    everybody = [*survivors, *start(2, on_resize=on_resize)]
    form(everybody)
    assert missing_from_the_sum(everybody, before if on_resize != "reset" else 0) < 1e-5
    assert [worker.connection.save()["step"] for worker in everybody] == [5] * 4


@pytest.mark.parametrize("on_resize", [None, "redistribute"])
def test_a_second_failure_before_anything_was_saved_anew(on_resize):
    workers = start(3, on_resize=on_resize)
    for _ in range(3):
        step(workers)
    saved = [worker.connection.save() for worker in workers]
    before = sum(worker.memory() for worker in workers[1:])
    for survivors in (workers, workers[1:]):  # the second time, each is another rank than it was when it saved
        form(survivors)
        for worker in survivors:
            worker.connection.restore(saved[workers.index(worker)])
            worker.connection.reconnect()
        if survivors is workers:
            step(survivors)
    assert missing_from_the_sum(survivors, before) < 1e-5
    assert [worker.connection.save()["step"] for worker in survivors] == [4, 4]


@pytest.mark.parametrize("on_resize", [None, "reset"])
def test_one_rank_alone_keeps_its_memory_for_later(on_resize):
    workers = start(2, on_resize=on_resize)
    for _ in range(3):
        step(workers)
    before, alone = workers[1].memory(), workers[1]
    form([alone])
    for _ in range(4):
        own, exchanged = alone.step()
        assert np.array_equal(own, exchanged), "there is nothing to compress for"
    kept = before if on_resize is None else np.zeros_like(before)
    assert np.array_equal(alone.memory(), kept)
    saved = alone.connection.save()
    assert saved["ranks"] == 1 and saved["step"] == 7
    workers = [alone, *start(2, on_resize=on_resize)]
    form(workers)
    assert missing_from_the_sum(workers, kept) < 1e-5
    assert [worker.connection.save()["step"] for worker in workers] == [8] * 3


def test_one_rank_alone_keeps_a_checkpoint_of_many():
    workers = start(2)
    step(workers)
    saved = workers[0].connection.save()
    saved["memories"][1] = workers[1].connection.save()["memories"][1]
    before = sum(worker.memory() for worker in workers)
    (alone,) = start(1)
    alone.connection.load(saved)
    alone.step()
    assert alone.connection.save()["memories"].keys() == {0, 1}
    workers = [alone, *start(1)]
    form(workers)
    assert missing_from_the_sum(workers, before) < 1e-5


def test_statistics_count_what_this_process_has_done():
    workers = start(3)
    for _ in range(3):
        step(workers)
    one, sent = workers[1], workers[1].connection.stats()["bytes_out"]
    form(workers[1:])
    step(workers[1:])
    assert one.connection.stats()["steps"] == 4 and one.connection.stats()["bytes_out"] > sent
    (again,) = start(1)
    again.connection.load(one.connection.save())
    workers = [again, *start(1)]
    form(workers)
    step(workers)
    assert again.connection.stats()["steps"] == 1, "steps before the checkpoint count as little as their bytes"


def test_ranks_that_cannot_settle_can_load_again():
    workers = start(2)
    for _ in range(2):
        step(workers)
    saved = [worker.connection.save() for worker in workers]
    step(workers)
    for worker, state in zip(workers, (saved[0], workers[1].connection.save()), strict=True):
        worker.connection.load(state)
    with pytest.raises(ConfigError, match="different steps"):
        step(workers)
    for worker, state in zip(workers, saved, strict=True):
        worker.connection.load(state)
    own, exchanged = step(workers)
    assert np.array_equal(*exchanged) and exchanged[0].any()


def replace_the_last_of_three(**options):
    """(the workers, one of which is new, as they settled what they start with; what one had before)."""
    workers = start(3, **options)
    for _ in range(3):
        step(workers)
    before = workers[0].connection.save()["memories"][0]
    workers = [*workers[:2], *start(1, **options)]
    form(workers)
    for worker in workers:
        worker.connection.reconnect()  # as the state handler does: neither rank nor number is another one
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda worker: worker.connection.settle(), workers))
    return workers, before


@pytest.mark.parametrize("field, options", [("lowrank", {"spec": "powersgd:2"}), ("second_moment", {"memory": "adam"})])
def test_what_all_ranks_share_is_that_of_the_ranks_that_were_there(field, options):
    workers, before = replace_the_last_of_three(**options)
    assert np.abs(before[field]["w"]).max() > 0
    assert all(np.array_equal(worker.memory(field), before[field]["w"]) for worker in workers)
    _, exchanged = step(workers)
    assert all(np.array_equal(exchanged[0], other) for other in exchanged)


def test_the_aggregate_of_ef21_is_the_mean_of_the_estimates():
    workers, _ = replace_the_last_of_three(memory="ef21")
    for _ in range(2):
        aggregate = [worker.memory("aggregate") for worker in workers]
        assert all(np.array_equal(aggregate[0], other) for other in aggregate) and np.abs(aggregate[0]).max() > 0
        mean = sum(worker.memory("estimate") for worker in workers) / 3
        assert np.abs(mean - aggregate[0]).max() < 1e-5
        step(workers)


def test_states_are_gathered_in_pieces_that_are_bounded_together(monkeypatch):
    """Rank 1's own part; the target gets as much from each of the four ranks in a call."""
    monkeypatch.setattr(state_files, "_CHUNK", 4000)
    sent = []

    class Four:
        size = 4

        def allgather(self, name, payload):
            return CollectiveHandle.finished(np.tile(payload, 4))

        def gather_to(self, name, payload, to):
            sent.append(payload.size)
            return []

    assert saved_state.gather_memories(Four(), "state", {"a": np.zeros(5000, np.float32)}, 0) == []
    assert max(sent) == 1000 and sum(sent) > 20_000
