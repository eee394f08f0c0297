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


def test_what_a_reader_looks_for_first_is_on_the_first_screen():
    screen = "\n".join((ROOT / "README.md").read_text().splitlines()[:60])
    for what in (
        "**Where it does not help:**",
        "CPU only",
        "pip install '.[torch]'",
        "torchrun",
        "horovodrun",
        "make demo",
        "make test",
        *(f"docs/tutorials/{name}.md" for name in ("horovod-pytorch", "horovod-keras", "pytorch-ddp", "numpy")),
    ):
        assert what in screen, what


def test_the_figures_of_the_default_are_those_that_were_measured():
    readme, measured = (ROOT / "README.md").read_text(), (ROOT / "docs/accuracy.md").read_text()
    fewer = re.search(r"compressed layers alone send (\d+)×", measured)[1]
    points = re.search(r"topk:0\.01/rice/qsgd:7 .*\n\| difference, in points \|(?: \S+ \|){3} (\S+) \|", measured)[1]
    assert f"{fewer} times fewer bytes than float32" in readme
    assert f"the accuracy changes by {points} points" in readme


def test_the_specs_to_choose_from_compress_as_the_document_says():
    rows = re.findall(r"\| `([^`]+)`[^|]*\| (?:about )?(\d+) times \|", (ROOT / "docs/choosing.md").read_text())
    assert len(rows) == 6
    gradient = gauss(1_000_000)
    for spec, ratio in rows:
        blob = grace_ext.compressor(spec).compress(gradient)
        assert abs(4 * gradient.size / blob.size / int(ratio) - 1) < 0.03, (spec, blob.size)


def test_what_it_says_of_adam_is_what_was_measured():
    page = (ROOT / "docs" / "transformers.md").read_text()
    [row] = [line for line in page.split("\n## ")[1].splitlines() if line.startswith("| grace_ext, default |")]
    _, _, _, seeds, _, worse, fewer, *_ = (cell.strip() for cell in row.split("|"))
    claim = f"a loss {-float(worse):.1f} % below that of Horovod float32, with {fewer.rstrip('×')} times fewer bytes"
    assert claim in " ".join((ROOT / "README.md").read_text().split()) and seeds == "3"
