"""Hostile containers and hostile federated clients, as many as there is time for; and that a fault would be found."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import fuzzing
import hostile_clients
import hostile_containers
import hostile_ranks
import numpy as np
import pytest

import grace_ext  # noqa: F401  (what faults are put into)
from grace_ext.federated import Client, Server

ROOT = Path(__file__).parents[2]
# What is broken, by what: a dotted name and an expression.
CONTAINERS = {
    "another exception": ("grace_ext.value.deflate.Deflate.decode", "staticmethod(lambda payload, out: payload[10**9])"),
    "another size": ("grace_ext.decompress", "lambda blob, size, real=grace_ext.decompress: real(blob, size)[:200]"),
    "another dtype": ("grace_ext.decompress", "lambda blob, size, real=grace_ext.decompress: real(blob, size).astype('f8')"),
    "an accumulator that is touched": (
        "grace_ext.decode_add",
        "lambda blob, out, weight, real=grace_ext.decode_add: (out.fill(2), real(blob, out, weight))",
    ),
    "ways that differ": ("grace_ext.pipeline.decoder.add_dense", "lambda out, values, weight: out.fill(values[0])"),
    "another meaning": ("grace_ext.pipeline.container.Container.order", "lambda parsed: None"),
    "memory": (
        "grace_ext.decompress",
        "lambda blob, size, real=grace_ext.decompress: (bytes(10**7 if size > 40_000 else 0), real(blob, size))[1]",
    ),
}
CLIENTS = {
    "another exception": ("grace_ext.federated.updates.ClientUpdates._check_base", "lambda self, client, base: None"),
    "what is not finite": ("grace_ext.federated.updates.l2_norm", "lambda vector: 1.0"),
    "a refused update counts": (
        "grace_ext.federated.server.Server._reject",
        "lambda self, client, error, real=grace_ext.federated.server.Server._reject: "
        "(real(self, client, error), self.model.__iadd__(1))",
    ),
    "messages are kept": (
        "grace_ext.federated.server.Server._examined",
        "lambda self, client, message, real=grace_ext.federated.server.Server._examined: "
        "(self.__dict__.setdefault('kept', []).append(bytes(9 * message.size)), real(self, client, message))[1]",
    ),
    "memory": (
        "grace_ext.federated.updates.read_up",
        "lambda data, size, real=grace_ext.federated.updates.read_up: "
        "(bytes(10**7 if size > 40_000 else 0), real(data, size))[1]",
    ),
}


@pytest.mark.tier("test")
@pytest.mark.parametrize(
    "module, batches, ends",
    [
        (hostile_containers, 12, {"decoded", "refused", "measured"}),
        (hostile_clients, 16, {"taken", "malformed", "late", "samples", "estimate", "not finite", "norm", "oversized"}),
    ],
)
def test_nothing_is_found(module, batches, ends):
    counts = [module.batch(seed) for seed in range(batches)]
    assert module.batch(0) == counts[0], "a batch depends on more than its seed"
    assert ends <= set().union(*counts)


def found(batch) -> str:
    """The script of the first fault."""
    with pytest.raises(fuzzing.Found) as caught:
        for seed in range(40):
            batch(seed)
    return str(caught.value)


@pytest.mark.tier("test")
@pytest.mark.parametrize(
    "module, broken", [*((hostile_containers, name) for name in CONTAINERS), *((hostile_clients, name) for name in CLIENTS)]
)
def test_a_fault_is_found_and_its_script_shows_it(monkeypatch, module, broken):
    name, by = (CONTAINERS if module is hostile_containers else CLIENTS)[broken]
    monkeypatch.setattr(name, eval(by))
    text = found(module.batch)
    assert fuzzing.ends_with(Exception, text)
    monkeypatch.undo()
    assert not fuzzing.ends_with(Exception, text), "the script shows something else"


@pytest.mark.tier("test")
@pytest.mark.parametrize("module", [hostile_containers, hostile_clients])
def test_a_script_stands_by_itself(monkeypatch, tmp_path, module):
    name, by = (CONTAINERS if module is hostile_containers else CLIENTS)["another exception"]
    monkeypatch.setattr(name, eval(by))
    script = tmp_path / "script.py"
    script.write_text(found(module.batch))
    broken = f"import grace_ext.federated, runpy; {name} = {by}; runpy.run_path({str(script)!r})"
    for code, ends in ((broken, 1), (f"import runpy; runpy.run_path({str(script)!r})", 0)):
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == ends, done.stderr
        assert ("script.py" in done.stderr) == bool(ends)


@pytest.mark.tier("test")
def test_a_fault_of_the_adapter_is_found(monkeypatch):
    monkeypatch.setattr(Server, "leave", lambda self, client: self._expected.pop(client))
    text = found(lambda seed: hostile_ranks.game(np.random.default_rng(seed), Counter(), hostile_clients.forged))
    assert fuzzing.ends_with(KeyError, text)
    monkeypatch.undo()
    assert not fuzzing.ends_with(KeyError, text)


def test_a_server_that_began_again_is_not_stopped_by_an_update_that_it_has_not_asked_for():
    """With a pace: how long it took is not known."""
    start, spec, kept = np.zeros(4, np.float32), "topk:0.5/rice/raw", []
    clients, module = [Client(start, spec, number=number) for number in range(2)], hostile_ranks.adapter()

    def answers(client, tag, data):
        if tag != hostile_ranks.MODEL:
            return []
        clients[client].receive(np.frombuffer(data, np.uint8))
        update = clients[client].update_by(start + 1, 1.0).tobytes()
        said = [(hostile_ranks.TOOK, bytes(8)), (hostile_ranks.UPDATE, update)]
        return said if client == 0 else kept.extend(said) or []

    comm = hostile_ranks.Ranks(2, answers)
    server = module.FederatedServer(Server(start, 2, spec), comm, timeout=1.0, pace=0.5)
    assert server.round().taken == [0]
    server = hostile_ranks.restarted(module, server, Server(start, 2, spec), 0.5)
    comm.inbox[1].extend(kept)
    assert server.round().taken == [0, 1]
