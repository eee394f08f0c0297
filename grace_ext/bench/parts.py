"""Measurements of sparsifiers, transforms and low-rank methods on one gradient. Each returns rows: dicts of figures."""

import contextlib
import math

import numpy as np

from .. import registry
from . import peers
from .subject import Candidate, Subject, relative_error, with_times
from .variants import label, variants


def selection(subject: Subject, density: float) -> list[dict]:
    """Measure all sparsifiers, alone and fused with the error-feedback addition, with torch and numpy for comparison.

    Args:
        subject: The gradient.
        density: Share of the elements to select.

    Returns:
        One row per sparsifier and form.
    """
    gradient, scope = subject.gradient, subject.scope
    residual, out = np.roll(gradient, subject.d // 3), np.empty_like(gradient)
    smallest = float(abs(subject.support(density)[1]).min())
    candidates, selected = {}, {}
    for name in registry.names("sparsifier"):
        options = registry.parameters(registry.lookup("sparsifier", name))
        wanted = {"density": density, "value": smallest}  # a threshold that selects as many elements
        stage = registry.build("sparsifier", name, {key: wanted[key] for key in wanted if key in options})
        indices = stage.select(gradient, scope)[0]
        if indices is None:
            continue  # dense: nothing is selected
        selected[name] = indices.size
        candidates[name, "plain"] = Candidate(lambda stage=stage: stage.select(gradient, scope))
        candidates[name, "fused"] = Candidate(lambda stage=stage: stage.select_compensated(gradient, residual, out, scope))
    candidates["np.add", "error feedback only"] = Candidate(lambda: np.add(gradient, residual, out=out))
    k = max(1, round(density * subject.d))
    with peers.selection(gradient, k) if subject.peers else contextlib.nullcontext({}) as others:
        times = subject.compare({**candidates, **others})
    return [
        {"density": density, "name": name, "form": form, "selected": selected.get(name), **one}
        for (name, form), one in times.items()
    ]


def transforms(subject: Subject, density: float) -> list[dict]:
    """Measure the transforms, and what their largest coefficients leave out: of all, and of each chunk.

    Args:
        subject: The gradient.
        density: Share of the coefficients to keep.

    Returns:
        One row per transform, with the error of the top-k of the gradient itself for comparison.
    """
    gradient = subject.gradient
    plain = _left_out(gradient, subject.support(density)[1])
    rows, candidates = [], {}
    for transform in variants("transform"):
        parameters = transform.parameters()
        coefficients = np.empty(transform.domain(parameters, subject.d), np.float32)
        work = np.empty_like(coefficients)
        transform.forward(gradient, coefficients)
        k = max(1, round(density * coefficients.size))
        magnitudes = np.abs(coefficients)
        chunks = magnitudes.reshape(-1, transform.chunk)
        in_chunk = max(1, round(density * transform.chunk))
        rows.append(
            {
                "stage": label(transform),
                "density": density,
                "plain": plain,
                "whole": _left_out(gradient, np.partition(magnitudes, magnitudes.size - k)[-k:]),
                "chunks": _left_out(gradient, np.partition(chunks, transform.chunk - in_chunk, axis=1)[:, -in_chunk:]),
            }
        )
        candidates[label(transform), "encode"] = Candidate(
            lambda transform=transform, work=work: transform.forward(gradient, work)
        )
        candidates[label(transform), "decode"] = Candidate(
            lambda transform=transform, parameters=parameters, work=work: transform.inverse(parameters, work),
            lambda work=work, coefficients=coefficients: np.copyto(work, coefficients),
        )
    return with_times(rows, subject.compare(candidates), None) if rows else []


def _left_out(gradient: np.ndarray, kept: np.ndarray) -> float:
    """Compute the relative 2-norm error of keeping these coefficients of an orthonormal transform."""
    return math.sqrt(
        max(0.0, 1 - np.linalg.norm(kept.astype(np.float64)) ** 2 / np.linalg.norm(gradient.astype(np.float64)) ** 2)
    )


def low_rank(subject: Subject) -> list[dict]:
    """Measure one step of PowerSGD, ours and torch's, without any exchange, on the gradient as one matrix.

    Args:
        subject: The gradient.

    Returns:
        One row per method and rank.
    """
    rows = 1 << max(0, int(math.log2(subject.d)) // 2)
    matrix = subject.gradient[: subject.d // rows * rows].reshape(rows, -1)
    found, candidates = [], {}
    for rank in (1, 4) if min(matrix.shape) > 4 else ():
        steps = {f"powersgd:{rank}": peers.our_powersgd(rank)}
        if subject.peers:
            steps.update(peers.torch_powersgd(rank))
        for name, step in steps.items():
            state = step(matrix, None)  # a warm start, as from the previous step
            found.append(
                {
                    "stage": name,
                    "rank": rank,
                    "shape": list(matrix.shape),
                    "volume": rank * sum(matrix.shape) / matrix.size,
                    "error": relative_error(matrix.reshape(-1), step(matrix, state)[0].reshape(-1)),
                }
            )
            candidates[name] = Candidate(lambda step=step, state=state: step(matrix, state))
    times = subject.compare(candidates) if candidates else {}
    return [{**row, **times[row["stage"]]} for row in found]
