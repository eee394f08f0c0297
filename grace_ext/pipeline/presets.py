"""Published methods by name: `grace_ext.compressor("dr-bf-p0")`, or with another density `"dr-bf-p0:0.1"`.

The names that begin with dr- are the rows of Table 3 of DeepReduce (Xu, Kostopoulou, Dutta et al., NeurIPS 2021,
appendix F.2), for the largest 1 % of the elements, with the paper's false-positive rate of 0.001 and its 7-bit QSGD in
buckets of 512 (Table 6).
"""

from ..errors import ConfigError

_TOPK = "topk:0.01"

#: name -> spec.
PRESETS = {
    "dr-bf-naive": f"{_TOPK}/bloom:naive:fpr=0.001/raw",
    "dr-bf-p0": f"{_TOPK}/bloom:p0:fpr=0.001/raw",
    "dr-bf-p1": f"{_TOPK}/bloom:p1:fpr=0.001/raw",
    "dr-bf-p2": f"{_TOPK}/bloom:p2:fpr=0.001/raw",
    "dr-rle": f"{_TOPK}/rle/raw",
    "dr-huffman": f"{_TOPK}/huffman:bytes/raw",
    "dr-fit-poly": f"{_TOPK}/keys/polyfit",
    "dr-fit-dexp": f"{_TOPK}/keys/dexp",
    "dr-deflate": f"{_TOPK}/raw/deflate",
    "dr-qsgd": f"{_TOPK}/raw/qsgd:7:norm=l2",
    "dr-bf-p0-fit-poly": f"{_TOPK}/bloom:p0:fpr=0.001/polyfit",
    "dr-bf-p1-fit-poly": f"{_TOPK}/bloom:p1:fpr=0.001/polyfit",
    "dr-bf-p0-qsgd": f"{_TOPK}/bloom:p0:fpr=0.001/qsgd:7:norm=l2",
    "dr-bf-p2-qsgd": f"{_TOPK}/bloom:p2:fpr=0.001/qsgd:7:norm=l2",
    "3lc": "dense/threelc",
    "sketchml": "dense/sketchml",
    "skcompress": f"{_TOPK}/huffman/sketchml:entropy=huffman",
    "panthalia": "dct:64/topk:0.01:per=chunk/auto/minmax:8:per=chunk",
}


def expand(text: str) -> str | None:
    """Return the spec that a preset stands for.

    Args:
        text: Name of a preset ("dr-rle"), or name and density ("dr-rle:0.1").

    Returns:
        The spec, or None if there is no such preset.

    Raises:
        ConfigError: A density is given, and the preset has none.
    """
    name, colon, density = text.strip().partition(":")
    spec = PRESETS.get(name)
    if spec is None or not colon:
        return spec
    if _TOPK not in spec:
        raise ConfigError(f"preset {name!r} takes no density; it is {spec}")
    return spec.replace(_TOPK, f"topk:{density}", 1)
