"""Writes the golden files: `python tests/golden/make.py` adds the ones that are missing, `--rewrite` makes all anew.

No test calls this. A file that changes is a change of the format: it needs a new version in docs/container-format.md.
"""

import json
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

import grace_ext  # noqa: E402
from grace_ext import registry  # noqa: E402
from grace_ext.pipeline import container  # noqa: E402

# The bytes of these depend on a library's build, so only decoding is pinned.
DECODE_ONLY = {"deflate"}


def inputs():
    """Two float32[150]: normal, and one with few distinct values; zeros of both signs in both."""
    normal = np.random.default_rng(2026).standard_normal(150).astype(np.float32)
    normal[:4] = 0.0, -0.0, 1e-41, 0.0
    return {"normal": normal, "levels": np.round(normal)}


def cases():
    """name -> arguments. Every codec with an id, sparse and (for values) dense; then what else a header can say."""
    index = {
        name: f"{'randomk' if name == 'shared' else 'topk'}:0.2/{name}/raw"
        for name in registry.names("index")
        if registry.lookup("index", name).id is not None
    }
    found = {f"index-{name}": {"spec": spec} for name, spec in index.items()}
    for name in registry.names("value"):
        found[f"value-{name}"] = {"spec": f"topk:0.2/raw/{name}"}
        found[f"value-{name}-dense"] = {"spec": f"dense/{name}"}
    for name in registry.names("transform"):
        found[f"transform-{name}"] = {"spec": f"{name}/topk:0.01/rice/raw"}
    found["dct-1-d"] = {"spec": "dct:16:dims=1/topk:0.3/bitmap/fp16"}
    found["qsgd-2-bits"] = {"spec": "topk:1.0/bitmap/qsgd:2:bucket=8"}
    found["qsgd-7-bits"] = {"spec": "topk:0.2/rice/qsgd:7:bucket=16"}
    found["qsgd-5-levels"] = {"spec": "dense/qsgd:levels=5:bucket=16:norm=l2"}
    found["qsgd-1000-levels"] = {"spec": "dense/qsgd:levels=1000:bucket=32"}
    found["qsgd-huffman"] = {"spec": "dense/qsgd:4:norm=l2:entropy=huffman"}
    found["qsgd-ans"] = {"spec": "dense/qsgd:4:bucket=1024:norm=l2:entropy=ans"}
    found["minmax-4-bits"] = {"spec": "dense/minmax:4:chunk=40"}
    found["natural-8-bits"] = {"spec": "dense/natural:8"}
    found["terngrad-2-bits"] = {"spec": "dense/terngrad:bits:bucket=16"}
    found["threelc-zeros"] = {"spec": "dense/threelc:1.9"}
    found["sign-one"] = {"spec": "dense/sign:one"}
    found["huffman-bytes"] = {"spec": "topk:0.2/huffman:bytes/raw"}
    for policy in ("p1", "p2", "leftmost", "middle", "rightmost", "naive"):
        found[f"bloom-{policy}"] = {"spec": f"topk:0.2/bloom:{policy}:fpr=0.1:seed=1/raw"}
    found["keys-sorted-values"] = {"spec": "topk:0.2/keys/polyfit"}
    found["rows-few"] = {"spec": "topk:0.05/rows:8/raw"}
    found["rows-all"] = {"spec": "dgc:1.0/rows:20/raw"}
    found["row-context"] = {"spec": "topk:0.5/row_context:10/raw"}
    found["rows-whole"] = {"spec": "nonzero/rows:1/raw"}
    found["lloyd-huffman"] = {"spec": "dense/lloyd:0.3:entropy=huffman"}
    for entropy in ("ans", "huffman"):
        found[f"levels-{entropy}-classes"] = {"spec": f"dense/lloyd:0.1:entropy={entropy}", "fading": 4224}
        found[f"levels-{entropy}-mirrored"] = {"spec": f"dense/lloyd:0.1:entropy={entropy}", "runs": 640}
    found["levels-classes-mirrored"] = {"spec": "dense/lloyd:0.1", "fading": 4224, "runs": 4224}
    found["key"] = {"spec": "dense/qsgd:4", "seed": -5, "name": "conv1.wéight", "step": 1000, "rank": 3}
    found["shape"] = {"spec": "topk:0.1/rice/fp16", "shape": [3, 1, 50]}
    for dtype in ("float16", "float64"):
        found[dtype] = {"spec": "topk:0.1/rice/fp16", "dtype": dtype}
    found["empty"] = {"spec": "topk:0.1/rice/qsgd", "input": "normal", "take": 0}
    found["zeros"] = {"spec": "topk:0.1/rice/qsgd", "input": "normal", "take": 2}
    found["non-finite"] = {"spec": "topk:0.1/rice/qsgd", "input": "normal", "take": 5, "first": "nan"}
    return found


def gradient_of(case, arrays):
    gradient = arrays[case["input"]][: case.get("take")].astype(case.get("dtype", "float32"))
    if "fading" in case:  # so long, in eight parts, each a half of the one before
        gradient = np.ldexp(np.resize(gradient, case["fading"]), -(np.arange(case["fading"]) * 8 // case["fading"]))
    if "runs" in case:  # so long, in runs of 16 of the same sign
        gradient = np.copysign(np.resize(gradient, case["runs"]), 15.5 - np.arange(case["runs"]) % 32)
    if "first" in case:
        gradient[0] = float(case["first"])
    return gradient.reshape(case.get("shape", -1))


def encode(case, arrays):
    c = grace_ext.compressor(case["spec"], seed=case.get("seed", 0))
    key = {key: case[key] for key in ("name", "step", "rank") if key in case}
    return c.compress(gradient_of(case, arrays), shape="shape" in case, **key)


def fits(case, arrays):
    """Whether the codecs are those that the spec names, and not raw because a section was too long."""
    c, parsed = grace_ext.compressor(case["spec"]), container.parse(encode(case, arrays))
    return (
        parsed.k == 0
        or parsed.non_finite
        or (parsed.value_id == c.value.id and (c.dense or c.index.id in (None, parsed.index_id)))
    )


def permuted():
    """An order section on fp16 values: no codec needs one yet."""
    order = np.array([4, 0, 3, 1, 2], np.uint32)
    values = np.array([1, 2, 3, 4, 5], "<f2").view(np.uint8)
    return container.pack(9, 5, 1, np.array([0, 2, 5, 6, 8], "<u4").view(np.uint8), 2, values, order=order)


def main(rewrite):
    arrays = inputs()
    known = {} if rewrite else json.loads((HERE / "cases.json").read_text())
    for name, array in arrays.items():
        path = HERE / f"{name}.f4"
        if rewrite:
            path.write_bytes(array.astype("<f4").tobytes())
        arrays[name] = np.fromfile(path, "<f4")
    for name, case in {**cases(), "order": {}}.items():
        if name in known:
            continue
        if case:
            names = [case["input"]] if "input" in case else list(arrays)
            case["input"] = next((i for i in names if fits({**case, "input": i}, arrays)), None)
            if case["input"] is None:
                print(f"no {name}: raw would be sent instead of {case['spec']}")
                continue
            case["decode_only"] = any(part in DECODE_ONLY for part in case["spec"].split("/"))
        blob = encode(case, arrays) if case else permuted()
        (HERE / f"{name}.bin").write_bytes(blob.tobytes())
        dense = grace_ext.decompress(blob, container.parse(blob).d)
        (HERE / f"{name}.out.f4").write_bytes(dense.astype("<f4").tobytes())
        known[name] = case
        print("wrote", name)
    (HERE / "cases.json").write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(rewrite="--rewrite" in sys.argv[1:])
