"""How a model is split into fragments, which are exchanged one after the other.

Douillard et al., Streaming DiLoCo with overlapping communication, arXiv 2501.18512, section 2.2.
"""

from collections.abc import Sequence

from .._util.names import fits
from ..errors import ConfigError
from ..exchange.buckets import Tensor

#: An argument `fragments=`: a number, or for each fragment the name patterns of its tensors.
Fragments = int | Sequence[Sequence[str]]


def split(tensors: Sequence[Tensor], fragments: Fragments) -> list[list[Tensor]]:
    """Split tensors into fragments.

    Args:
        tensors: The tensors, in the order of the model.
        fragments: A number of fragments, which then follow the order of the model and are about equally large; or for each
            fragment the name patterns of its tensors, of which the first that fits counts.

    Returns:
        The tensors of each fragment, in the order of the model.

    Raises:
        ConfigError: There are fewer tensors than fragments, a tensor fits no pattern, or a fragment has no tensor.
    """
    if isinstance(fragments, int):
        if not 1 <= fragments <= len(tensors):
            raise ConfigError(f"fragments={fragments}; allowed: 1 to the number of tensors, {len(tensors)}")
        return _equal_parts(tensors, fragments)
    parts: list[list[Tensor]] = [[] for _ in fragments]
    for tensor in tensors:
        fitting = [part for part, patterns in zip(parts, fragments, strict=True) if _fits(tensor.name, patterns)]
        if not fitting:
            raise ConfigError(f"fragments={fragments!r}: no pattern fits {tensor.name!r}")
        fitting[0].append(tensor)
    if empty := [patterns for part, patterns in zip(parts, fragments, strict=True) if not part]:
        raise ConfigError(
            f"fragments: nothing is left for {empty!r}; allowed: patterns that fit a tensor that no earlier ones fit"
        )
    return parts


def _fits(name: str, patterns: Sequence[str]) -> bool:
    if isinstance(patterns, str):
        raise ConfigError(f"fragments: {patterns!r}; allowed: a list of name patterns for each fragment")
    return fits(name, patterns)


def _equal_parts(tensors: Sequence[Tensor], count: int) -> list[list[Tensor]]:
    """Each part takes tensors while it is further from its end than half of the next one, and leaves one for each part to come."""
    total, taken = sum(tensor.size for tensor in tensors), 0
    parts: list[list[Tensor]] = []
    rest = list(tensors)
    for number in range(1, count + 1):
        part = [rest.pop(0)]
        taken += part[0].size
        while len(rest) > count - number and (number == count or taken + rest[0].size / 2 <= total * number / count):
            part.append(rest.pop(0))
            taken += part[-1].size
        parts.append(part)
    return parts
