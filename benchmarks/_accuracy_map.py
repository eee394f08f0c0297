"""What the accuracy map of benchmarks/transformer.py compares: the parts of specs, each with its options, on one task."""

from grace_ext.pipeline.presets import PRESETS
from grace_ext.registry import names

DENSITIES = (0.1, 0.01, 0.001)
FALSE_POSITIVES = (0.1, 0.01, 0.001)
POLICIES = ("p0", "p1", "p2")
SPARSIFIERS = ("topk:{density:g}", "topk:{density:g}:per=tensor", "dgc:{density:g}", "randomk:{density:g}")
THRESHOLDS = (1e-4, 1e-3, 1e-2)


def specs() -> dict[str, str]:
    """List the specs by what the map calls them. All go with the memory `residual`."""
    quantizers = [name for name in names("value") if name != "raw"]
    found = [f"dense/{value}" for value in ("raw", *quantizers)]
    found += [f"{one.format(density=density)}/auto/raw" for one in SPARSIFIERS for density in DENSITIES]
    found += [f"threshold:{value:g}/auto/raw" for value in THRESHOLDS]
    found += [f"topk:{density:g}/auto/{value}" for value in quantizers for density in DENSITIES]
    found += [
        f"topk:{density:g}/bloom:{policy}:fpr={fpr:g}/raw"
        for policy in POLICIES
        for fpr in FALSE_POSITIVES
        for density in DENSITIES
    ]
    return {**{spec: spec for spec in found}, **{f"preset {name}": name for name in PRESETS}}


def file_name(label: str) -> str:
    """Return the label as a part of the name of a result's file."""
    return "".join(c if c.isalnum() or c in ".=" else "-" for c in label)
