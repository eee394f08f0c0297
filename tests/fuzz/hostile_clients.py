"""Hostile federated clients: the server refuses what they send, or takes what any client may send, and training goes on.

A real server, and a second one that never sees what the first refuses: both have to tell the same models, to the bit. Some
messages go through the server of the MPI adapter, with messages, ranks and time made here.
"""

import collections
import functools
import sys
import types

import fuzzing
import hostile_containers
import hostile_ranks
import numpy as np
from fuzzing import chance, mutate, pick
from hostile_containers import LARGE
from support import codec_conformance, container_builder
from support.arrays import gauss
from support.codec_conformance import peak_of

import grace_ext
from grace_ext import decompress
from grace_ext.federated import (  # noqa: F401
    Client,
    ClippedMean,
    Median,
    NearestNeighborMixing,
    Rejected,
    Server,
    TrimmedMean,
    WeightedMean,
)
from grace_ext.federated.messages import FRESH, WHOLE, Up, largest
from grace_ext.pipeline import container

GAMES, ROUNDS = 4, 5  # of a batch, of a game
HONEST, HOSTILE = 4, 2  # clients; the last ones are the hostile ones
CLIENTS = HONEST + HOSTILE
SIZES = (1, 5, 5, 33, 33, 120)
MEANS = (
    "WeightedMean()",
    "ClippedMean()",
    "ClippedMean(2.0)",
    "Median()",
    "TrimmedMean(0.34)",
    "NearestNeighborMixing(TrimmedMean(0.34), 0.34)",
)
SAMPLES = (0.0, -0.0, -1.0, 5e-324, 1e-30, 1.0, 1e9, 1.7e308, float("inf"), -float("inf"), float("nan"))

IMPORTS = """import collections, sys, threading, tracemalloc, types
import numpy as np
from grace_ext.federated import (Client, ClippedMean, Median, NearestNeighborMixing, Rejected, Server, TrimmedMean,
                                 WeightedMean)
from grace_ext import decompress
HEAD = 25  # bytes of an update before its container
np.seterr(divide="raise", over="raise", invalid="raise")
"""
HEAD = 25


# What has to hold. The script of a fault has these classes and functions, and the calls that led to it.


def held(thing, seen):
    """Bytes of the arrays and all else that an object holds; what is in `seen` already is left out."""
    if id(thing) in seen or isinstance(thing, (type, types.ModuleType, types.FunctionType)):
        return 0
    seen.add(id(thing))
    if isinstance(thing, np.ndarray):
        return held(thing.base, seen) if isinstance(thing.base, np.ndarray) else 100 + thing.nbytes
    parts = [*thing.keys(), *thing.values()] if isinstance(thing, dict) else []
    parts += thing if isinstance(thing, (list, tuple, set, collections.deque)) else []
    parts += vars(thing).values() if hasattr(thing, "__dict__") else []
    return sys.getsizeof(thing) + sum(held(part, seen) for part in parts)


