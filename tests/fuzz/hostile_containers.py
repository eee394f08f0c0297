"""Hostile containers: whatever the bytes, each way to read them refuses with ContainerError or gives the same gradient.

Honest containers of all codecs and forms of headers are changed, mostly under a checksum that fits afterwards, so that what
stands behind it is reached.
"""

import collections
import functools
import re
from collections.abc import Callable
from pathlib import Path

import fuzzing
import numpy as np
from fuzzing import chance, mutate, pick
from support import codec_conformance, container_builder, reference_decoder
from support.arrays import gauss
from support.codec_conformance import peak_of

import grace_ext
from grace_ext import ContainerError, ExchangeError, registry
from grace_ext._util.rng import Stream
from grace_ext.federated import Client, Rejected
from grace_ext.federated.messages import Down, Up, read_up
from grace_ext.inspection import check_sections, describe
from grace_ext.pipeline.container import parse, split
from grace_ext.pipeline.decoder import add_all, decode_rows, decode_sum
from grace_ext.transport import CollectiveHandle, Transport

CONTAINERS, MEASURED = 500, 2  # of a batch
LARGE = 50_000  # elements of those whose memory is looked at
SIZES = (0, 1, 2, 9, 17, 40, 130, 300)
DTYPES = (np.float16, np.float32, np.float64)
GOLDEN = Path(__file__).parents[1] / "golden"

#: For scripts: what the functions below use.
IMPORTS = """import threading, tracemalloc
import numpy as np
import grace_ext
from grace_ext import ContainerError, ExchangeError, registry
from grace_ext.transport import CollectiveHandle, Transport
from grace_ext.container import parse, split
from grace_ext.pipeline.decoder import add_all, decode_rows, decode_sum
from grace_ext.federated import Client, Rejected
from grace_ext.federated.messages import Down, Up, read_up
from grace_ext.inspection import check_sections, describe
from grace_ext.rng import Stream
np.seterr(all="ignore")
"""
REFERENCE = """import sys
sys.path.insert(0, "tests")  # of the checkout
from support import reference_decoder
"""


# The ways that bytes are read. Each gets a container, the elements that the caller expects, what `dense_of` made of it, and
# another container of so many elements, which is in order.


def dense_of(blob, size):
    """float32[size], or None if it is refused."""
    try:
        with np.errstate(all="raise"):  # nor is there a warning
            dense = grace_ext.decompress(blob, size)
    except ContainerError:
        return None
    assert type(dense) is np.ndarray and dense.dtype == np.float32 and dense.shape == (size,)
    return dense


def same(a, b):
    """Whether float32[d] are equal, a NaN to a NaN."""
    return a.tobytes() == b.tobytes() or np.array_equal(a, b, equal_nan=True)


def by_any_buffer(blob, size, dense, other):
    """It does not matter what holds the bytes, and they stay as they are."""
    room = np.zeros((len(blob), 2), np.uint8)
    room[:, 0] = np.frombuffer(blob, np.uint8)
    for buffer in (bytearray(blob), memoryview(blob), room[:, 0]):
        again = dense_of(buffer, size)
        assert bytes(buffer) == blob
        assert again is None if dense is None else same(again, dense)
    wrong = (blob.hex(), list(blob), None, room, np.frombuffer(blob, np.int8))[len(blob) % 5]
    assert dense_of(wrong, size) is None


def by_parse(blob, size, dense, other):
    """What is decoded can be parsed, with or without more behind it; where that fails nothing is decoded."""
    try:
        parsed = grace_ext.inspect(blob, size)
        assert parsed.nbytes == len(blob) and parsed.d == size <= parsed.domain and parsed.k <= parsed.domain
        assert parse(blob + b"more", prefix=True).nbytes == len(blob)
    except ContainerError:
        assert dense is None
        return
    try:
        order = parsed.order()
    except ContainerError:
        assert dense is None or not parsed.k
    else:
        assert order is None or order.size == parsed.k


def by_decode_add(blob, size, dense, other):
    accumulator, weight = np.ones(size, np.float32), np.float32(0.3)
    try:
        grace_ext.decode_add(blob, accumulator, weight)
    except ContainerError:
        assert dense is None and (accumulator == 1).all()
    else:
        assert dense is not None and same(accumulator, 1 + weight * dense)


def by_sums(blob, size, dense, other):
    """decode_sum and add_all, alone and beside a container that is in order. One that cannot be parsed has no part."""
    try:
        ours, theirs = parse(blob, size), parse(other, size)
    except ContainerError:
        return
    plain, weight = ours.transform is None, np.float32(0.5)
    alone, both, added = (np.full(size, 7, np.float32) for _ in range(3))
    try:
        decode_sum([ours], alone, weight)
        decode_sum([theirs, ours], both, weight)
        add_all([ours], added)
    except ContainerError:
        assert dense is None
        return
    assert dense is not None and same(alone, weight * dense)
    if plain and theirs.transform is None:
        assert same(both, weight * dense_of(other, size) + weight * dense)
    assert same(added, 7 + dense) or not plain


