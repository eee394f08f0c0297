"""`python -m grace_ext device-check`: the kernels for accelerators on the machine at hand, and one file with what they did.

With a GPU: the bytes against the host's, trainings of two ranks over Gloo and NCCL, races if compute-sanitizer is there, and
throughput beside torch.topk and a copy. Without one it says so, and compares the bytes in Triton's interpreter.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time

import numpy as np
import torch
import triton

import grace_ext
from grace_ext._util.rng import Stream
from grace_ext.errors import ConfigError
from grace_ext.kernels.rows import add_rows
from grace_ext.kernels.second_moment import random_sketch
from grace_ext.pipeline import container, decoder

from . import device_decoder, device_encoder, device_training
from .kernels import rows, topk, usable
from .kernels.sketch import LANES, Sketcher

SPECS = (
    "topk:0.01/rice/qsgd:7",
    "topk:0.01/auto/lloyd",
    "topk:0.1/rice/qsgd:4:norm=l2",
    "dense/qsgd:4",
    "dense/terngrad",
    "dense/minmax",
    "dense/natural",
    "dense/onebit",
    "dense/sign",
    "dense/fp16",
    "dense/threelc",
    "topk:0.1/huffman/sketchml:16",
    "threshold:1/rice/qsgd:7",
    "dct:16/topk:0.02:per=chunk/rice/minmax:per=chunk",
)
KINDS = ("normal", "ties", "denormal", "not finite", "equal")
SIZES = {"cpu": (1, 5000), "cuda": (1, 5000, 1_000_003, 25_600_000)}
_SKETCH, _KEY = "sketch of memory adam", (0x9E3779B1, 5)
_ROWS, _WIDTH = "sums of rows of a table", 50
_TIMED = 25_600_000  # elements, those of a ResNet-50
_REPEATS = 20
_SANITIZER_SECONDS = 240
_TRAINING_SECONDS = 120
_MOST_OUTPUT = 8000  # characters, in which the launcher's own messages follow those of the ranks


def run(arguments: argparse.Namespace) -> int:
    """The exit status: 0 if all bytes and trainings are the host's, else 1."""
    with open(arguments.output, "w") as file:  # before the minutes that it takes
        report = _report()
        json.dump(report, file, indent=2)
    wrong = [one for one in report["bytes"] if not one["equal"]]
    for one in wrong:
        print(f"the bytes differ from the host's: {one['spec']}, {one['kind']}, {one['elements']} elements")
    print(
        f"{len(report['bytes']) - len(wrong)} of {len(report['bytes'])} comparisons are equal; all is in {arguments.output}"
    )
    failed = [said for said in map(_failure, report.get("trainings", ())) if said]
    for said in failed:
        print(said)
    return 1 if wrong or failed else 0


def _failure(training: dict) -> str:
    """What is wrong with a training of two ranks; empty if nothing is."""
    differ = [spec for spec, equal in training["equal"].items() if not equal]
    if len(training["equal"]) < len(device_training.SPECS):
        return f"training over {training['backend']} ended early: {training['output']}"
    return f"training over {training['backend']} differs from the host's with {', '.join(differ)}" if differ else ""


def _report() -> dict:
    report = {"grace_ext": grace_ext.__version__, "torch": torch.__version__, "triton": triton.__version__}
    report |= {"python": platform.python_version(), "machine": platform.platform()}
    if torch.cuda.is_available():
        return report | _on_gpu()
    print(
        "There is no GPU here: the kernels run in Triton's interpreter, which shows their bytes and nothing of speed or races."
    )
    return report | {"device": None, "bytes": _in_interpreter()}


def _on_gpu() -> dict:
    properties = torch.cuda.get_device_properties(0)
    report = {"device": properties.name, "capability": f"{properties.major}.{properties.minor}", "cuda": torch.version.cuda}
    print(f"{report['device']}: comparing bytes", flush=True)
    report["bytes"] = compare("cuda")
    print("training with two ranks", flush=True)
    report["trainings"] = [train(backend, "cuda") for backend in ("gloo", "nccl")]
    print("timing", flush=True)
    report["seconds"] = _time_all()
    for name, taken in report["seconds"].items():
        print(f"  {name:<40} {1000 * taken:9.3f} ms")
    report["races"] = _find_races()
    return report


