"""When rounds are made: which numbers of steps, delays and fragments fit together."""

import math
from collections.abc import Iterable

from ..errors import ConfigError
from ..exchange.buckets import Bucket
from .auto_steps import AutoSteps
from .weights import SAMPLES, UNIFORM

#: What `keep` can be beside a share.
MOVES = "moves"


def first_exchange(number: int, fragments: int, steps: int) -> int:
    """Compute after how many steps a fragment is exchanged for the first time; then it is every `steps` steps.

    Args:
        number: Number of the fragment, from 0.
        fragments: How many there are.
        steps: Number of local steps between two exchanges of a fragment; 0 where a round has a time.

    Returns:
        The number of steps.
    """
    return number * steps // fragments or steps


def check_timing(fragments: int, steps: object, seconds: float | None, delay: int, keep: float | str, weights: str) -> None:
    """Check arguments of Rounds.

    Args:
        fragments: Number of fragments.
        steps: See Rounds.
        seconds: See Rounds.
        delay: See Rounds.
        keep: See Rounds.
        weights: See Rounds.

    Raises:
        ConfigError: One is out of range, or they do not fit together.
    """
    if (steps is None) == (seconds is None):
        raise ConfigError(f"steps={steps}, seconds={seconds}; allowed: one of them")
    if seconds is not None:
        if not (math.isfinite(seconds) and seconds > 0):
            raise ConfigError(f"seconds={seconds}; allowed: finite and above 0")
        if fragments > 1 or delay:
            raise ConfigError(
                f"seconds={seconds} with fragments={fragments}, delay={delay}; allowed: one fragment, no delay"
            )
    elif callable(steps):
        if fragments > 1:
            raise ConfigError(f"steps by round with fragments={fragments}; allowed: a single fragment")
        if isinstance(steps, AutoSteps) and delay:
            raise ConfigError(f"steps={steps} with delay={delay}; allowed: no delay")
    elif not isinstance(steps, int) or steps < fragments:
        raise ConfigError(f"steps={steps!r}; allowed: whole numbers from the number of fragments on, {fragments}")
    elif not 0 <= delay < max(steps // fragments, 1):
        raise ConfigError(
            f"delay={delay}; allowed with steps={steps} and fragments={fragments}: 0 to {steps // fragments - 1}"
        )
    if delay < 0:
        raise ConfigError(f"delay={delay}; allowed: from 0 on")
    share = share_kept(keep)
    if not 0 <= share < 1 or share and not delay:
        raise ConfigError(
            f"keep={keep!r} with delay={delay}; allowed: {MOVES!r}, from 0 to below 1, above 0 only with a delay"
        )
    if weights not in (UNIFORM, SAMPLES):
        raise ConfigError(f"weights={weights!r}; allowed: {UNIFORM!r}, {SAMPLES!r}")


def share_kept(keep: float | str) -> float:
    """Say which share of itself a parameter keeps.

    Args:
        keep: See Rounds.

    Returns:
        The share; 0 where moves stay.

    Raises:
        ConfigError: It is neither a number nor known.
    """
    if keep == MOVES:
        return 0.0
    if isinstance(keep, str) or not isinstance(keep, int | float):
        raise ConfigError(f"keep={keep!r}; allowed: {MOVES!r}, or a number from 0 to below 1")
    return keep


def check_kept(keep: float | str, buckets: Iterable[Bucket]) -> None:
    """Check that no move counts twice.

    Args:
        keep: See Rounds.
        buckets: Those of all fragments.

    Raises:
        ConfigError: A memory keeps moves that are not sent, and `keep` leaves them in the parameters, too.
    """
    for bucket in buckets if share_kept(keep) else ():
        if bucket.memory.stateful and not (bucket.memory.sends_differences or bucket.compressor.dense):
            raise ConfigError(
                f"keep={keep} with {str(bucket.compressor)!r} and memory {str(bucket.memory)!r}: moves that are not sent would stay "
                f"in the parameter and in the memory, and count twice; allowed: keep={MOVES!r}, 0, a dense compression, memory "
                "'none' or 'ef21'"
            )
