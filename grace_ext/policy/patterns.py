"""Which tensors a rule is for: name patterns and sizes."""

import re
from collections.abc import Callable
from typing import Any

from .._util.names import fits
from ..errors import ConfigError

_SIZE = re.compile(r"(<=|<|>=|>)\s*(\d+)")


class Patterns:
    """A mapping from name patterns ("*.bias", "encoder.*") or sizes ("<=1024", ">100000"); the first that fits decides.

    A pattern is one of fnmatch, with *, ? and [ab], or the exact name of a tensor, which may have brackets ("block[0].weight").

    Args:
        what: Name of the argument that the mapping is, for messages.
        mapping: Values by pattern or size.
        make: make(value) returns what `find` is to return.

    Raises:
        ConfigError: A key is neither a name pattern nor a size.
    """

    def __init__(self, what: str, mapping: dict, make: Callable):
        self._rules: list[tuple] = []
        for pattern, value in mapping.items():
            if not isinstance(pattern, str) or not pattern:
                raise ConfigError(f"{what}: {pattern!r} is not a name pattern or a size such as '<=1024'")
            size = _SIZE.fullmatch(pattern.strip())
            if pattern[0] in "<>" and not size:
                raise ConfigError(f"{what}: {pattern!r} is not a size; write for example '<=1024' or '>100000'")
            self._rules.append((pattern, size.groups() if size else None, make(value)))

    def find(self, name: str, size: int) -> Any:
        """Find the first rule that fits a tensor.

        Args:
            name: Name of the tensor.
            size: Number of its elements.

        Returns:
            What was made of the rule's value; None if no rule fits.
        """
        for pattern, limit, found in self._rules:
            if _holds(size, *limit) if limit else fits(name, [pattern]):
                return found
        return None


def _holds(size: int, comparison: str, limit: str) -> bool:
    return {"<=": size <= int(limit), "<": size < int(limit), ">=": size >= int(limit), ">": size > int(limit)}[comparison]
