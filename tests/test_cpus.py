"""The kernel tests once more, compiled for other CPUs: no AVX-512 (haswell) and no AVX at all (generic)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = (
    "test_index.py",
    "test_kernels.py",
    "test_kernel_topk.py",
    "test_kernel_select.py",
    "test_kernel_bounds.py",
    "test_kernels_quantizers.py",
    "test_levels.py",
    "test_level_blocks.py",
    "test_kernel_lowrank.py",
    "test_kernels_bloom.py",
    "test_dct.py",
    "test_lloyd.py",
    "test_golden.py",
)
FEW = ("test_golden.py", "test_kernel_topk.py", "test_kernel_select.py")  # every codec's bytes; what asks for AVX-512 itself
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
