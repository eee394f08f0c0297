"""Which compressors server and clients can use."""

from ..errors import ConfigError
from ..pipeline.compressor import Compressor, make_compressor


def checked_compressor(compression: str | dict | Compressor, memory: str) -> Compressor:
    """Make a compressor, and check that its containers can be used with a memory.

    Args:
        compression: Spec, Compressor or other argument of grace_ext.compressor.
        memory: "residual", "ef21" or "none". On the way down it is always "ef21".

    Returns:
        The compressor.

    Raises:
        ConfigError: A stage or option is unknown, the compression is low-rank, which makes no containers, or it is unbiased
            although there is a memory: the memory would make up once more for what was not sent, and diverge.
    """
    made = make_compressor(compression)
    if made.lowrank is not None:
        raise ConfigError(f"{str(made)!r} makes no container; allowed: a spec with a sparsifier")
    if made.unbiased and memory != "none":
        raise ConfigError(
            f"{str(made.sparsifier)!r} is unbiased already, and memory {memory!r} would correct it once more: "
            f"use memory 'none' (on the way from the server it is always 'ef21'), or unbiased=false"
        )
    return made