def by_rows(blob, size, dense, other):
    """As rows of a table, which are those with a position."""
    try:
        ours = parse(blob, size)
        rows, values = decode_rows([ours], 3, 1.0)
    except ContainerError:
        assert dense is None or not ours.index_id or ours.transform
        return
    if size and not ours.non_finite:
        table = np.zeros((-(-size // 3), 3), np.float32)
        table[rows] = values
        assert dense is not None and same(table.reshape(-1)[:size], dense)
        assert (np.diff(rows) > 0).all() and not table.reshape(-1)[size:].any()


def by_split(blob, size, dense, other):
    """Between others, as in an allgather."""
    try:
        parts = split(other + blob + other, 3, size)
        assert sum(part.nbytes for part in parts) == len(blob) + 2 * len(other)
    except ContainerError:
        return
    try:
        decode_sum(parts, np.empty(size, np.float32))
    except ContainerError:
        assert dense is None or parts[1].nbytes != len(blob)


def by_federated(blob, size, dense, other):
    """As what a client sends, and as what a server tells."""
    try:
        up, parsed = read_up(np.frombuffer(Up(1, 5.0, np.frombuffer(blob, np.uint8)).pack(), np.uint8), size)
        assert bytes(up.container) == blob and parsed.d == size
    except Rejected as error:
        assert dense is None or error.reason == "oversized"
    client = Client(np.ones(size, np.float32))
    try:
        model = client.receive(Down(1, 0, 0, [np.frombuffer(blob, np.uint8)]).pack())
    except ContainerError:
        assert dense is None or not (size and np.isfinite(dense).all())
        assert client.round == 0 and (client.model.known == 1).all()
    else:
        assert same(model, 1 + dense) and client.round == 1


class Wire(Transport):
    """What this rank, the first, receives from others: containers of `size` elements, one of them hostile. Where ranks own
    slices, a bucket has twice as many."""

    def __init__(self, hosts, blob, other, size):
        self.rank, self.size, self.hosts = 0, len(hosts), hosts
        self.given = {"slices": blob, "up0": blob, "down": blob, "local": bytes(4 * size), "all": 2 * (other + blob)}
        self.rest = other + blob

    def allgather(self, name, payload, *_):
        data = np.frombuffer(self.given.get(name.rpartition(".")[2], self.rest), np.uint8)
        return CollectiveHandle.finished(data)

    alltoall = broadcast = allgather


def by_exchanges(blob, size, dense, other):
    """As what other ranks send, in one of the communicators that read containers."""
    name, hosts, d = (
        ("allgather", (0, 1), size),
        ("sharded", (0, 1), 2 * size),
        ("tree", (0, 1), size),
        ("hierarchical", (0, 0, 1, 1), 2 * size),
    )[len(blob) % 4]
    communicator, wire, out = registry.build("communicator", name), Wire(hosts, blob, other, size), np.zeros(d, np.float32)
    try:
        gradient = np.ones(d, np.float32)
        pending = communicator.start(wire, "w", grace_ext.compressor("dense/raw"), gradient, None, Stream())
        finite = communicator.finish(pending, wire, out, 1.0)
    except (ContainerError, ExchangeError):
        assert dense is None or not size, name
    else:
        assert dense is not None or not size, name
        assert finite or np.isnan(out).all(), name


def by_inspect(blob, size, dense, other):
    """The command line's `inspect`."""
    try:
        parsed = parse(blob)
        list(describe(parsed))
        if parsed.domain <= 100_000:
            check_sections(parsed)
    except ContainerError:
        assert dense is None


def by_the_specification(blob, size, dense, other):
    """The second decoder, which is written from the format's document alone and refuses nothing, makes the same of it."""
    if dense is not None:
        assert same(np.array(reference_decoder.decode(blob)[0], np.float32), dense)


def by_memory(blob, size, dense, other):
    """No more than some times the dense gradient, which a transform may pad, and the container. Other threads of this
    process may allocate meanwhile, so one that takes more has to repeat itself."""
    limit = 32 * (size + 65536 * (blob[2] > 127)) + 4 * len(blob) + 200_000
    peaks = [peak_of(ContainerError, dense_of, blob, size)]
    while peaks[-1] > limit:
        assert len(peaks) < 3, f"{peaks} bytes for {size} elements in a container of {len(blob)} bytes"
        peaks.append(peak_of(ContainerError, dense_of, blob, size))


QUICK = (by_parse, by_decode_add, by_sums)
OTHERS = (by_any_buffer, by_rows, by_split, by_federated, by_exchanges, by_inspect, by_the_specification)


# Containers


@functools.cache
def gradients(d: int) -> list[np.ndarray]:
    """float32[d]: few distinct values, so that codecs are not replaced by raw ones; any; blocks of different scales."""
    normal = gauss(d, 5)
    return [np.round(normal, 1), normal, np.round(normal * (1 + np.arange(d) // 64 % 3 * 20))]


@functools.cache
def honest() -> list[list[dict]]:
    """As arguments of container_builder.container: all specs and sizes, shapes, dtypes; and the golden files. By what stands in them, so
    that codecs which are seldom the shortest are not seldom here; one may be in several lists."""
    blobs = []
    for number, text in enumerate(codec_conformance.specs()):
        c = grace_ext.compressor(text, number)
        for at, d in enumerate((*SIZES, 4200) if re.search("huffman|ans|lloyd", text) else SIZES):
            gradient = gradients(d)[(number + at) % 3]
            if (number + at) % 5 == 0 and d % 2 == 0:
                gradient = gradient.reshape(2, -1, 1).astype(DTYPES[number % 3])
            blobs.append(c.compress(gradient, shape=gradient.ndim > 1))
    blobs += [np.fromfile(path, np.uint8) for path in sorted(GOLDEN.glob("*.bin"))]
    blobs.append(grace_ext.compressor("dense").compress(np.full(9, np.nan)))
    groups = collections.defaultdict(list)
    for fields in map(fields_of, blobs):
        for kind in ("index", "value", "transform"):
            groups[kind, fields[kind]].append(fields)
        if fields["d"] > 4000:  # of which entropy codes have several tables
            groups["tables"].append(fields)
    return list(groups.values())


def fields_of(blob: np.ndarray) -> dict:
    """A container as arguments of container_builder.container."""
    parsed = parse(blob)
    fields = {
        "flags": int(blob[2]),
        "index": parsed.index_id,
        "value": parsed.value_id,
        "d": parsed.d,
        "k": parsed.k,
        "index_section": bytes(parsed.index_section),
        "value_section": bytes(parsed.value_section),
        "order_section": b"" if parsed.order_section is None else bytes(parsed.order_section),
        "shape": parsed.shape,
        "transform": b"",
    }
    if parsed.transform:
        id_, parameters = parsed.transform
        fields["transform"] = bytes((id_, len(parameters))) + parameters
    return fields


@functools.lru_cache(2000)
def honest_blobs(d: int) -> list[bytes]:
    """Containers of so many elements that are in order."""
    texts = ("dense/raw", "topk:0.3/rice/qsgd", "dct:8/topk:0.5/bitmap/fp16", "nonzero")
    return [grace_ext.compressor(text).compress(gauss(d, 6)).tobytes() for text in texts]


@functools.cache
def large() -> list[list[dict]]:
    """Containers of many elements, whose memory counts."""
    return [
        [fields_of(grace_ext.compressor(text).compress(np.round(gauss(LARGE), 1)))] for text in codec_conformance.specs()
    ]


def number(rng: np.random.Generator, now: int):
    """What stands in the place of a varint, as container_builder.container takes it."""
    if chance(rng, 0.4):
        return max(0, now + int(rng.integers(-2, 3)))
    if chance(rng, 0.2):
        return container_builder.varint(now)[:-1] + bytes(
            [container_builder.varint(now)[-1] | 128, 0]
        )  # longer than it has to be
    return pick(rng, fuzzing.NUMBERS)


def section(rng: np.random.Generator, now: bytes, donor: bytes) -> bytes:
    """A section that is not as it was."""
    for _ in range(int(rng.integers(1, 3))):
        now = mutate(now, rng, donor)
    return now


def floats(rng: np.random.Generator, now: bytes) -> bytes:
    """A section with a float32 in it that honest ones do not have."""
    at = int(rng.integers(16)) if chance(rng, 0.5) else int(rng.integers(len(now) + 1))
    return now[:at] + pick(rng, fuzzing.FLOATS).tobytes() + now[at + 4 :]


def change(rng: np.random.Generator, fields: dict, donor: dict) -> None:
    """One thing in the arguments of container_builder.container."""
    kind = int(rng.integers(16))
    if kind in (0, 1, 2, 3, 13, 14, 15):
        name = pick(rng, ("index_section", "value_section", "value_section"))
        fields[name] = section(rng, fields[name], donor[name])
    elif kind == 4:
        fields["value_section"] = floats(rng, fields["value_section"])
    elif kind == 5:
        fields["order_section"] = section(rng, fields["order_section"], donor["order_section"] + donor["value_section"])
        fields["flags"] |= container_builder.ORDER
    elif kind == 6:
        names = pick(
            rng,
            (
                ("index", "index_section"),
                ("index", "index_section", "k"),
                ("value", "value_section"),
                ("value", "value_section", "order_section", "k"),
                ("index_section",),
                ("value_section",),
            ),
        )
        fields.update({name: donor[name] for name in names})
    elif kind == 7:
        fields["k"] = number(rng, fields["k"] if isinstance(fields["k"], int) else 1)
    elif kind == 8:
        name = pick(rng, ("index_length", "value_length"))
        fields[name] = number(rng, len(fields[name.replace("length", "section")]))
    elif kind == 9:
        fields["d"] = number(rng, fields["d"] if isinstance(fields["d"], int) else 1)
    elif kind == 10:
        name = pick(rng, ("index", "value"))
        fields[name] = int(rng.integers(17 if chance(rng, 0.9) else 256))
    elif kind == 11:
        fields["flags"] ^= 1 << int(rng.integers(8))
        shape = fields["shape"] or (fields["d"],)
        shape = [number(rng, 1) if chance(rng, 0.2) else one for one in shape]
        fields["shape"] = shape if chance(rng, 0.9) else [1] * 40
    else:
        parameters = bytes([int(rng.integers(10)), int(rng.integers(4))]) if chance(rng, 0.7) else rng.bytes(3)
        fields["transform"] = bytes((1, len(parameters))) + parameters
        fields["flags"] |= container_builder.TRANSFORM


def build(fields: dict) -> bytes:
    """container_builder.container, but what the flags do not announce is not there."""
    fields = dict(fields)
    if not fields["flags"] & container_builder.SHAPE:
        fields["shape"] = None
    if not fields["flags"] & container_builder.TRANSFORM:
        fields["transform"] = b""
    if not fields["flags"] & container_builder.ORDER:
        fields["order_section"] = b""
    return container_builder.container(**fields)


def hostile(rng: np.random.Generator, among: list[list[dict]]) -> tuple[bytes, int]:
    """(container, elements that the caller expects)."""
    fields, donor = dict(pick(rng, pick(rng, among))), pick(rng, pick(rng, among))
    size, whole = fields["d"], chance(rng, 0.3)
    for _ in range(0 if whole else int(rng.integers(1, 3))):
        change(rng, fields, donor)
    blob = build(fields)
    if whole:
        for _ in range(int(rng.integers(3))):
            blob = mutate(blob[:-4], rng, donor["value_section"]) + blob[-4:]
    if chance(rng, 0.9):
        blob = container_builder.reseal(blob)
    if chance(rng, 0.05):
        blob += rng.bytes(int(rng.integers(1, 9)))
    if isinstance(fields["d"], int) and fields["d"] <= LARGE and chance(rng, 0.8):
        size = fields["d"]
    return blob, size + (int(rng.integers(-1, 2)) if chance(rng, 0.03) and size else 0)


# A batch


def check(way: Callable, blob: bytes, size: int, dense: np.ndarray | None, other: bytes) -> None:
    """Raises Found if this way of reading ends otherwise than it may."""
    try:
        way(blob, size, dense, other)
    except Exception as error:
        raise found(error, way, blob, size, other) from error


def found(error: Exception, way: Callable, blob: bytes, size: int, other: bytes) -> fuzzing.Found:
    used = {by_exchanges: (Wire,), by_memory: (peak_of,)}.get(way, ())
    imports = IMPORTS + REFERENCE if way is by_the_specification else IMPORTS
    return fuzzing.Found(
        fuzzing.script(
            error,
            imports,
            (dense_of, same, *used, way),
            f"blob = bytes.fromhex({blob.hex()!r})",
            f"other = bytes.fromhex({other.hex()!r})",
            f"{way.__name__}(blob, {size}, dense_of(blob, {size}), other)",
        )
    )


def read(blob: bytes, size: int, rng: np.random.Generator) -> str:
    """The ways that are quick, and one of the others; "decoded" or "refused". Raises Found."""
    other = pick(rng, honest_blobs(size))
    try:
        dense = dense_of(blob, size)
    except Exception as error:
        raise found(error, by_parse, blob, size, other) from error
    for way in (*QUICK, pick(rng, OTHERS)):
        check(way, blob, size, dense, other)
    return "refused" if dense is None else "decoded"


def batch(seed: int) -> collections.Counter:
    """How many hostile containers ended in which way. Raises Found."""
    rng, counts = np.random.default_rng(seed), collections.Counter()
    with np.errstate(all="ignore"):
        for _ in range(CONTAINERS):
            counts[read(*hostile(rng, honest()), rng)] += 1
        for _ in range(MEASURED):
            blob, size = hostile(rng, large())
            check(by_memory, blob, size, None, b"")
            counts["measured"] += 1
    return counts
