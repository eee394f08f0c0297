"""What codecs have in common whose sections consist of other codecs' sections: these parts, and the rows of a table."""

import numpy as np

from ..errors import ContainerError
from ..registry import by_id
from .auto import shortest

#: In the place of a codec's id: all positions of the domain, and no section.
ALL, EMPTY = 0, np.empty(0, np.uint8)


def row_count(d: int, width: int) -> int:
    """Return how many rows a table of d elements has; the last one may be short."""
    return -(-d // width)


def elements_of(rows: np.ndarray, width: int, d: int) -> int:
    """Return how many elements these rows have: uint32[r], ascending, of a table of d elements."""
    short = row_count(d, width) * width - d if rows[-1] == row_count(d, width) - 1 else 0
    return rows.size * width - short


def encode_part(positions: np.ndarray, domain: int) -> tuple[int, np.ndarray]:
    """Return (id of the part's codec, section), by the codec that `auto` would choose among those without parts."""
    if positions.size == domain:
        return ALL, EMPTY
    codec = shortest(positions, domain)
    return codec.id, codec.encode(positions, domain)[0]  # type: ignore[return-value]  # auto chooses among those with an id


def decode_part(name: str, id: int, section: np.ndarray, domain: int, out: np.ndarray) -> None:
    """Decode what encode_part has encoded; for ALL, only check it. Raises ContainerError in the name of the codec."""
    codec = by_id("index", id)
    if id == ALL:
        if section.size or out.size != domain:
            raise ContainerError(f"{name}: {section.size} bytes, {out.size} positions: not all {domain} and no section")
    elif (
        codec is None
        or codec.composite
        or codec.follows_values
        or not (codec.lossless and codec.universal)
        or out.size > domain
    ):
        raise ContainerError(f"{name}: index codec {id} cannot be that of {out.size} positions below {domain}")
    else:
        codec.decode(section, domain, out)
