"""Every value codec against what a value codec promises."""

import numpy as np
import pytest
from support import codec_conformance, reference_kernels
from support.arrays import gauss
from support.codec_conformance import variants

import grace_ext
from grace_ext.pipeline import spec

# cosine(what receivers get, true top-k) of a normal gradient; 0.5 where nothing is known: a mix-up gives about 0.
COSINE = {
    "raw": 1,
    "deflate": 1,
    "deflate:6": 1,
    "fp16": 1 - 1e-6,
    "qsgd": 1 - 1e-4,
    "qsgd:7:bucket=8": 1 - 1e-3,
    "qsgd:8:bucket=32768": 1 - 1e-3,
    "dexp": 1 - 1e-3,
    "sketchml": 0.995,
    "sketchml:5:entropy=ans": 0.9,
    "sketchml:256:entropy=huffman": 0.999,
    "lloyd": 1 - 1.3e-3,
    "lloyd:0.01:entropy=huffman": 1 - 1e-4,
    "polyfit": 1 - 1e-4,
    "polyfit:1:segments=20": 1 - 1e-4,
    "bf16": 1 - 1e-5,
    "minmax": 1 - 1e-4,
    "minmax:4:chunk=100:entropy=ans": 0.98,
    "natural": 0.9,
    "natural:8:entropy=huffman": 0.9,
    "onebit": 0.9,
    "onebit:0": 0.9,
    "terngrad": 0.6,
    "terngrad:ans:bucket=64": 0.65,
}


@pytest.mark.parametrize("text", variants("value"))
def test_value_codec(text):
    codec = spec.parse_stage("value", text)
    for name, gradient in codec_conformance.gradients().items():
        if gradient.size:
            decoded = codec_conformance.check_value_codec(codec, gradient)
            assert gradient.any() or not decoded.any(), f"{name}: something out of nothing"


@pytest.mark.parametrize("text", variants("value"))
def test_cosine_with_the_true_top_k(text):
    """Trap 1: values in one order and positions in another make a gradient that is noise."""
    for d, density in ((5000, 0.1), (200_000, 0.01)):
        gradient = gauss(d, 4)
        true = np.zeros(d)
        chosen = reference_kernels.topk(gradient, round(density * d))
        true[chosen] = gradient[chosen]
        for index in codec_conformance.index_codecs():
            c = grace_ext.compressor(f"topk:{density}/{index}/{text}")
            decoded = grace_ext.decompress(c.compress(gradient), d).astype(float)
            cosine = decoded @ true / np.linalg.norm(decoded) / np.linalg.norm(true)
            assert cosine >= (COSINE.get(text, 0.5) if c.index.lossless else 0.5) - 1e-12
