"""A readable description of a container, for `python -m grace_ext inspect`."""

from collections.abc import Iterator

import numpy as np

from . import registry
from .bench import index_bound
from .errors import ContainerError
from .pipeline.container import Container
from .pipeline.decoder import unpack


def describe(parsed: Container) -> Iterator[tuple[str, str]]:
    """Describe the header and the sections of a container.

    Args:
        parsed: The container, from grace_ext.inspect.

    Yields:
        Pairs of a label of at most 8 characters, such as "index", and the text that belongs to it.
    """
    yield "dtype", parsed.dtype
    if parsed.shape is not None:
        yield "shape", " x ".join(map(str, parsed.shape)) or "scalar"
    yield "d", f"{parsed.d:,}"
    if parsed.transform:
        transform = registry.by_id("transform", parsed.transform[0])
        yield "domain", f"{parsed.domain:,} coefficients of {transform.name} (id {transform.id})"
    if parsed.non_finite:
        yield "content", "none: the sender's gradient held a NaN or an Inf"
        yield "overhead", f"{parsed.nbytes} bytes"
        return
    overhead = parsed.nbytes - parsed.value_section.size - parsed.index_section.size
    yield "k", f"{parsed.k:,}" + (f" (density {parsed.k / parsed.domain:.4%})" if parsed.d else "")
    if parsed.index_id:
        text = _section("index", parsed.index_id, parsed.index_section, parsed.k)
        if parsed.k:
            text += f"; uniformly random positions need {index_bound(parsed.domain, parsed.k):.2f}"
        yield "index", text
    else:
        yield "index", "none: all elements are here"
    yield "value", _section("value", parsed.value_id, parsed.value_section, parsed.k)
    if parsed.order_section is not None:
        overhead -= parsed.order_section.size
        yield "order", f"{parsed.order_section.size:,} bytes{_bits(parsed.order_section, parsed.k, 'value')}"
    yield "overhead", f"{overhead} bytes"
    yield "ratio", f"{4 * parsed.d / parsed.nbytes:.2f} : 1 against float32, all included"


MOST_ELEMENTS = 1 << 28  # of a container that is decoded on the word of a file


def check_sections(parsed: Container, most: int = MOST_ELEMENTS) -> None:
    """Check that the sections of a container decode.

    Args:
        parsed: The container, from grace_ext.inspect.
        most: The most elements that are decoded. A file of 40 bytes can claim to hold 2**31 - 1 elements, which take 16 GB.

    Raises:
        ContainerError: A section is malformed, or the container says that it has more elements than `most`.
    """
    if parsed.k > most:
        raise ContainerError(f"the container says that it has {parsed.k:,} elements; at most {most:,} are decoded")
    if not parsed.non_finite:
        support = np.empty(parsed.k if parsed.index_id else 0, np.uint32)
        unpack(parsed, support, np.empty(parsed.k, np.float32))


def _section(kind: str, id: int, section: np.ndarray, k: int) -> str:
    codec = registry.by_id(kind, id)
    name = codec.name if codec else "unknown"
    return f"{name} (id {id}), {section.size:,} bytes{_bits(section, k, kind)}"


def _bits(section: np.ndarray, k: int, what: str) -> str:
    return f", {8 * section.size / k:.2f} bits per {what}" if k else ""
