"""Other libraries for comparison, each only if it is installed."""

import contextlib
import dataclasses
import importlib.util
import zlib
from array import array
from collections.abc import Callable

import numpy as np

from .. import registry
from .._util.rng import Stream
from ..lowrank.matrices import HostMatrices
from .subject import Candidate

_LEVELS = (7, 15, 31, 63, 127, 255)
_QUERIES = 100_000  # positions that a library's Bloom filter is queried for; querying all would take too long


@dataclasses.dataclass
class Peer:
    """A codec of another library.

    Attributes:
        encode: Returns the payload, uint8[m].
        decode: Takes the payload, and returns what it encodes.
        positions: Takes the payload, and returns the positions that it encodes, or None if they are the given ones.
        decode_scale: What the time of `decode` has to be multiplied by.
        fpr: Rate of false positives, if there are any.
        curve: Name of the curve that it is a point of.
        lossless: Whether decoding restores all values.
    """

    encode: Callable[[], np.ndarray]
    decode: Callable[[np.ndarray], object]
    positions: Callable = lambda payload: None
    decode_scale: float = 1.0
    fpr: float | None = None
    curve: str = ""
    lossless: bool = True


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


@contextlib.contextmanager
def selection(gradient: np.ndarray, k: int):
    """Select the k largest magnitudes with frameworks, on one thread: unsorted positions and their values.

    Args:
        gradient: float32[d].
        k: Number of elements to select.

    Yields:
        (name, form) -> candidate.
    """

    def numpy_topk():
        indices = np.argpartition(np.abs(gradient), gradient.size - k)[gradient.size - k :]
        return indices, gradient[indices]

    found = {("np.argpartition", "abs, select, gather"): Candidate(numpy_topk)}
    if not _installed("torch"):
        yield found
        return
    import torch

    tensor = torch.from_numpy(gradient)

    def torch_topk():
        indices = torch.topk(tensor.abs(), k, sorted=False).indices
        return indices, tensor[indices]

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield {("torch.topk", "abs, select, gather"): Candidate(torch_topk), **found}
    finally:
        torch.set_num_threads(threads)


def index(indices: np.ndarray, d: int, slow: bool) -> dict[str, Peer]:
    """Make the index codecs of other libraries.

    Args:
        indices: uint32[k], ascending.
        d: Number of elements of the gradient.
        slow: Whether to include those that take long.

    Returns:
        Name -> codec.
    """
    width = np.dtype("<u4" if int(np.diff(indices, prepend=0).max()) > 0xFFFF else "<u2")

    def packed_gaps():
        return np.frombuffer(zlib.compress(np.diff(indices, prepend=0).astype(width), 6), np.uint8)

    def unpacked_gaps(payload):
        return np.cumsum(np.frombuffer(zlib.decompress(payload), width), dtype=np.uint32)

    found = {"zlib, level 6, of the gaps": Peer(packed_gaps, unpacked_gaps, unpacked_gaps)}
    if _installed("pyroaring"):
        found["pyroaring BitMap"] = _roaring(indices)
    if slow and _installed("pybloomfilter"):
        found["pybloomfilter, 0.001, naive queries"] = _bloom(indices, d, 0.001)
    return found


def _roaring(indices):
    from pyroaring import BitMap

    def encode():
        bitmap = BitMap(
            array("I", indices.tobytes())
        )  # faster than from a numpy array, of which it would look at each number
        bitmap.run_optimize()
        return np.frombuffer(bitmap.serialize(), np.uint8)

    def decode(payload):
        return np.frombuffer(BitMap.deserialize(payload.tobytes()).to_array(), np.uint32)

    return Peer(encode, decode, decode)