class Pair:
    """A server, and one that gets only what the first takes. options: of both."""

    def __init__(self, start, clients, spec, mean, **options):
        self.live, self.twin = (Server(start, clients, spec, mean=mean, **options) for _ in range(2))
        self.size, self.clients, self.keep = len(start), clients, options["keep"]
        self.robust = mean.by_coordinate and options["memory"] != "ef21"
        self.mixes = isinstance(mean, NearestNeighborMixing)
        self.first, self.told, self.given = held(self.live, set()), collections.deque(maxlen=self.keep), None

    def begin(self):
        """The clients to ask."""
        chosen, self.given, self.honestly = self.live.begin_round(), [], {}
        assert chosen == self.twin.begin_round()
        self.told.append(self.live.told_bytes)
        return chosen

    def ask(self, client):
        message = self.live.message_for(client)
        assert message.tobytes() == self.twin.message_for(client).tobytes(), "the models that clients are told differ"
        return message

    def give(self, client, message):
        """Why it is refused, or "taken"."""
        try:
            self.live.receive(client, message)
        except Rejected as error:
            return error.reason
        if self.given is None:
            self.twin.receive(client, message)
        else:
            self.given.append((client, message))
        return "taken"

    def honest(self, client, message):
        said = self.give(client, message)
        assert said == "taken", f"an honest update is refused: {said}"
        self.honestly[client] = message

    def end(self):
        before = self.live.model.copy()
        report = self.live.end_round()
        for client, message in self.given:
            if client in report.taken or client in self.honestly:
                self.twin.receive(client, message)
        assert report.taken == self.twin.end_round().taken, "what was refused decides on what is taken"
        assert self.live.model.tobytes() == self.twin.model.tobytes(), "what was refused is in the model"
        assert np.isfinite(self.live.model).all() and np.isfinite(report.norm), "the model, or its step, is not finite"
        assert not set(report.taken) - set(range(self.clients))
        if self.robust:
            honest = [
                decompress(message[HEAD:], self.size) for client, message in self.honestly.items() if client in report.taken
            ]
            if 2 * len(honest) > len(report.taken):
                assert self.is_near(honest, before), "liars take over a robust mean"
        self.given = None
        # that one has sent something else than zeros may be known
        self.twin._norms.uncompared = dict(self.live._norms.uncompared)
        bound = self.first + sum(self.told) + (self.clients + 2) * (4 * self.size + 2000) + 200 * (self.keep + 32)
        assert held(self.live, set()) <= bound, "the server keeps what clients have sent"
        return report

    def is_near(self, honest, before):
        """Whether the step goes where honest updates want to. After mixing, an honest update is no farther from what it was
        than honest ones are from each other; the mean is within what they then are in each coordinate."""
        low, high, step = np.min(honest, axis=0), np.max(honest, axis=0), before - self.live.model
        slack = 1e-5 * (np.abs(before) + np.abs(low) + np.abs(high))
        if not self.mixes:
            return (low - slack <= step).all() and (step <= high + slack).all()
        apart = max(np.linalg.norm(one - other) for one in honest for other in honest)
        return np.linalg.norm(step - honest[0]) <= 2 * len(honest) ** 0.5 * apart + np.linalg.norm(slack)


def within_memory(size, message):
    """What the server takes to read one message."""
    limit = 32 * (size + 65536) + 4 * len(message) + 300_000
    peaks = []
    while not peaks or peaks[-1] > limit:
        assert len(peaks) < 3, f"{peaks} bytes for a message of {len(message)} bytes to a model of {size} elements"
        server = Server(np.zeros(size, np.float32), 1)
        server.begin_round()
        server.message_for(0)
        peaks.append(peak_of(Rejected, server.receive, 0, message))


# What clients send


class Recorder:
    """A pair whose calls are written down. Raises Found where one ends otherwise than it may."""

    def __init__(self, rng: np.random.Generator, counts: collections.Counter):
        self.rng, self.counts, self.size = rng, counts, pick(rng, SIZES)
        self.lines, self.hostile = [], False
        self.memory, mean = pick(rng, ("residual", "ef21", "none")), pick(rng, MEANS)
        by_coordinate = eval(mean).by_coordinate
        self.spec = pick(rng, specs(by_coordinate and self.memory != "ef21"))
        options = {
            "memory": self.memory,
            "keep": pick(rng, (1, 2, 16)),
            "staleness": pick(rng, (0, 2)),
            "norm_limit": pick(rng, (1.5, 10.0, 10.0, float("inf"))),
            "sampled": pick(rng, (None, None, 4)),
            **({} if by_coordinate else pick(rng, WEIGHTS)),
        }
        given = ", ".join(f"{key}={value!r}".replace("inf", "float('inf')") for key, value in options.items())
        self.start = np.arange(self.size, dtype=np.float32) % 7 - 3
        made = f"Pair(np.arange({self.size}, dtype=np.float32) % 7 - 3, {CLIENTS}, {self.spec!r}, {mean}, {given})"
        self.lines.append((f"pair = {made}", True))
        self.pair = eval(made)

    def call(self, name: str, *arguments):
        shown = [
            f"np.frombuffer(bytes.fromhex({one.tobytes().hex()!r}), np.{one.dtype}).reshape{one.shape}"
            if isinstance(one, np.ndarray) and one.dtype != object
            else repr(one)
            for one in arguments
        ]
        line = f"pair.{name}({', '.join(shown)})"
        try:
            with np.errstate(divide="raise", over="raise", invalid="raise"):
                result = getattr(self.pair, name)(*arguments)
        except Exception as error:
            raise fuzzing.Found(self.script(error, line)) from error
        self.lines.append((line, name != "give" or result == "taken"))
        return result

    def script(self, error: Exception, last: str) -> str:
        """The calls that led to an error; without the messages that were refused, if it needs none of them."""
        whole, short = ([line for line, counts in self.lines if counts or everything] for everything in (True, False))
        shows = fuzzing.script(error, IMPORTS, (held, Pair), *short, last)
        return shows if fuzzing.ends_with(type(error), shows) else fuzzing.script(error, IMPORTS, (held, Pair), *whole, last)


