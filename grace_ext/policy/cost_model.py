"""What a step of a communicator costs with any number of ranks: bytes, and seconds by the α–β model.

A step is a list of parts, one after the other: codec work, and collectives. Each collective is modelled as the algorithm
that Gloo has for it, with one port per rank and both directions at a time: rings for allreduce and allgather, for alltoall a
message to each (Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, IJHPCA 19,
2005, has their costs). Nothing overlaps: it is the step of one bucket, or of the last one.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ..communicators.slices import equal_slices
from ..errors import ConfigError
from ..pipeline.compressor import make_compressor


@dataclasses.dataclass(frozen=True)
class Codec:
    """What a compressor makes of a bucket, and how long it takes with a core to itself.

    Attributes:
        size: size(elements, summed): bytes of the container of a sum of that many ranks' gradients.
        encode: encode(elements): seconds to make one container.
        decode: decode(elements, containers): seconds to decode and sum that many containers.
    """

    size: Callable[[int, int], float]
    encode: Callable[[int], float]
    decode: Callable[[int, int], float]


@dataclasses.dataclass(frozen=True)
class Work:
    """Codec work that the end of the step waits for.

    Attributes:
        seconds: Seconds of the slowest rank.
        busy: Number of ranks that do such work at a time.
    """

    seconds: float
    busy: int


@dataclasses.dataclass(frozen=True)
class Collective:
    """The bytes of one collective.

    Attributes:
        name: "allgather", "allreduce" or "alltoall".
        payload: float64[ranks], bytes that each rank hands over.
        sent: float64[ranks], bytes that leave each rank on its link.
        received: float64[ranks], bytes that reach each rank on its link.
        path: Bytes that go over links one after the other.
        rounds: Number of messages that carry them.
    """

    name: str
    payload: np.ndarray
    sent: np.ndarray
    received: np.ndarray
    path: float
    rounds: int


@dataclasses.dataclass(frozen=True)
class Link:
    """The cost of one kind of collective.

    Attributes:
        setup: Seconds whatever the number of ranks: the library's negotiation, for example.
        alpha: Seconds of a round.
        beta: Seconds of a byte.
    """

    setup: float
    alpha: float
    beta: float

    def seconds(self, rounds: int, path: float) -> float:
        """Compute the seconds of a collective.

        Args:
            rounds: See Collective.
            path: See Collective.

        Returns:
            setup + alpha * rounds + beta * path.
        """
        return self.setup + self.alpha * rounds + self.beta * path


def fit(samples: list[tuple[int, float, float]]) -> Link:
    """Fit a link to measured collectives.

    Args:
        samples: (rounds, path, seconds) of each. To tell setup from alpha, it takes samples of two numbers of ranks.

    Returns:
        The Link with the least sum of squared relative errors and no negative coefficient.
    """
    columns, seconds = np.array(samples, np.float64)[:, :2], np.array(samples, np.float64)[:, 2]
    scaled = np.column_stack([np.ones(len(samples)), columns]) / seconds[:, None]
    best, least = np.zeros(3), math.inf
    # The best with no negative coefficient has some that are zero, and is the best of the others alone.
    for count in (1, 2, 3):
        for used in itertools.combinations(range(3), count):
            found = np.zeros(3)
            found[list(used)] = np.linalg.lstsq(scaled[:, used], np.ones(len(samples)), rcond=None)[0]
            error = np.square(scaled @ found - 1).sum()
            if found.min() >= 0 and error < least * (1 - 1e-9):
                best, least = found, error
    return Link(*best.tolist())


def ring_allreduce(ranks: int, payload: float) -> Collective:
    """Model an allreduce: twice around the ring, with a part of 1 / n in every message.

    Args:
        ranks: Number of ranks, n.
        payload: Bytes that each rank hands over.

    Returns:
        The collective.
    """
    sent = np.full(ranks, 2 * (ranks - 1) / ranks * payload)
    return Collective("allreduce", np.full(ranks, float(payload)), sent, sent, sent[0], 2 * (ranks - 1))


def ring_allgather(payloads: npt.ArrayLike) -> Collective:
    """Model an allgather: each rank sends on, to the next, all payloads but that one's own.

    The largest payload makes its way in n - 1 messages, each after the one before.

    Args:
        payloads: Bytes that each of n ranks hands over.

    Returns:
        The collective.
    """
    payloads = np.asarray(payloads, np.float64)
    rounds = payloads.size - 1
    received = payloads.sum() - payloads
    sent = payloads.sum() - np.roll(payloads, -1)
    return Collective("allgather", payloads, sent, received, max(rounds * payloads.max(), sent.max()), rounds)


def alltoall(splits: npt.ArrayLike) -> Collective:
    """Model an alltoall: all messages go at a time, and the link with the most bytes takes the longest.

    Args:
        splits: float[ranks, ranks], bytes from each rank to each.

    Returns:
        The collective.
    """
    splits = np.asarray(splits, np.float64)
    others = splits - np.diag(np.diag(splits))
    sent, received = others.sum(axis=1), others.sum(axis=0)
    return Collective("alltoall", splits.sum(axis=1), sent, received, max(sent.max(), received.max()), len(splits) - 1)


def _allgather(ranks: int, elements: int, codec: Codec) -> list[Work | Collective]:
    return [
        Work(codec.encode(elements), ranks),
        ring_allgather([codec.size(elements, 1)] * ranks),
        Work(codec.decode(elements, ranks), ranks),
    ]


def _allreduce(ranks: int, elements: int, codec: Codec) -> list[Work | Collective]:
    return [
        Work(codec.encode(elements), ranks),
        ring_allreduce(ranks, codec.size(elements, 1)),
        Work(codec.decode(elements, 1), ranks),
    ]


def _sharded(ranks: int, elements: int, codec: Codec) -> list[Work | Collective]:
    parts = np.array([part.stop - part.start for part in equal_slices(elements, ranks)])
    # Slices differ by an element, so there are two kinds of them at most.
    kinds = [int(size) for size in np.unique(parts[parts > 0])]
    one, summed, encode, decode, decode_sum = (np.zeros(ranks) for _ in range(5))
    for size in kinds:
        of_kind = parts == size
        one[of_kind], summed[of_kind] = codec.size(size, 1), codec.size(size, ranks)
        encode[of_kind], decode[of_kind] = codec.encode(size), codec.decode(size, 1)
        decode_sum[of_kind] = codec.decode(size, ranks - 1)
    splits = np.tile(one, (ranks, 1))
    np.fill_diagonal(splits, 0)
    return [
        Work((encode.sum() - encode).max(), ranks),
        alltoall(splits),
        Work((decode_sum + encode).max(), ranks),
        ring_allgather(summed),
        Work(decode.sum(), ranks),
    ]


def _factors(ranks: int, elements: int, codec: Codec) -> list[Work | Collective]:
    """Two dependent sums, taken to be equally long."""
    half = ring_allreduce(ranks, codec.size(elements, 1) / 2)
    return [Work(codec.encode(elements), ranks), half, half, Work(codec.decode(elements, 1), ranks)]


def _tree(ranks: int, elements: int, codec: Codec) -> list[Work | Collective]:
    step: list[Work | Collective] = []
    below = np.ones(ranks, int)  # the number of gradients that each rank has summed up
    for level in range((ranks - 1).bit_length()):
        splits = np.zeros((ranks, ranks))
        senders = range(2**level, ranks, 2 ** (level + 1))
        for sender in senders:
            splits[sender, sender - 2**level] = codec.size(elements, below[sender])
            below[sender - 2**level] += below[sender]
        step += [Work(codec.encode(elements), len(senders)), alltoall(splits), Work(codec.decode(elements, 1), len(senders))]
    root = np.zeros(ranks)
    root[0] = codec.size(elements, ranks)
    # A transport without a broadcast of its own gathers; Horovod's would have to know the length.
    return [*step, Work(codec.encode(elements), 1), ring_allgather(root), Work(codec.decode(elements, 1), ranks)]


def _hierarchical(ranks: int, elements: int, codec: Codec, hosts: Sequence[int]) -> list[Work | Collective]:
    """What stays inside a host counts as free. Owners, of equal slices, compress and send; every rank decodes all."""
    members = np.bincount(hosts)
    if len(members) in (1, ranks):
        return _allgather(ranks, elements, codec) if len(members) == ranks else [ring_allreduce(ranks, 4 * elements)]
    owners = members.min()
    part = max(1, elements // owners)
    nothing = alltoall(np.zeros((ranks, ranks)))
    number = np.array([list(hosts[:rank]).count(host) for rank, host in enumerate(hosts)])  # the rank's number on its host
    peers = (number[:, None] == number) & (number < owners) & (np.not_equal.outer(hosts, hosts))
    return [
        nothing,
        Work(codec.encode(part), owners * len(members)),
        alltoall(peers * codec.size(part, members.max())),
        nothing,
        Work(owners * codec.decode(part, len(members)), ranks),
    ]


#: f(ranks, elements, codec) -> the parts of a bucket's step, by communicator.
STEPS: dict[str, Callable[[int, int, Codec], list]] = {
    "allgather": _allgather,
    "allreduce": _allreduce,
    "sharded": _sharded,
    "factors": _factors,
    "tree": _tree,
}


def communicators_for(spec: str | None, workers: int, per_host: int = 1) -> list[str]:
    """List the communicators that can be predicted for a spec.

    Args:
        spec: The spec; None: float32 by the library's own allreduce.
        workers: Number of workers in all.
        per_host: Number of workers that share a host.

    Returns:
        Their names.
    """
    made = None if spec is None else make_compressor(spec)
    if made is None or made.reducible_dtype is not None:
        return ["allreduce"]  # the only one that sums values as they are
    if made.lowrank is not None:
        return ["factors"]
    found = ["allgather", *(["sharded"] if workers > 2 else [])]
    return [*found, "hierarchical"] if 1 < per_host < workers else found


def step_of(
    communicator: str, ranks: int, elements: int, codec: Codec, hosts: Sequence[int] | None = None
) -> list[Work | Collective]:
    """List the parts of a step of one bucket.

    Args:
        communicator: Name of the communicator.
        ranks: Number of ranks.
        elements: Number of float32 elements of the bucket.
        codec: The codec of the bucket.
        hosts: See Transport.hosts; None: one rank on each.

    Returns:
        The parts, one after the other.

    Raises:
        ConfigError: There is no model of that communicator, or there are too few ranks or elements.
    """
    if communicator == "hierarchical":
        return _hierarchical(ranks, elements, codec, range(ranks) if hosts is None else hosts)
    if communicator not in STEPS:
        raise ConfigError(
            f"there is no cost model of communicator {communicator!r}; there are {', '.join(STEPS)}, hierarchical"
        )
    if ranks < 2 or elements < 1:
        raise ConfigError(f"{ranks} ranks and {elements} elements: at least 2 and 1 are needed")
    return STEPS[communicator](ranks, elements, codec)


def codec_seconds(step: list[Work | Collective], cores: float = math.inf) -> float:
    """Compute the seconds of codec work in a step.

    Args:
        step: The parts of the step.
        cores: Number of cores that all ranks together have; ranks take turns on them.

    Returns:
        Seconds.
    """
    return sum(part.seconds * max(1.0, part.busy / cores) for part in step if isinstance(part, Work))


def wire_seconds(step: list[Work | Collective], links: dict[str, Link]) -> float:
    """Compute the seconds of the collectives in a step.

    Args:
        step: The parts of the step.
        links: The link of each kind of collective, by its name.

    Returns:
        Seconds.
    """
    return sum(links[part.name].seconds(part.rounds, part.path) for part in step if isinstance(part, Collective))


def bytes_of(step: list[Work | Collective], kind: str) -> np.ndarray:
    """Compute the bytes of all collectives in a step.

    Args:
        step: The parts of the step.
        kind: "payload", "sent" or "received".

    Returns:
        float64[ranks].
    """
    return np.sum([getattr(part, kind) for part in step if isinstance(part, Collective)], axis=0)
