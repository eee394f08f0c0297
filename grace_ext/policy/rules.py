"""Which spec each tensor has: by name pattern or by size, the first rule that fits."""

from ..pipeline.compressor import Compressor, make_compressor
from .patterns import Patterns

DEFAULT_SPEC = "topk:0.01/rice/qsgd:7"
#: The default for gradients that come as rows of a table: they are sparse already, and lose less by quantization than by
#: leaving out more elements (docs/embedding.md).
DEFAULT_ROWS_SPEC = "dense/lloyd:0.1"
#: Up to this many elements a tensor is sent dense by default: its header and latency would outweigh the savings.
SMALL = 1024


class Rules:
    """Specs by tensor, from name patterns ("*.bias", "encoder.*") or sizes ("<=1024", ">100000").

    The first rule that fits a tensor decides; "*" fits all. Without a fitting rule, tensors of at most SMALL elements or
    with fewer than two dimensions (biases, norms) are sent as `small`, the others as `default`. Gradients that
    come as rows take `rows`.

    Args:
        default: The spec of tensors that no rule fits.
        rules: Specs by pattern or size.
        seed: Seed of the compressors.
        small: The spec of small tensors that no rule fits.
        rows: The spec of gradients that come as rows and that no rule fits; None: DEFAULT_ROWS_SPEC where `default` is
            DEFAULT_SPEC, and `default` elsewhere.
    """

    def __init__(
        self,
        default: str | dict | Compressor = DEFAULT_SPEC,
        rules: dict | None = None,
        seed: int = 0,
        small: str = "dense/raw",
        rows: str | None = None,
    ):
        self.default = make_compressor(default, seed)
        self.small = make_compressor(small, seed)
        if rows is None and self.default == make_compressor(DEFAULT_SPEC, seed):
            rows = DEFAULT_ROWS_SPEC
        self.rows = self.default if rows is None else make_compressor(rows, seed)
        self._rules = Patterns("rules", rules or {}, lambda spec: make_compressor(spec, seed))

    def choose(self, name: str, size: int, ndim: int, as_rows: bool = False) -> Compressor:
        """Choose the compressor of a tensor.

        Args:
            name: Name of the tensor.
            size: Number of its elements.
            ndim: Number of its dimensions.
            as_rows: Whether its gradient comes as rows (grace_ext.exchange.row_buckets).

        Returns:
            The compressor.
        """
        chosen = self._rules.find(name, size)
        if chosen is not None:
            return chosen
        if size <= SMALL or ndim < 2:
            return self.small
        return self.rows if as_rows else self.default
