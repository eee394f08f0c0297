"""Checks of what callers give."""

import math
import operator
from typing import Any

import numpy as np

from ..errors import ConfigError

_INFINITE = 2.0**128 - 2.0**103  # from here on a float64 is Inf as a float32


def checked_integer(what: str, number: Any) -> int:
    """Check an integer of 64 bits.

    Args:
        what: Name of the argument, for messages.
        number: An int, or what Python takes for one, such as numpy's integers.

    Returns:
        The number as an int.

    Raises:
        ConfigError: It is none, or does not fit 64 bits with a sign.
    """
    try:
        found = operator.index(number)
    except TypeError:
        found = 2**63
    if not -(2**63) <= found < 2**63:
        raise ConfigError(f"{what}={number!r}; allowed: integers of 64 bits")
    return found


def checked_text(what: str, text: Any) -> str:
    """Check a text.

    Args:
        what: Name of the argument, for messages.
        text: A str.

    Returns:
        The text.

    Raises:
        ConfigError: It is something else.
    """
    if not isinstance(text, str):
        raise ConfigError(f"{what}={text!r}; allowed: a str")
    return text


def checked_factor(what: str, factor: Any) -> np.float32:
    """Check a factor.

    Args:
        what: Name of the argument, for messages.
        factor: A number, or a scalar of a framework.

    Returns:
        The factor, rounded to float32.

    Raises:
        ConfigError: It is no number, or not finite in float32.
    """
    try:
        found = math.nan if isinstance(factor, (str, bytes)) or getattr(factor, "ndim", False) else float(factor)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not abs(found) < _INFINITE:
        raise ConfigError(f"{what}={factor!r}; allowed: numbers that are finite in float32")
    return np.float32(found)
