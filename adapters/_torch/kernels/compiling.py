"""Compiling kernels for accelerators that are not here, and what the compiler says of the machine code."""

import dataclasses
import re
import subprocess
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .catalogue import Variant

#: NVIDIA's generations Ampere, Hopper and Blackwell, and AMD's MI300.
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Of a thread: registers, and bytes or registers that did not fit into these; of a program: bytes of shared memory.

    assembly: PTX, or AMD's. machine_code: the disassembly of a cubin, empty for AMD.
    """

    registers: int
    spilled: int
    shared: int
    assembly: str
    machine_code: str


def arguments(variant: Variant) -> dict[str, str]:
    """The types of a kernel's arguments that are no constants, by name."""
    names = [parameter.name for parameter in variant.kernel.params if parameter.name not in variant.constants]
    return dict(zip(names, variant.types.split(), strict=True))


def source_of(variant: Variant, ones: Collection[str] = ()) -> ASTSource:
    """What Triton compiles. ones: names of integer arguments that are 1, of which a launch makes constants."""
    names = [parameter.name for parameter in variant.kernel.params]
    types, constants = arguments(variant), {**variant.constants, **dict.fromkeys(ones, 1)}
    return ASTSource(
        variant.kernel,
        signature={name: "constexpr" if name in constants else types[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )


def options_of(variant: Variant) -> dict[str, Any]:
    """The compiler's options for a kernel."""
    return {"num_warps": variant.warps, "enable_fp_fusion": False}


def compile_for(variant: Variant, target: str) -> Compiled:
    """Compile a kernel for one of TARGETS, with the compilers that Triton brings."""
    compiled = triton.compile(source_of(variant), target=TARGETS[target], options=options_of(variant))
    if TARGETS[target].backend == "hip":
        assembly = compiled.asm["amdgcn"]
        registers, spilled = (
            int(re.search(rf"\.{field}:\s*(\d+)", assembly)[1]) for field in ("vgpr_count", "vgpr_spill_count")
        )
        return Compiled(registers, spilled, compiled.metadata.shared, assembly, "")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _cuobjdump("-res-usage", file.name)
        machine_code = _cuobjdump("-sass", file.name)
    # What is spilled goes to local memory, whose frame is STACK.
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return Compiled(
        found["REG"], found["STACK"] + found["LOCAL"], compiled.metadata.shared, compiled.asm["ptx"], machine_code
    )


def _cuobjdump(option: str, path: str) -> str:
    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return subprocess.run([program, option, path], check=True, capture_output=True, text=True).stdout
