"""What the federated example's ranks do besides talking, and what its benchmark makes of the results."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from grace_ext import ConfigError
from grace_ext.federated import Client, Server

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.tier("test")
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def training():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))
        import federated_training

        yield federated_training
        for name in ("fashion_mnist", "federated_training"):
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def federated():
    """benchmarks/federated.py"""
    with pytest.MonkeyPatch.context() as patch:
        for folder in ("examples", "benchmarks"):
            patch.syspath_prepend(str(ROOT / folder))
        import federated

        yield federated
        sys.modules.pop("federated")


LABELS = np.repeat(np.arange(10), 600)


@pytest.mark.parametrize("alpha", [0.1, 0.5, 100])
def test_the_split_deals_out_each_sample_once(training, alpha):
    split = training.lda_split(LABELS, 10, alpha, seed=3)
    assert np.array_equal(np.sort(np.concatenate(split)), np.arange(LABELS.size))
    assert all((np.diff(part) > 0).all() and part.size >= 10 for part in split)


def test_the_split_depends_on_its_seed_only(training):
    one, same, other = (training.lda_split(LABELS, 5, 0.5, seed) for seed in (0, 0, 1))
    assert all(map(np.array_equal, one, same)) and not all(map(np.array_equal, one, other))


def test_the_smaller_alpha_is_the_less_alike_are_clients(training):
    def unlikeness(alpha):
        """The mean share of a client's most frequent class: 0.1 where all are alike."""
        split = training.lda_split(LABELS, 10, alpha, seed=0)
        return np.mean([np.bincount(LABELS[part]).max() / part.size for part in split])

    found = [unlikeness(alpha) for alpha in (0.1, 1, 1000)]
    assert found[0] > 0.5 > found[1] > 0.2 > found[2] > 0.1


@pytest.mark.parametrize("alpha, clients", [(0, 5), (-1, 5), (float("nan"), 5), (0.5, 1000)])
def test_splits_that_cannot_be(training, alpha, clients):
    with pytest.raises(ConfigError, match="alpha"):
        training.lda_split(LABELS, clients, alpha, seed=0)


def problem(seed=0):
    """A net, images and labels that it can learn."""
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    labels = torch.arange(400) % 4
    return net, torch.randn(4, 1, 28, 28)[labels] + 0.5 * torch.randn(400, 1, 28, 28), labels


def clients_of(training, spec, kind, count=3, **options):
    net, images, labels = problem()
    start = training.vector_of(net)
    made = [
        kind(net, images[number::count], labels[number::count], number=number, seed=0, **options) for number in range(count)
    ]
    return start, [(Client(start, spec, number=number), train) for number, train in enumerate(made)]


def play(server, clients):
    for number in server.begin_round():
        client, train = clients[number]
        server.receive(number, client.update(*train(client.receive(server.message_for(number)), client.round)))
    server.end_round()


def test_panthalia_without_compression_is_adamw_on_the_mean_gradient(training):
    start, clients = clients_of(training, "dense/raw", training.Gradient, batch=1000, batches=1)  # all samples
    server = Server(
        start, len(clients), "dense/raw", optimizer="adamw:0.01:weight_decay=0.1", weights="samples", most_samples=400
    )
    net, images, labels = problem()
    optimizer = torch.optim.AdamW(net.parameters(), 0.01, weight_decay=0.1)
    for _ in range(5):
        play(server, clients)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(images), labels).backward()
        optimizer.step()
        np.testing.assert_allclose(server.model, training.vector_of(net), atol=2e-3)


def test_panthalia_learns_through_dct_both_ways(training):
    start, clients = clients_of(training, "panthalia", training.Gradient, batch=64, batches=1)
    server = Server(start, len(clients), "panthalia", optimizer="adamw:0.003")
    net, images, labels = problem()
    training.set_vector(net, server.model)
    assert training.evaluate(net, images, labels) < 0.6
    for _ in range(60):
        play(server, clients)
    training.set_vector(net, server.model)
    assert training.evaluate(net, images, labels) > 0.95


def test_a_round_of_a_client_depends_on_nothing_but_its_number(training):
    _, ((_, train), (_, other), *_) = clients_of(training, "dense/raw", training.Epochs, batch=16, epochs=1, lr=0.001)
    start = training.vector_of(problem()[0])
    first, samples = train(start, 1)
    train(first, 2)
    assert samples == 134 and train(start, 1)[0].tobytes() == first.tobytes()
    assert train(start, 2)[0].tobytes() != first.tobytes() != other(start, 1)[0].tobytes()


def put(federated, folder, name, accuracy, volume, **options):
    method = federated.METHODS[name]
    run = {
        "options": {
            "compression": method.spec,
            "memory": method.memory,
            "seed": 0,
            "rounds": 9,
            "clients": 10,
            "batch": 64,
            "sampled": None,
            "local_epochs": 1,
            "local_batches": 1,
            "lr": 0.001,
            "model": "mlp",
            "alpha": 0.5,
            "train_samples": None,
            **options,
        },
        "parameters": 10**6,
        "volume": {"down": volume, "up": volume},
        "date": "2026-01-01",
        "cpu_seconds": {f"{who}_{what}": 0.001 for who in ("client", "server") for what in ("encode", "decode")},
        "accuracy": [[number, 0.1] for number in range(4)] + [[number, accuracy] for number in range(4, 9)],
    }
    Path(federated.path_of(str(folder), name, options.get("seed", 0))).write_text(json.dumps(run))


def test_the_bars_compare_with_the_baseline_of_the_same_seeds(federated, tmp_path):
    put(federated, tmp_path, "fedavg", 0.90, 1.0)
    put(federated, tmp_path, "fedavg", 0.80, 1.0, seed=1)
    put(federated, tmp_path, "best", 0.896, 0.03)
    put(federated, tmp_path, "topr", 0.9, 0.2, rounds=8)
    put(federated, tmp_path, "panthalia", 0.88, 1.0)
    put(federated, tmp_path, "dct", 0.86, 0.006)
    results = federated.Results(str(tmp_path))
    assert results.accuracy("fedavg") == pytest.approx(85) and results.gained("best") == pytest.approx(-0.4)
    assert results.names("fedavg") == ["fedavg", "best"]  # the other one had fewer rounds
    assert results.verdicts() == {"fedavg": {"best": True}, "panthalia": {"dct": False}}
    text = federated.document(results, "the command")
    assert "met by ours (0.0300 down, 0.0300 up, -0.40 points)" in text
    assert "**missed** by Panthalia, 1 %, no momentum on the server (0.0060 down, 0.0060 up, -2.00 points)" in text


def test_the_section_about_liars_has_a_row_for_each_mean(federated, tmp_path, monkeypatch):
    for name, value in {"SEEDS": range(1), "ROUNDS": 3, "SAMPLES": 600, "TESTS": 200}.items():
        monkeypatch.setattr(federated._liars, name, value)
    (tmp_path / "federated.md").write_text("# Page\n")
    status = federated.write_liars(str(tmp_path))
    text = (tmp_path / "federated.md").read_text()
    assert all(f"| {row.label} | " in text for row in federated._liars.ROWS.values())
    judged = [line for line in text.splitlines() if line.startswith("- The target")]
    assert len(judged) == 2 and all("**missed**" in means for means in judged) == bool(status)
    assert "Of 252 lies, the norm check refused 0." in text


def test_without_results_there_is_nothing_to_judge(federated, tmp_path):
    put(federated, tmp_path, "best", 0.9, 0.03)
    assert federated.Results(str(tmp_path)).verdicts() == {}
