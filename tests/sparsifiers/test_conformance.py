"""Every sparsifier against what a sparsifier promises."""

import pytest
from support import codec_conformance
from support.codec_conformance import variants

from grace_ext.pipeline import spec


@pytest.mark.parametrize("text", variants("sparsifier"))
def test_sparsifier(text):
    sparsifier = spec.parse_stage("sparsifier", text)
    for gradient in codec_conformance.gradients().values():
        codec_conformance.check_sparsifier(sparsifier, gradient)
