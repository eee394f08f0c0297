"""Memory `demo`."""

from typing import Any

import numpy as np

from ..pipeline.compressor import Compressor
from ..registry import register
from .arrays import Arrays, NumpyArrays
from .base import Memory
from .residual import Residual


@register
class DeMo(Residual):
    """Decoupled momentum: each rank's momentum stays its own, and only its fast components are sent; the step is the sign.

    With m the momentum of a rank: m = decay · m + g; the largest components of m are sent, and taken out of it. The
    optimizer gets the sign of the sum of what all ranks sent, times the factor of the mean. By communicator "senders" it is
    that of the mean over the ranks that sent a component, as in the paper's code; the two differ only with a transform. It
    is meant for the spec "dct:64/topk:0.008:per=chunk/auto/lloyd:0.05", for SGD without momentum, and for learning rates as
    of Adam or signSGD; SGD's weight decay is then a decoupled one. Tensors that are sent exactly give the sign of the mean
    gradient.

    Args:
        decay: Factor of the momentum, above 0 and at most 1.

    Source:
        Peng, Quesnelle and Kingma, DeMo: Decoupled momentum optimization, arXiv 2411.19870, section 3. The paper sends DCT
        coefficients of tiles of a tensor; here they are those of squares of the flattened bucket, as with transform `dct`.
    """

    name = "demo"
    supports_rows = False
    has_hooks = True
    applies_momentum = True
    receives_anywhere = True

    def __init__(self, decay: float = 0.999):
        super().__init__(decay)

    def for_compressor(self, compressor: Compressor) -> Memory:
        return self

    def on_received(self, name: str, out: np.ndarray, scale: float) -> None:
        self.on_received_anywhere(name, out, scale, NumpyArrays)

    def works_at_positions(self, compressor: Compressor) -> bool:
        return True

    def on_received_anywhere(self, name: str, out: Any, scale: float, arrays: Arrays) -> None:
        arrays.to_sign(out)
        out *= float(scale)
