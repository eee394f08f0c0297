"""Compile the kernels for accelerators, and write what they take of registers, shared memory and memory traffic into docs/gpu.md.

python benchmarks/kernel_resources.py [--out docs]

It needs PyTorch and Triton, and no accelerator.
"""

import argparse
import os

import triton
from _lib import ROOT
from _page import write_section

from grace_ext.adapters._torch.kernels import topk, traffic
from grace_ext.adapters._torch.kernels.catalogue import VARIANTS
from grace_ext.adapters._torch.kernels.compiling import TARGETS, compile_for

ELEMENTS, RANKS = 25_600_000, 4


def resources() -> str:
    """The table of what each kernel takes on each target."""
    lines = [
        f"Written by `benchmarks/kernel_resources.py`; do not edit. Registers of a thread / bytes of shared memory of a program, by "
        f"the compilers of Triton {triton.__version__}. Bold: it goes over all of the gradient. No kernel that does so spills; "
        f"what others spill is in brackets.",
        "",
        "| kernel | warps | " + " | ".join(TARGETS) + " |",
        "|---|--:|" + "--:|" * len(TARGETS),
    ]
    for variant in VARIANTS:
        cells = []
        for target in TARGETS:
            one = compile_for(variant, target)
            cells.append(f"{one.registers} / {one.shared}" + (f" ({one.spilled})" if one.spilled else ""))
        name = f"`{variant.name}`"
        lines.append(f"| {f'**{name}**' if variant.hot else name} | {variant.warps} | {' | '.join(cells)} |")
    return "\n".join(lines)


def model() -> str:
    """The model of memory traffic of the default spec."""
    n, sample = ELEMENTS // 100, topk.sample_size(ELEMENTS)
    full, half = (traffic.encode(ELEMENTS, n, round(1.25 * n), sample, bits) for bits in (32, 16))
    lines = [
        f"Written by `benchmarks/kernel_resources.py`; do not edit. `topk:0.01/rice/qsgd:7` with memory residual, in 32 and in 16 "
        f"bits, {ELEMENTS:,} elements, 1.25 % of which are candidates. One pass is to read or write the gradient once.",
        "",
        "| encoding | passes | with 16 bits |",
        "|---|--:|--:|",
        *(f"| {name} | {full[name] / 4 / ELEMENTS:.3f} | {half[name] / 4 / ELEMENTS:.3f} |" for name in full),
        f"| sum | {traffic.passes(full, ELEMENTS):.2f} | {traffic.passes(half, ELEMENTS):.2f} |",
        "",
        "| decoding, by number of ranks | passes |",
        "|---|--:|",
        *(
            f"| {ranks} | {traffic.passes(traffic.decode(ELEMENTS, n, ranks, n // 4), ELEMENTS):.2f} |"
            for ranks in (1, 2, RANKS, 2 * RANKS)
        ),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=os.path.join(ROOT, "docs"), help="folder of gpu.md (default: %(default)s)")
    out = parser.parse_args().out
    write_section(out, "resources", "Registers and shared memory", resources(), "gpu.md")
    print(write_section(out, "traffic", "Memory traffic", model(), "gpu.md"))


if __name__ == "__main__":
    main()
