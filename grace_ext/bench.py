"""Measures every stage and the whole road; `python -m grace_ext bench` is its command line.

Every time is a multiple of one memcpy of the gradient. What is compared takes turns with that memcpy, so that a
slower moment of the machine hits all alike. All of it runs on one thread.
"""

import contextlib
import dataclasses
import datetime
import importlib.metadata
import importlib.util
import math
import os
import platform
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import llvmlite.binding
import numpy as np

from . import container, registry
from .compressor import Compressor, as_dense, compressor, decode_sum
from .errors import ConfigError, GraceError
from .kernels import max_magnitude
from .kernels.topk import NON_FINITE
from .rng import Stream
from .sparsifiers.base import Scope
from .value.base import ValueCodec

SPECS = ("topk:0.01/rice/qsgd:7", "topk:0.001/rice/qsgd:7", "topk:0.01/auto/raw", "topk:0.1/auto/qsgd:4",
         "dense/qsgd:8", "dense/fp16")
_DENSITIES = (0.001, 0.01, 0.1)
_DENSE_VALUES = 1 << 22  # at most so many when value codecs are measured on a dense gradient
_SWEEP = range(1, 9)  # what a lossy value codec is tried with as its first option
_AT_LEAST, _PATIENCE = 3, 10.0  # after so many seconds a comparison ends, if it has been repeated so often
_SIMD = ("avx512f", "avx512vbmi2", "avx2", "avx", "sse4.2", "sve", "neon")


def _heavy(rng, d):
    return rng.standard_normal(d, np.float32) * np.exp(rng.standard_normal(d, np.float32))