def _in_interpreter() -> list[dict]:
    """Triton decides when it is imported whether it interprets, so another process does it."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-m", __name__], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def compare(device: str) -> list[dict]:
    """Encode and decode with the kernels and on the host: whether containers, remainders and sums are the same."""
    if not usable(device):
        raise ConfigError(f"Triton's kernels do not run on {device!r} in this process")
    encoded = [
        {"spec": spec, "kind": kind, "elements": d, "equal": _is_equal(spec, kind, d, device)}
        for spec in SPECS
        for kind in KINDS
        for d in SIZES[device]
    ]
    return encoded + [
        {"spec": what, "kind": kind, "elements": d, "equal": is_equal(kind, d, device)}
        for what, is_equal in ((_SKETCH, _is_sketch_equal), (_ROWS, _is_sum_of_rows_equal))
        for kind in KINDS
        if kind != "not finite"  # NaN has many bits
        for d in SIZES[device]
    ]


def _is_equal(spec: str, kind: str, d: int, device: str) -> bool:
    compressor, stream = grace_ext.compressor(spec, seed=1), Stream(1, "check", 2, 3)
    gradient, residual = _gradient(kind, d, 0), _gradient("normal", d, 1)
    pending = np.empty_like(gradient)
    expected = compressor.encode(gradient, stream, state=(residual, pending))
    blob = expected.blob.copy()
    own = torch.from_numpy(gradient.copy()).to(device)
    found = device_encoder.encode(compressor, own, torch.from_numpy(residual).to(device), stream, time.perf_counter())
    if found.blob.tobytes() != blob.tobytes():
        return False
    if not found.non_finite and own.cpu().numpy().tobytes() != pending.tobytes():
        return False
    summed, out = np.empty(d, np.float32), torch.empty(d, device=device)
    received = container.split(np.concatenate([blob, blob]), 2, d)
    decoder.decode_sum(received, summed, 0.5)
    device_decoder.decode_sum(received, out, 0.5)
    return found.non_finite or out.cpu().numpy().tobytes() == summed.tobytes()


def _is_sketch_equal(kind: str, d: int, device: str) -> bool:
    gradient, expected = _gradient(kind, d, 0), np.empty(LANES, np.float32)
    random_sketch(gradient, np.uint32(_KEY[0]), np.uint32(_KEY[1]), expected)
    found = Sketcher((d,), device).sketches(torch.from_numpy(gradient).to(device), _KEY)
    return found.cpu().numpy().tobytes() == expected.tobytes()


def _is_sum_of_rows_equal(kind: str, d: int, device: str) -> bool:
    width = min(d, _WIDTH)
    values = _gradient(kind, d // width * width, 0).reshape(-1, width)
    indices = np.random.default_rng(1).zipf(1.3, len(values)) % 1000
    touched, order, starts = rows.group(indices)
    expected, found = np.zeros((touched.size, width), np.float32), torch.empty(touched.size * width, device=device)
    add_rows(expected, np.searchsorted(touched, indices), values)
    rows.sum_into(found, *(torch.from_numpy(array).to(device) for array in (values, order, starts)))
    return found.cpu().numpy().tobytes() == expected.tobytes()


def _gradient(kind: str, d: int, seed: int) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal(d, dtype=np.float32)
    if kind == "ties":
        values = np.round(values * 2) / 2
    elif kind == "denormal":
        values *= np.float32(1e-40)
    elif kind == "equal":
        values[:] = 0.25
    elif kind == "not finite":
        values[d // 2] = np.inf
    return values


def train(backend: str, device: str) -> dict:
    """Train with two ranks: by spec, whether kernels make the host's parameters; and the end of what the job said."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", device_training.__name__, backend, device, *device_training.SPECS]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said, _ = job.communicate(timeout=_TRAINING_SECONDS)
    except subprocess.TimeoutExpired:
        job.terminate()  # torchrun ends its ranks then
        said = f"{job.communicate()[0]}\nit did not end within {_TRAINING_SECONDS} s"
    found = [json.loads(line) for line in said.splitlines() if line.startswith('{"spec"')]
    return {"backend": backend, "equal": {one["spec"]: one["equal"] for one in found}, "output": said[-_MOST_OUTPUT:]}


def _time_all() -> dict[str, float]:
    """Median seconds of each operation on the GPU, by CUDA's events."""
    gradient = torch.randn(_TIMED, device="cuda")
    residual, work = torch.zeros_like(gradient), gradient.clone()
    k, received, sketcher = _TIMED // 100, {}, Sketcher((_TIMED,), "cuda")
    operations = {
        "copy of the gradient": lambda: work.copy_(gradient),
        "gradient + residual": lambda: torch.add(gradient, residual, out=work),
        "torch.topk of magnitudes and gather": lambda: gradient[torch.topk(gradient.abs(), k, sorted=False).indices],
        "add, select and compact": lambda: topk.select_topk(gradient, residual, work, k),
        _SKETCH: lambda: sketcher.sketches(gradient, _KEY),
    }
    for spec in SPECS:
        compressor = grace_ext.compressor(spec)
        blob = device_encoder.encode(compressor, gradient.clone(), residual, Stream(), 0.0).blob
        received[spec] = container.split(blob, 1, _TIMED)

        def encode(compressor=compressor):
            work.copy_(gradient)
            device_encoder.encode(compressor, work, residual, Stream(), 0.0)

        operations[f"copy and encode {spec}"] = encode
        operations[f"decode {spec}"] = lambda spec=spec: device_decoder.decode_sum(received[spec], work, 1.0)
    return {name: _seconds_of(operation) for name, operation in operations.items()}


def _seconds_of(operation) -> float:
    times = []
    for _ in range(_REPEATS + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        operation()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return statistics.median(times[3:])


def _find_races() -> str:
    """What compute-sanitizer says of a small comparison."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        return "compute-sanitizer is not installed"
    command = [sanitizer, "--tool", "racecheck", sys.executable, "-m", __name__, "cuda"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SANITIZER_SECONDS)
    except subprocess.TimeoutExpired:
        return f"compute-sanitizer did not end within {_SANITIZER_SECONDS} s"
    return (done.stdout + done.stderr)[-2000:]


if __name__ == "__main__":
    place = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    SIZES[place] = SIZES["cpu"]
    json.dump(compare(place), sys.stdout)
