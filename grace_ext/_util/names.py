"""Names of tensors and the patterns that stand for them."""

import fnmatch
from collections.abc import Iterable


def fits(name: str, patterns: Iterable[str]) -> bool:
    """Say whether one of some patterns stands for a name.

    Args:
        name: The name.
        patterns: Patterns of fnmatch, with *, ? and [ab], or exact names, which may have brackets ("block[0].weight").

    Returns:
        Whether one does.
    """
    return any(name == pattern or fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