def _clustered(rng, d):
    scales = np.exp(2 * rng.standard_normal(-(-d // 256), np.float32))
    return rng.standard_normal(d, np.float32) * np.repeat(scales, 256)[:d]


def _uniform_positions(rng, d, density):
    gradient = np.zeros(d, np.float32)
    positions = rng.choice(d, max(1, round(density * d)), replace=False, shuffle=False)
    gradient[positions] = rng.standard_normal(positions.size, np.float32)
    return gradient


#: Synthetic gradients by name -> f(rng, d, largest density) -> float32[d].
SYNTHETIC: dict[str, Callable] = {
    "heavy": lambda rng, d, density: _heavy(rng, d),
    "gauss": lambda rng, d, density: rng.standard_normal(d, np.float32),
    "clustered": lambda rng, d, density: _clustered(rng, d),
    "uniform-positions": _uniform_positions,
}


@dataclasses.dataclass
class Plan:
    """What is to be measured: gradients by label, and the settings that are the same for each."""

    gradients: dict[str, Callable[[], np.ndarray]]
    densities: list[float]
    compressors: dict[str, Compressor]  # by the spec as it was given
    ranks: int
    repetitions: int
    rivals: bool


def plan(*, input="heavy", size=None, density=None, spec=SPECS, ranks=8, repetitions=None, rivals=True,
         quick=False, seed=0) -> Plan:
    """Check what is asked for before anything is measured. Raises ConfigError."""
    densities = sorted(density or (_DENSITIES[1:] if quick else _DENSITIES))
    for value in densities:
        registry.build("sparsifier", "topk", {"density": value})
    sizes = size or [100_000 if quick else 25_600_000]
    for value in sizes:
        container.check_elements(value)
    if input in SYNTHETIC:
        def make(d):
            return lambda: SYNTHETIC[input](np.random.default_rng(seed), d, densities[-1])

        gradients = {f"{input}, {d:,} elements": make(d) for d in sizes}
    elif size:
        raise ConfigError(f"--size is for synthetic gradients ({', '.join(SYNTHETIC)}), not for {input}")
    else:
        saved = load(input)
        gradients = {f"{Path(input).name}, {saved.size:,} elements": lambda: saved}
    compressors = {one: compressor(one) for one in spec}
    for one, made in compressors.items():
        if made.lowrank is not None:
            raise ConfigError(f"--spec {one}: makes no container; what is measured here are containers")
    return Plan(gradients, densities, compressors, ranks, repetitions or (3 if quick else 9), rivals)


def load(path: str) -> np.ndarray:
    """The arrays of a .npy or .npz file as one float32[d], in their order. Raises ConfigError."""
    try:
        loaded = np.load(path, allow_pickle=False)
        arrays = [loaded] if isinstance(loaded, np.ndarray) else [loaded[name] for name in loaded.files]
    except FileNotFoundError:
        known = ", ".join(SYNTHETIC)
        raise ConfigError(f"{path}: there is no such file, and it is not one of {known}") from None
    except (ValueError, EOFError, OSError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{path}: not a .npy or .npz file of numbers: {error}") from None
    gradient = np.concatenate([np.empty(0, np.float32), *(as_dense(array)[0] for array in arrays)])
    largest = max_magnitude(gradient)
    if not 0 < largest < NON_FINITE:
        raise ConfigError(f"{path}: the gradient is {'not finite' if largest else 'empty or all zeros'}")
    return gradient


def measure(plan: Plan, progress: Callable[[int, int, str], None]) -> dict:
    """Everything in the plan, as dicts of numbers. progress(done, total, what) is called after each part."""
    total = len(plan.gradients) * (1 + 2 * len(plan.densities) + len(plan.compressors))
    done = 0
    runs = []
    for label, make in plan.gradients.items():
        bench = _Bench(plan, make())
        run = {"gradient": label, "d": bench.d, "index": [], "value": [], "selection": [], "road": []}
        runs.append(run)
        parts = [("selection", f"selection of {x:.4g}", bench.selection, x) for x in plan.densities]
        parts += [("index", f"index codecs at {x:.4g}", bench.index_codecs, x) for x in plan.densities]
        parts += [("value", "value codecs", bench.value_codecs, plan.densities[len(plan.densities) // 2])]
        parts += [("road", one, bench.road, one) for one in plan.compressors]
        for kind, what, run_part, argument in parts:
            run[kind] += run_part(argument)
            done += 1
            progress(done, total, f"{label}: {what}")
        run["memcpy_seconds"] = bench.memcpy_seconds()
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(), "versions": versions(), "densities": plan.densities, "ranks": plan.ranks,
        "repetitions": plan.repetitions, "runs": runs,
    }


def machine() -> dict:
    """What the figures depend on."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    features = llvmlite.binding.get_host_cpu_features()
    return {"cpu": cpu, "cores": os.cpu_count(), "simd": [name for name in _SIMD if features.get(name)],
            "system": f"{platform.system()} {platform.machine()}"}


def versions() -> dict:
    found = {"python": platform.python_version()}
    for name in ("grace_ext", "numpy", "numba", "torch"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def index_bound(d: int, k: int) -> float:
    """log2 C(d, k) / k: bits per index that uniformly random positions cannot go below on average."""
    return (math.lgamma(d + 1) - math.lgamma(k + 1) - math.lgamma(d - k + 1)) / math.log(2) / k


@dataclasses.dataclass
class Contestant:
    """prepare() runs before each run(), outside the clock."""

    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None


def race(contestants: dict[str, Contestant], repetitions: int) -> dict[str, list[float]]:
    """Seconds of every repetition by name. The contestants take turns; a first round is not counted."""
    seconds = {name: [] for name in contestants}
    patience = time.perf_counter() + _PATIENCE
    for done in range(-1, repetitions):
        if done >= _AT_LEAST and time.perf_counter() > patience:
            break
        for name, contestant in contestants.items():
            contestant.prepare()
            started = time.perf_counter()
            contestant.run()
            if done >= 0:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def _touch(*arrays):
    """Brings arrays into the caches, where the stage before leaves them."""
    return lambda: [array.view(np.uint8).max(initial=0) for array in arrays]


class _Bench:
    """Measurements on one gradient. Each returns rows: dicts of numbers."""

    def __init__(self, plan: Plan, gradient: np.ndarray):
        self.plan = plan
        self.gradient = gradient
        self.d = gradient.size
        self.copy = np.empty_like(gradient)
        self.stream = Stream(name="bench")
        self.scope = Scope(self.stream, (self.d,))
        self._memcpy: list[float] = []

    def memcpy_seconds(self) -> dict:
        return {"median": float(np.median(self._memcpy)), "minimum": min(self._memcpy)}

    def race(self, contestants: dict[str, Contestant]) -> dict[str, dict]:
        """Times by name, each as a multiple of the memcpy of the same rounds."""
        memcpy = Contestant(lambda: np.copyto(self.copy, self.gradient))
        seconds = race({"memcpy": memcpy, **contestants}, self.plan.repetitions)
        reference = seconds.pop("memcpy")
        self._memcpy += reference
        return {name: {
            "seconds": {"median": float(np.median(taken)), "minimum": min(taken)},
            "memcpy": {"median": float(np.median(taken) / np.median(reference)),
                       "minimum": min(taken) / min(reference)},
            "repetitions": len(taken),
        } for name, taken in seconds.items()}

    def support(self, density: float) -> tuple[np.ndarray, np.ndarray]:
        """Positions and values of the top-k of the gradient; copies."""
        indices, values = registry.build("sparsifier", "topk", {"density": density}).select(
            self.gradient, self.scope)
        return indices.copy(), values.copy()

    def selection(self, density: float) -> list[dict]:
        """All sparsifiers, plain and fused with the error-feedback add; torch and numpy beside them."""
        residual, out = np.roll(self.gradient, self.d // 3), np.empty_like(self.gradient)
        contestants, selected = {}, {}
        smallest = float(abs(self.support(density)[1]).min())
        for name in registry.names("sparsifier"):
            options = registry.parameters(registry.lookup("sparsifier", name))
            wanted = {"density": density, "value": smallest}  # a threshold that lets as many pass
            stage = registry.build("sparsifier", name, {key: wanted[key] for key in wanted if key in options})
            indices = stage.select(self.gradient, self.scope)[0]
            if indices is None:
                continue  # dense: nothing is selected
            selected[name] = indices.size
            contestants[name, "plain"] = Contestant(lambda stage=stage: stage.select(self.gradient, self.scope))
            contestants[name, "fused"] = Contestant(
                lambda stage=stage: stage.select_compensated(self.gradient, residual, out, self.scope))
        contestants["np.add", "error feedback only"] = Contestant(
            lambda: np.add(self.gradient, residual, out=out))
        k = max(1, round(density * self.d))
        with _rivals(self.gradient, k) if self.plan.rivals else contextlib.nullcontext({}) as rivals:
            times = self.race({**contestants, **rivals})
        return [{"density": density, "name": name, "form": form, "selected": selected.get(name), **one}
                for (name, form), one in times.items()]

    def index_codecs(self, density: float) -> list[dict]:
        indices, _ = self.support(density)
        contestants, rows = {}, []
        for name in registry.names("index"):
            codec = registry.build("index", name)
            if not codec.universal:
                continue  # shared: not for these positions
            chosen = codec.choose(indices, self.d)
            payload, support = codec.encode(indices, self.d)
            view = np.may_share_memory(payload, indices)
            payload, out = payload.copy(), np.empty(support.size, np.uint32)
            chosen.decode(payload, self.d, out)
            if not np.array_equal(out, support) or (codec.lossless and not np.array_equal(out, indices)):
                raise GraceError(f"index codec {str(codec)!r} does not give its support back")
            contestants[name, "encode"] = Contestant(
                lambda codec=codec: codec.encode(indices, self.d), _touch(indices))
            contestants[name, "decode"] = Contestant(
                lambda codec=chosen, payload=payload, out=out: codec.decode(payload, self.d, out),
                _touch(payload))
            rows.append({"density": density, "name": name, "stage": str(codec), "chosen": chosen.name,
                         "k": indices.size, "support": support.size, "view": view,
                         "bits": 8 * payload.size / indices.size, "bound": index_bound(self.d, indices.size)})
        return _with_times(rows, self.race(contestants), "name", "k")

    def value_codecs(self, density: float) -> list[dict]:
        """Lossy codecs also at other settings of their first option, if that is a whole number."""
        rows = []
        for label, values in ((f"top {density:.4g}", self.support(density)[1]),
                              ("dense", self.gradient[:_DENSE_VALUES])):
            contestants, found = {}, []
            for stage, codec in _value_codecs():
                payload, order = codec.encode(values, self.stream)
                out = np.empty(values.size, np.float32)
                codec.decode(payload, out)
                order_bits = 0 if order is None else container.order_width(values.size)
                found.append({"values": label, "name": codec.name, "stage": stage, "k": values.size,
                              "view": np.may_share_memory(payload, values),
                              "bits": 8 * payload.size / values.size + order_bits,
                              "error": _relative_error(values, out, order),
                              "lossless": codec.lossless})
                contestants[stage, "encode"] = Contestant(
                    lambda codec=codec, values=values: codec.encode(values, self.stream), _touch(values))
                contestants[stage, "decode"] = Contestant(
                    lambda codec=codec, payload=payload, out=out: codec.decode(payload, out), _touch(payload))
            rows += _with_times(found, self.race(contestants), "stage", "k")
        return rows

    def road(self, spec: str) -> list[dict]:
        """compress with error feedback, in place; then the containers of all ranks, summed."""
        one, ranks = self.plan.compressors[spec], self.plan.ranks
        blobs, residual = [], np.zeros_like(self.gradient)
        for rank in range(ranks):  # every rank has the same gradient, moved
            moved = np.roll(self.gradient, rank * self.d // ranks)
            encoded = one.encode_compensated(moved, residual, moved, self.stream)
            blobs.append(encoded.blob)
        residual = moved  # what the last rank did not send
        joined, work, stages = np.concatenate(blobs), np.empty_like(self.gradient), []
        compress = Contestant(
            lambda: stages.append(one.encode_compensated(work, residual, work, self.stream).seconds),
            lambda: np.copyto(work, self.gradient))
        out = np.empty_like(self.gradient)
        decode = Contestant(
            lambda: decode_sum(container.split(joined, ranks, self.d), out, 1 / ranks), _touch(joined))
        times = self.race({"compress": compress, "decode": decode})
        reference = times["compress"]["seconds"]["median"] / times["compress"]["memcpy"]["median"]
        medians = {key: float(np.median([each[key] for each in stages[1:]])) for key in stages[0]}
        return [{"spec": spec, "bytes": blobs[0].size, "ratio": 4 * self.d / blobs[0].size, "ranks": ranks,
                 **times, "stages": {key: seconds / reference for key, seconds in medians.items()}}]


def _with_times(rows: list[dict], times: dict, key: str, count: str) -> list[dict]:
    for row in rows:
        for what in ("encode", "decode"):
            row[what] = times[row[key], what]
            row[what]["per_second"] = row[count] / row[what]["seconds"]["median"]
    return rows


def _value_codecs() -> list[tuple[str, ValueCodec]]:
    found = []
    for name in registry.names("value"):
        codec = registry.build("value", name)
        key, default = next(iter(codec.options().items()), (None, None))
        settings = [default]
        if not codec.lossless and type(default) is int:
            settings = sorted({default, *_SWEEP})
        for setting in settings:
            with contextlib.suppress(ConfigError):  # not a setting of this codec
                label = name if key is None else f"{name}:{setting}"
                found.append((label, registry.build("value", name, {} if key is None else {key: setting})))
    return found


def _relative_error(values: np.ndarray, decoded: np.ndarray, order: np.ndarray | None) -> float:
    restored = decoded
    if order is not None:
        restored = np.empty_like(decoded)
        restored[order] = decoded
    norm = np.linalg.norm(values.astype(np.float64))
    return float(np.linalg.norm(values.astype(np.float64) - restored) / norm) if norm else 0.0


@contextlib.contextmanager
def _rivals(gradient: np.ndarray, k: int):
    """What frameworks offer: the k largest magnitudes, positions in no order, and their values. One thread."""
    def numpy_topk():
        indices = np.argpartition(np.abs(gradient), gradient.size - k)[gradient.size - k:]
        return indices, gradient[indices]

    rivals = {("np.argpartition", "abs, select, gather"): Contestant(numpy_topk)}
    if importlib.util.find_spec("torch") is None:
        yield rivals
        return
    import torch

    tensor = torch.from_numpy(gradient)

    def torch_topk():
        indices = torch.topk(tensor.abs(), k, sorted=False).indices
        return indices, tensor[indices]

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield {("torch.topk", "abs, select, gather"): Contestant(torch_topk), **rivals}
    finally:
        torch.set_num_threads(threads)
