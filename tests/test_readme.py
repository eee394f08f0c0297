"""What the README and the documents beside it show works as it stands there."""

import re
from pathlib import Path

import numpy as np
from support import codec_conformance
from support.arrays import gauss

import grace_ext

ROOT = Path(__file__).parents[1]


def test_the_codec_that_is_added_passes_the_contract(temporary_registry):
    source = re.search(
        r"<!-- codec:begin -->\s*```python\n(.*?)```\s*<!-- codec:end -->",
        (ROOT / "docs/adding-a-codec.md").read_text(),
        re.S,
    )[1]
    exec(compile(source, "adding-a-codec.md", "exec"), {})
    c = grace_ext.compressor("topk:0.1/rice/meansign")
    assert str(c) == "topk:0.1/rice/meansign"
    for gradient in codec_conformance.gradients().values():
        if gradient.size:
            codec_conformance.check_value_codec(c.value, gradient)
        codec_conformance.check_compressor(c, gradient)
        codec_conformance.check_feedback(c, [gradient, gradient[::-1].copy()])


def test_the_snippet_without_a_framework_works():
    source = re.search(r"Without any framework:\s*```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[1]
    gradient = gauss(4000).reshape(40, 100)
    names = {"gradient": gradient, "accumulator": np.zeros(4000, np.float32)}
    exec(compile(source, "README.md", "exec"), names)
    np.testing.assert_allclose(names["accumulator"], names["dense"] / 4, rtol=1e-6)


def test_the_specs_to_choose_from_compress_as_the_document_says():
    rows = re.findall(r"\| `([^`]+)`[^|]*\| (?:about )?(\d+) times \|", (ROOT / "docs/choosing.md").read_text())
    assert len(rows) == 6
    gradient = gauss(1_000_000)
    for spec, ratio in rows:
        blob = grace_ext.compressor(spec).compress(gradient)
        assert abs(4 * gradient.size / blob.size / int(ratio) - 1) < 0.03, (spec, blob.size)
