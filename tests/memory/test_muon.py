"""muon, against plain loops over the ranks, in real exchanges."""

import numpy as np
import pytest
from support.arrays import gauss
from support.exchanges import arrays_of
from support.in_process_ranks import on_all_ranks
from support.memory_exchanges import RANKS, make, step, topk

import grace_ext
from grace_ext import ConfigError
from grace_ext.exchange.buckets import Tensor
from grace_ext.memory.muon import COEFFICIENTS, EPS, orthogonalized, spec_of

SHAPES = {"tall": (60, 20), "wide": (10, 40)}
TENSORS = [Tensor(name, rows * columns, 2, shape=(rows, columns)) for name, (rows, columns) in SHAPES.items()]
PARTS = {"tall": slice(0, 1200), "wide": slice(1200, 1600)}
OPTIONS = {
    "momentum": 0.95,
    "nesterov": True,
    "ns_steps": 5,
    "ns_coefficients": COEFFICIENTS,
    "eps": EPS,
    "adjust_lr_fn": None,
}


def gradient(rank, step):
    return gauss(1600, 100 * rank + step)


def updates(nesterov, adjust, steps):
    """By rank and step, what the memory makes of the gradients: by eigenvectors, in the place of Newton-Schulz iterations."""
    found = np.empty((RANKS, steps, 1600))
    for rank in range(RANKS):
        average = np.zeros(1600)
        for i in range(steps):
            given = gradient(rank, i)
            average = 0.9 * average + 0.1 * given
            update = 0.9 * average + 0.1 * given if nesterov else average
            for name, (rows, columns) in SHAPES.items():
                left, values, right = np.linalg.svd(update[PARTS[name]].reshape(rows, columns), full_matrices=False)
                values = values / np.linalg.norm(values)
                for _ in range(5):
                    values = COEFFICIENTS[0] * values + COEFFICIENTS[1] * values**3 + COEFFICIENTS[2] * values**5
                factor = max(1, rows / columns) ** 0.5 if adjust == "original" else 0.2 * max(rows, columns) ** 0.5
                found[rank, i, PARTS[name]] = factor * ((left * values) @ right).reshape(-1)
    return found


@pytest.mark.parametrize("nesterov, adjust", [(True, "original"), (False, "match_rms_adamw")])
@pytest.mark.parametrize("weight", [1 / RANKS, 1.0])
def test_ranks_send_what_is_largest_of_their_updates_and_keep_the_rest(nesterov, adjust, weight):
    spec = f"muon:0.9:nesterov={nesterov}:adjust={adjust}".lower()

    def work(transport):
        exchange = make(transport, spec, weight=weight, tensors=TENSORS)
        return [step(exchange, gradient(transport.rank, i))[0] for i in range(4)], arrays_of(exchange)

    results, made = on_all_ranks(work, RANKS), updates(nesterov, adjust, 4)
    waiting = np.zeros((RANKS, 1600))
    for i in range(4):
        sent = []
        for rank in range(RANKS):
            waiting[rank] += made[rank, i]
            sent.append(topk(waiting[rank], 160))
            waiting[rank] -= sent[-1]
        for outs, _ in results:  # the mean, whatever the factor of the sum
            np.testing.assert_allclose(outs[i], np.mean(sent, axis=0), atol=1e-4)
    for rank, (_, arrays) in enumerate(results):
        np.testing.assert_allclose(
            np.concatenate([arrays["residual:tall"], arrays["residual:wide"]]), waiting[rank], atol=1e-4
        )


@pytest.mark.parametrize("communicator", ["allgather", "sharded", "hierarchical", "tree"])
def test_no_update_is_lost_on_the_way(communicator):
    def work(transport):
        exchange = make(transport, "muon:0.9", tensors=TENSORS, communicator=communicator)
        received = np.sum([step(exchange, gradient(transport.rank, i))[0] for i in range(4)], axis=0)
        state = arrays_of(exchange)
        return received, np.concatenate([state["residual:tall"], state["residual:wide"]])

    results = on_all_ranks(work, RANKS)
    given = updates(True, "original", 4).mean(axis=0).sum(axis=0)
    waiting = np.mean([waiting for _, waiting in results], axis=0)
    for received, _ in results:
        assert np.array_equal(received, results[0][0])
        np.testing.assert_allclose(received + waiting, given, atol=1e-3)