WEIGHTS = (
    {"weights": "uniform"},
    {"weights": "samples", "most_samples": 100.0},
    {"weights": {client: 1.0 + client for client in range(CLIENTS)}},
)


@functools.cache
def specs(dense: bool) -> list[str]:
    """Those that a server and its clients take."""
    found = []
    for text in codec_conformance.specs():
        if text.startswith("dense/") or not dense and "unbiased" not in text:  # the way down has a memory always
            found.append(text)
    return found


@functools.cache
def containers(size: int) -> list[list[dict]]:
    """Honest containers of so many elements, as arguments of container_builder.container."""
    gradient = np.round(gauss(size, 4), 1)
    return [
        [hostile_containers.fields_of(grace_ext.compressor(text).compress(gradient))] for text in codec_conformance.specs()
    ]


def sealed(head: bytes, rest: bytes) -> np.ndarray:
    """A message with the checksum that its header needs."""
    return np.frombuffer(head + container.checksum(np.frombuffer(head, np.uint8)) + rest, np.uint8)


def forged(rng: np.random.Generator, server: Server, honest: np.ndarray, asked: np.ndarray, before: list[np.ndarray]):
    """A hostile client's message. honest: what it had to send; asked: what the server sent it; before: what went to the
    server in this game."""
    size, round_ = server.model.size, server.round
    head, blob, (base,) = honest.tobytes()[: HEAD - 4], honest[HEAD:], np.frombuffer(honest[9:13].tobytes(), "<u4")
    kind = int(rng.integers(14))
    if kind == 0:
        return sealed(mutate(head, rng, asked.tobytes())[: HEAD - 4], blob.tobytes())
    if kind == 1:
        return np.frombuffer(mutate(honest.tobytes(), rng, asked.tobytes()), np.uint8)
    if kind == 2:
        return honest[: pick(rng, (honest.size // 2, HEAD - 4, HEAD, honest.size - 1, 0))]
    if kind == 3:
        return np.concatenate(pick(rng, ([honest, honest], [honest[honest.size // 2 :]], [honest, blob], [asked])))
    if kind == 4:
        return pick(rng, before) if before else honest
    if kind == 5:
        other = round_ + int(rng.integers(-3, 3)) if chance(rng, 0.7) else pick(rng, fuzzing.NUMBERS[:15])
        return Up(max(0, other), 1.0, blob, int(base)).pack()
    if kind == 6:
        return Up(round_, 1.0, blob, pick(rng, (0, 1, max(0, round_ - 1), round_, FRESH - 1, WHOLE))).pack()
    if kind == 7:
        return Up(round_, pick(rng, SAMPLES), blob, int(base)).pack()
    if kind == 8:
        values = pick(rng, (np.nan, np.inf, 0.0, 1e4, 1e12, 1e20, 1e30, -2e38, 1e-40)) * np.tanh(gauss(size))
        return Up(round_, 1.0, grace_ext.compressor("dense/raw").compress(values), int(base)).pack()
    if kind == 9:
        raw = container_builder.container(
            d=size, index=0, value=1, value_section=hostile_containers.floats(rng, bytes(4 * size))
        )
        return Up(round_, 1.0, np.frombuffer(raw, np.uint8), int(base)).pack()
    if kind in (10, 11):
        raw = hostile_containers.hostile(rng, containers(size))[0]
        return Up(round_, 1.0, np.frombuffer(raw, np.uint8), int(base)).pack()
    if kind == 12:
        return sealed(head[:3] + pick(rng, (b"1", b"3", b"\0", b"\xff")) + head[4:], blob.tobytes())
    return pick(
        rng,
        (
            honest.tobytes(),
            honest.astype(np.float32),
            honest.reshape(1, -1),
            honest.view(np.int8),
            None,
            "GXF2",
            honest.tolist(),
            np.zeros(largest(size) + 1, np.uint8),
            5,
            honest[::-1],
            {},
        ),
    )


def game(rng: np.random.Generator, counts: collections.Counter) -> None:
    """Some rounds of a server with hostile clients among the honest ones. Raises Found."""
    with np.errstate(all="ignore"):
        play = Recorder(rng, counts)
        clients = [Client(play.start, play.spec, memory=play.memory, number=number) for number in range(CLIENTS)]
        usual, before, kept = gauss(play.size, 8), [], {}
        for _ in range(ROUNDS):
            asked = {number: play.call("ask", number) for number in play.call("begin")}
            for number in sorted(asked, key=lambda _: rng.random()):
                client = clients[number]
                client.receive(asked[number])
                change = usual * np.float32(1 + 0.2 * rng.random())
                kept[number] = asked[number], client.update_by(change, float(rng.integers(1, 50)))
                if number < HONEST:
                    before.append(kept[number][1])
                    play.call("honest", number, kept[number][1])
                else:
                    before += attack(play, number, kept[number], before)
            play.call("end")
            for number in range(HONEST, CLIENTS):
                if number in kept and chance(rng, 0.3):
                    before += attack(play, number, kept[number], before)


def attack(play: Recorder, number: int, kept: tuple, before: list[np.ndarray]) -> list[np.ndarray]:
    """What a hostile client sends at a time: one message, or many. Returns them."""
    rng, sent = play.rng, []
    for _ in range(pick(rng, (1, 1, 2, 5, 12))):
        message = forged(rng, play.pair.live, kept[1], kept[0], before)
        sent.append(message)
        client = pick(rng, (-1, CLIENTS, 10**9)) if chance(rng, 0.05) else number
        said = play.call("give", client, message)
        play.counts[said] += 1
        if said == "taken" and chance(rng, 0.7):  # all that follows is late
            break
    return [message for message in sent if isinstance(message, np.ndarray) and message.dtype == np.uint8]


def check_memory(rng: np.random.Generator) -> None:
    """A message to a larger model. Raises Found."""
    blob, size = np.frombuffer(hostile_containers.hostile(rng, hostile_containers.large())[0], np.uint8), LARGE
    message = Up(1, 1.0, blob).pack()
    try:
        within_memory(size, message)
    except Exception as error:
        call = f"within_memory({size}, np.frombuffer(bytes.fromhex({message.tobytes().hex()!r}), np.uint8))"
        raise fuzzing.Found(fuzzing.script(error, IMPORTS, (peak_of, within_memory), call)) from error


def batch(seed: int) -> collections.Counter:
    """How many hostile messages ended in which way. Raises Found."""
    rng, counts = np.random.default_rng(seed), collections.Counter()
    check_memory(rng)
    for _ in range(GAMES):
        game(rng, counts)
    hostile_ranks.game(rng, counts, forged)
    return counts
