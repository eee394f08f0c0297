"""All kernels compile for accelerators that are not here; what their machine code does to registers and to floats."""

import re

import pytest
from support.launch import skip_without

skip_without("torch", "triton")
pytestmark = pytest.mark.tier("test")

from grace_ext.adapters._torch.kernels import catalogue  # noqa: E402
from grace_ext.adapters._torch.kernels.compiling import TARGETS, compile_for  # noqa: E402


@pytest.fixture(scope="module")
def compiled():
    return {target: {one.name: (one, compile_for(one, target)) for one in catalogue.VARIANTS} for target in TARGETS}


@pytest.mark.parametrize("target", TARGETS)
def test_hot_kernels_spill_no_register(compiled, target):
    assert not {name for name, (variant, one) in compiled[target].items() if variant.hot and one.spilled}


@pytest.mark.parametrize("target", TARGETS)
def test_shared_memory_and_registers_leave_room_for_several_programs(compiled, target):
    for name, (variant, one) in compiled[target].items():
        assert one.shared <= 32 * 1024, name
        if target != "gfx942":
            assert one.registers * 32 * variant.warps * 2 <= 65536, name


@pytest.mark.parametrize("target", [target for target in TARGETS if target != "gfx942"])
def test_floats_are_rounded_as_on_the_host(compiled, target):
    """After each operation, to nearest, and with subnormal numbers; ptxas fuses what PTX keeps apart unless it is told."""
    for name, (_, one) in compiled[target].items():
        assert not re.search(r"\bfma\.|\.ftz|\.approx|\.full", one.assembly), name
        if "div.rn" not in one.assembly and "sqrt.rn" not in one.assembly:  # which consist of fused operations
            assert "FFMA" not in one.machine_code and "DFMA" not in one.machine_code, name
    quotients = {name for name, (_, one) in compiled[target].items() if "div.rn" in one.assembly}
    assert {name.partition("(")[0] for name in quotients} >= {"qsgd_encode", "qsgd_decode"}


def test_a_fused_product_would_be_seen(compiled, monkeypatch):
    """The test above finds FFMA where ptxas may fuse."""
    import triton
    from triton.compiler import ASTSource

    variant = next(one for one in catalogue.VARIANTS if one.kernel.__name__ == "add_at")
    given = dict(zip([p.name for p in variant.kernel.params], variant.types.split(), strict=False)) | {"BLOCK": "constexpr"}
    source = ASTSource(variant.kernel, signature=given, constexprs={(6,): 1024})
    fused = triton.compile(source, target=TARGETS["sm_90"], options={"enable_fp_fusion": True})
    assert "fma.rn.f32" in fused.asm["ptx"]


def test_every_kernel_is_in_the_catalogue():
    from triton.runtime.jit import JITFunction

    from grace_ext.adapters._torch.kernels import accumulate, half, minmax, qsgd, ranges, rice, signs, ternary, topk

    kernels = {
        value
        for module in (accumulate, half, minmax, qsgd, ranges, rice, signs, ternary, topk)
        for name, value in vars(module).items()
        if isinstance(value, JITFunction) and value.__module__ == module.__name__ and not name.startswith(("_", "range_of"))
    }
    assert kernels == {variant.kernel for variant in catalogue.VARIANTS}
    assert len({variant.name for variant in catalogue.VARIANTS}) == len(catalogue.VARIANTS)