def test_singular_values_become_about_one():
    for shape in ((50, 20), (20, 50), (1, 30), (30, 1)):
        matrix = gauss(shape[0] * shape[1], 1).reshape(shape)
        values = np.linalg.svd(orthogonalized(matrix, 5), compute_uv=False)
        assert values.shape == (min(shape),) and (0.6 < values).all() and (values < 1.25).all(), (shape, values)
    assert not orthogonalized(np.zeros((4, 3), np.float32), 5).any()


def test_what_waits_stays_the_same_step_when_the_rate_changes():
    def work(transport):
        exchange = make(transport, "muon:0.9", tensors=TENSORS)
        memory, found = exchange.buckets[0].memory, []
        for i, rate in enumerate((0.1, 0.2, 0.2, 0.05, 0.0, 1e-6)):
            out, _ = step(exchange, gradient(transport.rank, i))
            before = arrays_of(exchange)["residual:tall"].copy()
            ones = memory.denominator(TENSORS[0], lambda at, out=out: out[PARTS["tall"]][at], rate)
            assert all((one == 1).all() for one in ones) and [one.size for one in ones] == [60, 20]
            found.append(arrays_of(exchange)["residual:tall"] / np.where(before == 0, 1, before))
        return [float(factors.max()) for factors in found]

    for factors in on_all_ranks(work, RANKS):
        np.testing.assert_allclose(factors, [1, 0.5, 1, 4, 1, 10], rtol=1e-5)


def test_an_update_that_was_changed_is_no_step():
    def work(transport):
        exchange = make(transport, "muon", tensors=TENSORS)
        out, _ = step(exchange, gradient(transport.rank, 0))
        with pytest.raises(ConfigError, match="gradient of 'wide' holds an update.*was changed between"):
            exchange.buckets[0].memory.denominator(TENSORS[1], lambda at: 0.5 * out[PARTS["wide"]][at], 0.1)

    on_all_ranks(work, RANKS)


def test_a_gradient_that_is_not_finite_changes_nothing():
    def work(transport):
        exchange = make(transport, "muon", tensors=TENSORS)
        step(exchange, gradient(transport.rank, 0))
        before, given = arrays_of(exchange), gradient(transport.rank, 1)
        if transport.rank == 1:
            given[5] = np.inf
        out, finite = step(exchange, given)
        assert not finite and not np.isfinite(out).all()
        after = arrays_of(exchange)
        assert before.keys() == after.keys() and all(np.array_equal(before[name], after[name]) for name in before)

    on_all_ranks(work, RANKS)


def test_the_optimizer_is_a_muon_with_the_same_options():
    memory = grace_ext.memory("muon")
    memory.check_optimizer("Muon", 0.95, "muon", OPTIONS)
    for kind in (None, "adam"):
        with pytest.raises(ConfigError, match="makes the steps of torch.optim.Muon.*not those of SGD"):
            memory.check_optimizer("SGD", 0.0, kind, {})
    for changed, text in (
        ({"momentum": 0.9}, "differ: use 'muon:0.9:nesterov=true:steps=5:adjust=original'"),
        ({"nesterov": False}, "use 'muon:0.95:nesterov=false:steps=5:adjust=original'"),
        ({"ns_steps": 4}, "use 'muon:0.95:nesterov=true:steps=4:adjust=original'"),
        ({"adjust_lr_fn": "match_rms_adamw"}, "use 'muon:0.95:nesterov=true:steps=5:adjust=match_rms_adamw'"),
        ({"eps": 1e-5}, "has to have ns_coefficients="),
        ({"ns_coefficients": (2.0, -1.5, 0.5)}, "has to have ns_coefficients="),
    ):
        with pytest.raises(ConfigError, match=text):
            memory.check_optimizer("Muon", 0.95, "muon", OPTIONS | changed)
        spec = spec_of(OPTIONS | changed)
        assert spec is None or grace_ext.memory(spec).check_optimizer("Muon", 0.95, "muon", OPTIONS | changed) is None
    assert spec_of(OPTIONS | {"momentum": 1.0}) is None and spec_of(OPTIONS | {"ns_steps": 0}) is None


def test_its_options():
    for spec, message in (
        ("muon:1", "momentum=1"),
        ("muon:steps=0", "steps=0"),
        ("muon:steps=100", "steps=100"),
        ("muon:adjust=none", "adjust='none'; allowed: original, match_rms_adamw"),
        ("muon:decay=0", "decay=0"),
    ):
        with pytest.raises(ConfigError, match=message):
            grace_ext.memory(spec)
    for call in (lambda memory: memory.compensate("a", np.zeros(3, np.float32)), lambda memory: memory.for_rows()):
        with pytest.raises(ConfigError, match="memory 'muon'"):
            call(grace_ext.memory("muon"))
