"""The kernel tests once more, compiled for other CPUs: no AVX-512 (haswell) and no AVX at all (generic)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = (
    *(f"kernels/{path.name}" for path in sorted((HERE / "kernels").glob("test_*.py")) if path.name != "test_compile.py"),
    *(
        f"index/test_{name}.py"
        for name in ("lossless", "elias_fano", "rle", "rice_adaptive", "huffman", "auto", "row_context")
    ),
    "value/test_levels.py",
    "value/test_lloyd.py",
    "transforms/test_dct.py",
    "golden/test_golden.py",
)
#: Every codec's bytes, and what asks for AVX-512 itself.
FEW = ("golden/test_golden.py", "kernels/test_topk.py", "kernels/test_select.py", "kernels/test_positions.py")
HASWELL = "+avx2,+avx,+sse4.2,+bmi,+bmi2,+popcnt,+fma,+lzcnt,+f16c,+sse,+sse2,+sse3,+ssse3,+sse4.1,+cmov,+cx8,+fxsr,+mmx"
CPUS = {"haswell": {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": HASWELL}, "generic": {"NUMBA_CPU_NAME": "generic"}}


def can_run(cpu):
    flags = Path("/proc/cpuinfo").read_text().split("\nflags", 1)[-1].split("\n", 1)[0].split()
    return cpu == "generic" or {"avx2", "bmi2", "fma"} <= set(flags)


@pytest.mark.alone
@pytest.mark.parametrize(
    "cpu, files",
    [
        pytest.param("haswell", FEW, marks=pytest.mark.tier("test"), id="haswell-few"),
        *(pytest.param(cpu, FILES, marks=pytest.mark.tier("all"), id=cpu) for cpu in CPUS),
    ],
)
def test_kernels_on_another_cpu(cpu, files):
    if not can_run(cpu):
        pytest.skip(f"this machine cannot run code for {cpu}")
    cache = HERE.parent / "build" / f"kernels-{cpu}"  # for the next run in this checkout, too
    code = (
        "import sys, pytest; from grace_ext.kernels._intrinsics import HAS_COMPRESS; assert not HAS_COMPRESS; "
        "sys.exit(pytest.main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "-q", "-x", "-p", "no:cacheprovider", *(str(HERE / name) for name in files)],
        cwd=HERE.parent,
        env={**os.environ, **CPUS[cpu], "GRACE_EXT_CACHE": str(cache)},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
    assert list(cache.glob("kernels-*/*/*.nbc")), "the kernels were not compiled for this CPU"
