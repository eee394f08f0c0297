"""What is checked in a process in which Triton compiles: kernels for accelerators that are not here, and device-check."""

import argparse
import contextlib
import functools
import importlib
import io
import itertools
import pkgutil
import re
import tempfile
from pathlib import Path
from unittest import mock

import triton
from support.checking import check, raises
from triton._C.libtriton import ir
from triton.compiler.compiler import make_backend
from triton.compiler.errors import CompilationError
from triton.runtime.jit import JITFunction

from grace_ext import ConfigError
from grace_ext.adapters._torch import device_check, kernels
from grace_ext.adapters._torch.kernels import catalogue
from grace_ext.adapters._torch.kernels.compiling import TARGETS, arguments, compile_for, options_of, source_of


@functools.cache
def compiled() -> dict:
    """target -> name -> (the variant, what came of it)."""
    return {target: {one.name: (one, compile_for(one, target)) for one in catalogue.VARIANTS} for target in TARGETS}


@check
def hot_kernels_spill_no_register():
    for target, found in compiled().items():
        assert not {name for name, (variant, one) in found.items() if variant.hot and one.spilled}, target


@check
def shared_memory_and_registers_leave_room_for_several_programs():
    for target, found in compiled().items():
        for name, (variant, one) in found.items():
            assert one.shared <= 32 * 1024, (target, name)
            if target != "gfx942":
                assert one.registers * 32 * variant.warps * 2 <= 65536, (target, name)


@check
def atomic_operations_need_no_fence():
    for target, found in compiled().items():
        for name, (_, one) in found.items():
            assert not re.search(r"acq_rel|\bfence|buffer_(inv|wbl2)", one.assembly), (target, name)


@check
def floats_are_rounded_as_on_the_host():
    """After each operation, to nearest, and with subnormal numbers; ptxas fuses what PTX keeps apart unless it is told."""
    for target, found in compiled().items():
        if target == "gfx942":
            continue
        for name, (_, one) in found.items():
            assert not re.search(r"\bfma\.|\.ftz|\.approx|\.full", one.assembly), (target, name)
            if "div.rn" not in one.assembly and "sqrt.rn" not in one.assembly:  # which consist of fused operations
                assert "FFMA" not in one.machine_code and "DFMA" not in one.machine_code, (target, name)
        quotients = {name for name, (_, one) in found.items() if "div.rn" in one.assembly}
        assert {name.partition("(")[0] for name in quotients} >= {"qsgd_encode", "qsgd_decode"}


@check
def a_fused_product_would_be_seen():
    """The check above finds FFMA where ptxas may fuse."""
    variant = next(one for one in catalogue.VARIANTS if one.kernel.__name__ == "add_at")
    fused = triton.compile(source_of(variant), target=TARGETS["sm_90"], options={"enable_fp_fusion": True})
    assert "fma.rn.f32" in fused.asm["ptx"]


def generated(variant, ones) -> str:
    """Triton's first code for a kernel, to which nothing that depends on the accelerator has been done."""
    target, context = TARGETS["sm_90"], ir.context()
    backend = make_backend(target)
    options = backend.parse_options(options_of(variant))
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    return str(source_of(variant, ones).make_ir(target, options, functions, modules, context))


@check
def arguments_of_one_compile_too():
    """A launch makes constants of integer arguments that are 1, unless it is told not to: each of them, and all together."""
    failed, tried = {}, 0
    for variant in catalogue.VARIANTS:
        plain = {parameter.name for parameter in variant.kernel.params if parameter.do_not_specialize}
        integers = [name for name, given in arguments(variant).items() if given == "i32" and name not in plain]
        for number in range(1, len(integers) + 1):
            for ones in itertools.combinations(integers, number):
                tried += 1
                try:
                    head = re.search("tt.func public .*", generated(variant, ones))[0]
                    assert not [name for name in integers if (f"%{name}:" in head) == (name in ones)], head
                except CompilationError as error:
                    failed[variant.name, ones] = str(error)
    assert not failed, failed
    assert tried > 2 * len(catalogue.VARIANTS)


MODULES = [
    f"{kernels.__name__}.{one.name}" for one in pkgutil.iter_modules(kernels.__path__) if not one.name.startswith("_")
]


@check
def every_kernel_is_in_the_catalogue():
    found = {
        value
        for module in map(importlib.import_module, MODULES)
        for name, value in vars(module).items()
        if isinstance(value, JITFunction) and value.__module__ == module.__name__ and not name.startswith(("_", "range_of"))
    }
    assert found == {variant.kernel for variant in catalogue.VARIANTS}
    assert len({variant.name for variant in catalogue.VARIANTS}) == len(catalogue.VARIANTS)


@check
def bytes_that_differ_are_told():
    wrong = {"spec": "dense/qsgd:4", "kind": "ties", "elements": 9, "equal": False}
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(device_check.torch.cuda, "is_available", lambda: False),
        mock.patch.object(device_check, "_in_interpreter", lambda: [wrong, {**wrong, "equal": True}]),
        contextlib.redirect_stdout(io.StringIO()) as said,
    ):
        assert device_check.run(argparse.Namespace(output=str(Path(folder) / "report.json"))) == 1
    assert "differ from the host's: dense/qsgd:4, ties, 9 elements" in said.getvalue() and "1 of 2" in said.getvalue()


@check
def trainings_that_differ_or_end_early_are_told():
    specs = device_check.device_training.SPECS
    right = {"backend": "gloo", "equal": dict.fromkeys(specs, True), "output": ""}
    wrong = {**right, "backend": "nccl", "equal": {**right["equal"], specs[1]: False}}
    early = {**right, "equal": {specs[0]: True}, "output": "out of memory"}
    assert not device_check._failure(right)
    assert device_check._failure(wrong) == f"training over nccl differs from the host's with {specs[1]}"
    assert device_check._failure(early) == "training over gloo ended early: out of memory"


@check
def where_kernels_cannot_run_it_raises():
    with raises(ConfigError, "do not run on 'cpu'"):
        device_check.compare("cpu")
