"""What the fuzzers share: what tells of a fault, and how bytes are made hostile."""

import inspect
from collections.abc import Callable

import numpy as np

#: What lengths and counts are set to: ends of varints of every length, ends of what fits uint32, and beyond.
NUMBERS = (0, 1, 2, 7, 127, 128, 255, 256, 2**14 - 1, 2**14, 2**21, 2**28, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**35 - 1)
#: float32 that no honest sender has in a container, or hardly ever.
FLOATS = np.array([np.nan, np.inf, -np.inf, -0.0, 3.4028235e38, -3.4028235e38, 1e-45, 1e30, 0], "<f4")
FLOATS[-1:].view("<u4")[:] = 0x7FA00000  # a signaling NaN


class Found(AssertionError):
    """A fault in grace_ext. The message shows it by itself: a Python script that raises, or a command."""


def script(error: BaseException, imports: str, functions: tuple[Callable, ...], *lines: str) -> str:
    """The script that defines the functions, of which each uses only the imports and those before it, and runs the lines.
    error: what they end with."""
    says = f"{type(error).__name__}: {error}".splitlines()
    return "\n".join([*(f"# {line}" for line in says), imports, *map(inspect.getsource, functions), *lines, ""])


def ends_with(kind: type[BaseException], text: str) -> bool:
    """Whether a script raises that."""
    try:
        with np.errstate():  # scripts set it
            exec(compile(text, "script", "exec"), {"__name__": "script"})
    except kind:
        return True
    except Exception:
        pass
    return False


def pick(rng: np.random.Generator, choices):
    """One of a sequence."""
    return choices[int(rng.integers(len(choices)))]


def chance(rng: np.random.Generator, share: float) -> bool:
    return rng.random() < share


def mutate(data: bytes, rng: np.random.Generator, donor: bytes) -> bytes:
    """Bytes set, flipped, cut out, put in, or copied from other ones, in one place; half of the time near the beginning."""
    size = len(data)
    at = int(rng.integers(min(size, pick(rng, (8, 48))) if chance(rng, 0.5) else size)) if size else 0
    change = int(rng.integers(8))
    if change == 0:
        return data[:at] + bytes([pick(rng, (0, 1, 127, 128, 254, 255))]) + data[at + 1 :]
    if change == 1:
        return data[:at] + bytes([int(rng.integers(256))]) + data[at + 1 :]
    if change == 2 and size:
        return data[:at] + bytes([data[at] ^ 1 << int(rng.integers(8))]) + data[at + 1 :]
    if change == 3:
        return data[:at] + data[at + int(rng.integers(1, 5)) :]
    if change == 4:
        return data[:at] + rng.bytes(int(rng.integers(1, 5))) + data[at:]
    if change == 5:
        return data[: int(rng.integers(size + 1))]
    if change == 6:
        number = min(pick(rng, NUMBERS), 2**32 - 1)
        return data[:at] + number.to_bytes(4, "little") + data[at + 4 :]
    start, length = int(rng.integers(len(donor) + 1)), int(rng.integers(1, 17))
    return data[:at] + donor[start : start + length] + data[at + (length if chance(rng, 0.7) else 0) :]
