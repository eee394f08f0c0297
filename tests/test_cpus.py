"""The kernel tests once more, compiled for other CPUs: no AVX-512 (haswell) and no AVX at all (generic)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = (
    "index/test_lossless.py",
    "kernels/test_kernels.py",
    "kernels/test_topk.py",
    "kernels/test_select.py",
    "kernels/test_bounds.py",
    "kernels/test_quantizers.py",
    "value/test_levels.py",
    "kernels/test_level_blocks.py",
    "kernels/test_lowrank.py",
    "kernels/test_bloom.py",
    "transforms/test_dct.py",
    "value/test_lloyd.py",
    "golden/test_golden.py",
)
FEW = (
    "golden/test_golden.py",
    "kernels/test_topk.py",
    "kernels/test_select.py",
)  # every codec's bytes; what asks for AVX-512 itself
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
