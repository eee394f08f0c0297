"""Quantities as people write them on a command line: 25.6M, 120ms, 1gbit. For argparse, which expects a ValueError."""

import math
from collections.abc import Callable


def count(text: str) -> int:
    """Parse a count: 25600000, 25.6e6 or 25.6M.

    Args:
        text: The text.

    Returns:
        An integer of at least 1.

    Raises:
        ValueError: It is not one.
    """
    factor = {"k": 1e3, "M": 1e6, "G": 1e9}.get(text[-1:], 1)
    number = float(text[:-1] if factor > 1 else text) * factor
    if not (math.isfinite(number) and number == round(number) and number >= 1):
        raise ValueError
    return round(number)


def _quantity(name: str, units: dict[str, float]) -> Callable[[str], float]:
    """Return a parser for positive numbers, with one of these units or without."""

    def parse(text: str) -> float:
        unit = next((unit for unit in sorted(units, key=len, reverse=True) if text.endswith(unit)), "")
        number = float(text.removesuffix(unit)) * units.get(unit, 1)
        if not (math.isfinite(number) and number > 0):
            raise ValueError
        return number

    parse.__name__ = f"{name} (units: {', '.join(units)})"  # in argparse's message: "invalid ... value"
    return parse


seconds = _quantity("time", {"s": 1, "ms": 1e-3, "us": 1e-6})
bits_per_second = _quantity("rate", {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9})
