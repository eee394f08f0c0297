"""The plan of what is measured, and its measurement."""

import contextlib
import dataclasses
import datetime
import importlib.metadata
import os
import platform
from collections.abc import Callable
from pathlib import Path

import llvmlite.binding
import numpy as np

from .. import registry
from ..errors import ConfigError
from ..pipeline.compressor import Compressor, make_compressor
from ..pipeline.presets import PRESETS
from . import codecs, end_to_end, inputs, parts
from .subject import Subject

SPECS = (
    "topk:0.01/rice/qsgd:7",
    "topk:0.01/auto/qsgd:7",
    "topk:0.001/auto/qsgd:7",
    "topk:0.01/auto/raw",
    "topk:0.01/auto/lloyd:0.05",
    "topk:0.01/auto/lloyd:0.075",
    "topk:0.1/huffman/qsgd:8",
    "topk:0.1/auto/lloyd:0.075",
    "dense/qsgd:8",
    "dense/fp16",
)
KINDS = ("selection", "index", "value", "transform", "lowrank", "end_to_end", "preset")
_DENSITIES = (0.001, 0.01, 0.1)
_SIMD = ("avx512f", "avx512vbmi2", "avx2", "avx", "sse4.2", "sve", "neon")


@dataclasses.dataclass
class Plan:
    """What is measured.

    Attributes:
        gradients: Label -> function that returns the gradient, float32[d].
        densities: Shares of the elements that are selected, ascending.
        compressors: Spec, as it was given -> compressor that is measured end to end.
        presets: Name -> compressor.
        ranks: Number of containers to decode and add.
        repetitions: Number of repetitions of each measurement.
        peers: Whether to measure other libraries for comparison.
    """

    gradients: dict[str, Callable[[], np.ndarray]]
    densities: list[float]
    compressors: dict[str, Compressor]
    presets: dict[str, Compressor]
    ranks: int
    repetitions: int
    peers: bool


def plan(
    *, input=("heavy",), size=None, density=None, spec=None, ranks=8, repetitions=None, peers=True, quick=False, seed=0
) -> Plan:
    """Check what is asked for before anything is measured.

    Args:
        input: Names in SYNTHETIC, and files.
        size: Numbers of elements of the synthetic gradients; None: the default.
        density: Shares of the elements that are selected; None: the defaults.
        spec: Compressors to measure end to end; None: SPECS and all presets.
        ranks: Number of containers to decode and add.
        repetitions: Number of repetitions of each measurement; None: the default.
        peers: Whether to measure other libraries for comparison.
        quick: Whether the defaults are a small size, fewer densities and few repetitions.
        seed: Seed of the synthetic gradients.

    Returns:
        The plan.

    Raises:
        ConfigError: An argument is out of range, or a compressor makes no container.
    """
    densities = sorted(density or (_DENSITIES[1:] if quick else _DENSITIES))
    for value in densities:
        registry.build("sparsifier", "topk", {"density": value})
    if size and not any(name in inputs.SYNTHETIC for name in input):
        raise ConfigError(f"--size is for synthetic gradients ({', '.join(inputs.SYNTHETIC)}), not for files")
    sizes = size or [100_000 if quick else 25_600_000]
    gradients = inputs.gradients(input, sizes, densities[-1], seed)
    compressors = {one: make_compressor(one) for one in spec or SPECS}
    for one, made in compressors.items():
        if made.lowrank is not None:
            raise ConfigError(f"--spec {one}: makes no container; only compressors that make containers are measured here")
    presets = {} if spec else {name: make_compressor(name) for name in PRESETS}
    return Plan(gradients, densities, compressors, presets, ranks, repetitions or (3 if quick else 9), peers)


def measure(plan: Plan, progress: Callable[[int, int, str], None]) -> dict:
    """Measure everything in a plan.

    Args:
        plan: The plan.
        progress: Called with (done, total, what) after each part.

    Returns:
        The figures, as nested dicts and lists of numbers and texts.
    """
    middle = plan.densities[len(plan.densities) // 2]
    kinds = [("selection", f"selection of {x:.4g}", parts.selection, (x,)) for x in plan.densities]
    kinds += [("index", f"index codecs at {x:.4g}", codecs.index_codecs, (x, x == middle)) for x in plan.densities]
    kinds += [
        ("value", "value codecs", codecs.value_codecs, (middle,)),
        ("transform", "transforms", parts.transforms, (middle,)),
        ("lowrank", "low rank", parts.low_rank, ()),
    ]
    kinds += [("end_to_end", one, end_to_end.end_to_end, (one, made, plan.ranks)) for one, made in plan.compressors.items()]
    kinds += [("preset", one, end_to_end.preset, (one, made)) for one, made in plan.presets.items()]
    runs, done, total = [], 0, len(plan.gradients) * len(kinds)
    for label, make in plan.gradients.items():
        subject = Subject(make(), plan.repetitions, plan.peers)
        run = {"gradient": label, "d": subject.d, **{kind: [] for kind in KINDS}}
        runs.append(run)
        for kind, what, function, arguments in kinds:
            run[kind] += function(subject, *arguments)
            done += 1
            progress(done, total, f"{label}: {what}")
        run["memcpy_seconds"] = subject.memcpy_seconds()
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "densities": plan.densities,
        "ranks": plan.ranks,
        "repetitions": plan.repetitions,
        "runs": runs,
    }


def machine() -> dict:
    """Describe the machine that the figures depend on.

    Returns:
        The keys "cpu", "cores", "simd" and "system".
    """
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    features = llvmlite.binding.get_host_cpu_features()
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "simd": [name for name in _SIMD if features.get(name)],
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions() -> dict:
    """List the versions of the software that the figures depend on.

    Returns:
        Name -> version, for what is installed.
    """
    found = {"python": platform.python_version()}
    for name in ("grace_ext", "numpy", "numba", "isal", "torch", "pyroaring", "pybloomfiltermmap3", "constriction"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