def _bloom(indices, d, rate):
    from pybloomfilter import BloomFilter

    asked = np.random.default_rng(0).choice(d, min(d, _QUERIES), replace=False)
    positions, others = asked.tolist(), ~np.isin(asked, indices)

    def make():
        filter_ = BloomFilter(indices.size, rate)
        filter_.update(indices.tolist())
        return filter_

    filter_ = make()
    answers = np.array([position in filter_ for position in positions])
    return Peer(
        lambda: np.empty(filter_.num_bits // 8, np.uint8) if make() else None,
        lambda payload: [position in filter_ for position in positions],
        decode_scale=d / asked.size,
        fpr=float(answers[others].mean()) if others.any() else None,
    )


def value(values: np.ndarray) -> dict[str, Peer]:
    """Make the value codecs of other libraries.

    Args:
        values: float32[k].

    Returns:
        Name -> codec.
    """

    def packed():
        return np.frombuffer(zlib.compress(values, 6), np.uint8)

    found = {"zlib, level 6": Peer(packed, lambda payload: np.frombuffer(zlib.decompress(payload), np.float32))}
    if _installed("constriction"):
        found.update({f"constriction ANS, {levels} levels": _ans(values, levels) for levels in _LEVELS})
    return found


def _ans(values, levels):
    """Make a codec that rounds to an odd number of equally spaced levels and codes them with the library's entropy coder.

    The payload includes their frequencies as float32.
    """
    import constriction

    stream = constriction.stream
    half = levels // 2

    def encode():
        scale = np.float32(max(abs(values).max(), np.finfo(np.float32).tiny) / half)
        numbers = np.rint(values / scale).astype(np.int32) + half
        frequencies = (np.bincount(numbers, minlength=levels) / numbers.size).astype(np.float32)
        coder = stream.stack.AnsCoder()
        coder.encode_reverse(numbers, stream.model.Categorical(frequencies, perfect=False))
        return np.concatenate([scale.reshape(1), frequencies]).view(np.uint8), coder.get_compressed().view(np.uint8)

    def decode(payload):
        head = payload[: 4 + 4 * levels].view(np.float32)
        coder = stream.stack.AnsCoder(payload[4 + 4 * levels :].view(np.uint32))
        numbers = coder.decode(stream.model.Categorical(head[1:], perfect=False), values.size)
        return (numbers - half).astype(np.float32) * head[0]

    return Peer(lambda: np.concatenate(encode()), decode, curve="constriction ANS", lossless=False)


def our_powersgd(rank: int) -> Callable:
    """Make one step of our PowerSGD.

    Args:
        rank: Rank of the approximation.

    Returns:
        A function of a matrix, float32[n, m], and the last result or None, which returns the approximation, float32[n, m],
        and the factor that the next step starts from.
    """
    stage, stream = registry.build("lowrank", "powersgd", {"rank": rank}), Stream(name="bench")

    def step(matrix, last):
        left = np.empty((matrix.shape[0], rank), np.float32)
        HostMatrices.project(matrix, stage.basis(None if last is None else last[1], rank, matrix.shape[1], stream), left)
        left = stage.orthonormalized(left, stream)
        right, out = np.empty((rank, matrix.shape[1]), np.float32), np.empty(matrix.size, np.float32)
        HostMatrices.project_back(left, matrix, right)
        HostMatrices.expand(left, right, np.float32(1), out, right, out[:0])
        return out.reshape(matrix.shape), right

    return step


def torch_powersgd(rank: int) -> dict[str, Callable]:
    """Make one step of torch's PowerSGD, with the orthogonalization of its hook.

    Args:
        rank: Rank of the approximation.

    Returns:
        Name -> a function as `our_powersgd` returns; empty if torch is not installed.
    """
    if not _installed("torch"):
        return {}
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import _orthogonalize

    def step(matrix, last):
        tensor = torch.from_numpy(matrix)[None]  # the hook works on batches of matrices
        if last is None:
            right = torch.randn(1, matrix.shape[1], rank, generator=torch.Generator().manual_seed(0))
        else:
            right = last[1].clone()
        _orthogonalize(right)
        left = tensor @ right
        _orthogonalize(left)
        right = tensor.mT @ left
        return (left @ right.mT)[0].numpy(), right

    return {f"torch's PowerSGD hook, rank {rank}": step}
