"""Random streams that depend on what they are for, never on a global generator.

The key is a hash of (seed, name, step, rank), and kernels count from it. The user's own generators are never touched, and
the same gradient under the same key gives the same bytes on every machine, unless the value codec is deflate, whose bytes
depend on the library that is installed. Where ranks must draw the same numbers, the caller uses `Stream.shared`.
"""

import dataclasses
import struct

import xxhash

from .arguments import checked_integer


@dataclasses.dataclass(frozen=True, slots=True)
class Stream:
    """A source of random numbers for one tensor in one step.

    Attributes:
        seed: The compressor's seed, an integer of 64 bits.
        name: Name of the tensor or bucket.
        step: Number of the step.
        rank: Number of the rank.
    """

    seed: int = 0
    name: str = ""
    step: int = 0
    rank: int = 0

    def shared(self) -> "Stream":
        """Return the stream that all ranks have in common for this tensor and step. It differs from every rank's own stream.

        Returns:
            The stream.
        """
        return dataclasses.replace(self, rank=-1)

    def key(self) -> tuple[int, int]:
        """Compute the key for the kernels.

        Returns:
            Two uint32.
        """
        head = struct.pack("<qqq", self.seed, self.step, self.rank)
        digest = xxhash.xxh64_intdigest(head + self.name.encode("utf-8", "surrogatepass"))
        return digest & 0xFFFFFFFF, digest >> 32


def checked_seed(seed: int) -> int:
    """Check a seed.

    Args:
        seed: Any integer, also one of numpy.

    Returns:
        The seed as an int.

    Raises:
        ConfigError: It is no integer, or does not fit 64 bits with a sign.
    """
    return checked_integer("seed", seed)
