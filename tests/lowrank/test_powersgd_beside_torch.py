"""PowerSGD against torch's communication hook: the same gradients, the same start, real processes over gloo."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.in_process_ranks import on_all_ranks
from support.lowrank_exchanges import make, step

from grace_ext.exchange.buckets import Tensor
from grace_ext.lowrank import PowerSGD

pytest.importorskip("torch")

pytestmark = pytest.mark.tier("test")
RANKS, STEPS = 2, 6
SHAPES = {"conv": (16, 8, 3, 3), "bias": (16,), "linear": (40, 200), "tall": (300, 30), "small": (5, 6)}
TENSORS = [Tensor(name, int(np.prod(shape)), len(shape), shape=shape) for name, shape in SHAPES.items()]
# torch takes Gram–Schmidt for factors of rank 1 and 2 and Householder's QR above.
RUNS = ("1_residual", "2_residual", "2_none", "4_residual")


def gradient(name, i, rank):
    """Of decaying singular values, as real ones are; ranks have much in common."""
    shape = SHAPES[name]
    rng = np.random.default_rng([len(name), i, RANKS])
    common = rng.standard_normal((shape[0], 6)) * 0.6 ** np.arange(6) @ rng.standard_normal((6, int(np.prod(shape[1:]))))
    own = np.random.default_rng([len(name), i, rank]).standard_normal(shape)
    return (common.reshape(shape) + 0.2 * own).astype(np.float32)


def starts(rank):
    """name -> qt, float32[r, m], not orthonormal."""
    rng, found = np.random.default_rng(5), {}
    for name, shape in SHAPES.items():
        _, columns, r = PowerSGD(rank).factorization(shape)
        if r:
            found[name] = rng.standard_normal((r, columns)).astype(np.float32)
    return found


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """What torch's ranks got: a dict a rank."""
    folder = tmp_path_factory.mktemp("torch")
    given = {
        f"{run}.{i}.{rank}.{name}": gradient(name, i, rank)
        for run in RUNS
        for i in range(STEPS)
        for rank in range(RANKS)
        for name in SHAPES
    }
    given.update({f"{run}.q.{name}": np.ascontiguousarray(q.T) for run in RUNS for name, q in starts(int(run[0])).items()})
    np.savez(folder / "given.npz", **given)
    script = Path(__file__).with_name("torch_powersgd.py")
    processes = [
        subprocess.Popen(
            [sys.executable, script, folder, str(rank), str(RANKS)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(RANKS)
    ]
    try:
        for process in processes:
            output, _ = process.communicate(timeout=600)
            assert process.returncode == 0, output
    finally:
        for process in processes:
            process.kill()
    return [dict(np.load(folder / f"torch{rank}.npz")) for rank in range(RANKS)]


@pytest.mark.parametrize("run", RUNS)
def test_the_same_as_torchs_hook(theirs, run):
    """Each step from where torch was before it: over steps, what float32 rounds away grows differently on each machine."""
    rank, memory = int(run[0]), run[2:]
    first = {name: q.ravel() for name, q in starts(rank).items()}

    def work(transport):
        exchange = make(transport, f"powersgd:{rank}", memory, TENSORS)
        exchange.load_state_dict({"lowrank": first})
        found = []
        for i in range(STEPS):
            out, _ = step(exchange, np.concatenate([gradient(name, i, transport.rank).ravel() for name in SHAPES]))
            found.append((out, exchange.state_dict()))
            exchange.load_state_dict(state_of(theirs[transport.rank], f"{run}.{i}", first, found[-1][1]))
        return found

    ends = np.cumsum([tensor.size for tensor in TENSORS])[:-1]
    ours = on_all_ranks(work, RANKS)
    for r, steps in enumerate(ours):
        for i, (out, _) in enumerate(steps):
            for (name, shape), part in zip(SHAPES.items(), np.split(out, ends), strict=True):
                close(part.reshape(shape), theirs[r][f"{run}.{i}.{name}"], f"{name}, step {i}")
                if memory == "residual" and name in first:  # torch keeps what ranks differ by, too: it sums to 0
                    own, expected = (
                        np.mean(errors, axis=0)
                        for errors in (
                            [ours[rank][i][1]["residual"][name].reshape(shape) for rank in range(RANKS)],
                            [theirs[rank][f"{run}.{i}.error.{name}"] for rank in range(RANKS)],
                        )
                    )
                    close(own, expected, f"residual of {name}, step {i}")


def state_of(theirs, step, first, ours):
    """What torch keeps after a step, as an exchange's state."""
    q = {name: theirs[f"{step}.q.{name}"].T.ravel() for name in first}
    if "residual" not in ours:
        return {**ours, "lowrank": q}
    errors = {name: theirs[f"{step}.error.{name}"].ravel() for name in q}
    return {**ours, "lowrank": q, "residual": {**ours["residual"], **errors}}


def close(own, expected, what):
    scale = np.abs(expected).max()
    assert scale > 0.1, what
    np.testing.assert_allclose(own, expected, rtol=0, atol=5e-5 * scale, err_msg=what)
