"""What means of federated training achieve when some clients are Byzantine; a part of federated.py.

The task is a linear classifier of synthetic clusters of points. 3 of 10 clients send their update with the sign flipped and
scaled up, but not so much that the server's norm check would reject it, and claim 1e30 samples.
"""

import dataclasses
import statistics

import numpy as np
from _lib import as_markdown

from grace_ext.federated import Client, ClippedMean, Median, NearestNeighborMixing, Server, TrimmedMean, WeightedMean

CLIENTS, LIARS = 10, 3
CLASSES, FEATURES, SAMPLES, TESTS, SPREAD = 10, 40, 20_000, 4000, 2.5
ROUNDS, LOCAL_STEPS, RATE = 60, 5, 0.1
CLAIM = 1e30  # samples that Byzantine clients claim
SPEC, MEMORY = "topk:0.1/rice/raw", "ef21"
SEEDS = range(3)
BAR = 2.0  # points of accuracy that a trimmed mean may lose
JUDGED = ("trimmed", "mixed")  # the bar is met if one of these meets it everywhere


@dataclasses.dataclass
class Row:
    label: str
    mean: type | object
    lies: bool = True
    options: dict = dataclasses.field(default_factory=dict)


ROWS = {
    "honest": Row("plain mean, nobody lies", WeightedMean(), lies=False),
    "plain": Row("plain mean", WeightedMean()),
    "claimed": Row(
        "plain mean, weighted by samples, of which at most 10,000 count",
        WeightedMean(),
        options={"weights": "samples", "most_samples": 10_000},
    ),
    "clipped": Row("clipped mean", ClippedMean()),
    "median": Row("median", Median()),
    "trimmed": Row(f"trimmed mean, {LIARS / CLIENTS:.0%} at each end", TrimmedMean(LIARS / CLIENTS)),
    "mixed-median": Row("nearest-neighbor mixing, then the median", NearestNeighborMixing(Median(), LIARS / CLIENTS)),
    "mixed": Row(
        "nearest-neighbor mixing, then the trimmed mean",
        NearestNeighborMixing(TrimmedMean(LIARS / CLIENTS), LIARS / CLIENTS),
    ),
}


@dataclasses.dataclass
class Setting:
    """A way to divide the data.

    alpha: the parameter of the Dirichlet distribution by which each class is divided among clients; None: at random. batch:
    points per batch. length: how many times a false update is longer than the honest one.
    """

    alpha: float | None = None
    batch: int = 256
    length: float = 4.0


#: By column.
SETTINGS = {
    "alike": Setting(),
    "alike, batches of 32": Setting(batch=32),
    "unlike": Setting(alpha=1.0),
    "unlike, short lies": Setting(alpha=1.0, length=1.0),
}


class Task:
    """Points around the centers of classes, and a linear classifier of FEATURES x CLASSES weights."""

    def __init__(self, seed: int, setting: Setting):
        self._random, self._batch = np.random.default_rng(seed), setting.batch
        self._centers = self._random.standard_normal((CLASSES, FEATURES))
        self._points, self._labels = self._sample(SAMPLES)
        self._test = self._sample(TESTS)
        owners = self._random.integers(0, CLIENTS, SAMPLES)
        if setting.alpha is not None:
            shares = self._random.dirichlet(np.full(CLIENTS, setting.alpha), CLASSES)
            owners = np.array([self._random.choice(CLIENTS, p=shares[label]) for label in self._labels])
        self._of = [np.flatnonzero(owners == client) for client in range(CLIENTS)]
        self.start = np.zeros(FEATURES * CLASSES, np.float32)

    def _sample(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        labels = self._random.integers(0, CLASSES, count)
        return self._centers[labels] + SPREAD * self._random.standard_normal((count, FEATURES)), labels

    def change(self, model: np.ndarray, client: int) -> np.ndarray:
        """Return float32[d]: the model before some steps of SGD on this client's points minus that after them."""
        weights = model.reshape(FEATURES, CLASSES).astype(np.float64)
        for _ in range(LOCAL_STEPS):
            chosen = self._random.choice(self._of[client], self._batch)
            scores = self._points[chosen] @ weights
            likely = np.exp(scores - scores.max(axis=1, keepdims=True))
            likely /= likely.sum(axis=1, keepdims=True)
            likely[np.arange(self._batch), self._labels[chosen]] -= 1
            weights -= RATE / self._batch * self._points[chosen].T @ likely
        return (model - weights.reshape(-1)).astype(np.float32)

    def samples(self, client: int) -> int:
        return self._of[client].size

    def accuracy(self, model: np.ndarray) -> float:
        """Compute the accuracy on the test points, in percent."""
        points, labels = self._test
        return 100 * float(np.mean((points @ model.reshape(FEATURES, CLASSES)).argmax(axis=1) == labels))


def accuracy(row: Row, seed: int, setting: Setting) -> tuple[float, int]:
    """Train with a mean; return the final accuracy in percent and the number of rejected updates."""
    task = Task(seed, setting)
    server = Server(task.start, CLIENTS, SPEC, memory=MEMORY, mean=row.mean, seed=seed, **row.options)
    clients = [Client(task.start, SPEC, memory=MEMORY, number=number, seed=seed) for number in range(CLIENTS)]
    refused = 0
    for _ in range(ROUNDS):
        for number in server.begin_round():
            change = task.change(clients[number].receive(server.message_for(number)), number)
            lies = row.lies and number < LIARS
            server.receive(
                number,
                clients[number].update_by(
                    -setting.length * change if lies else change, CLAIM if lies else task.samples(number)
                ),
            )
        refused += len(server.end_round().rejected)
    return task.accuracy(server.model), refused


def measure() -> tuple[str, bool]:
    """Return the section's text without its last line, and whether the bar is met."""
    found = {
        column: {name: [accuracy(row, seed, setting) for seed in SEEDS] for name, row in ROWS.items()}
        for column, setting in SETTINGS.items()
    }
    means = {
        column: {name: statistics.mean(one for one, _ in runs) for name, runs in rows.items()}
        for column, rows in found.items()
    }
    table = [["", *(part for column in SETTINGS for part in (f"accuracy, {column}", "points"))]]
    for name, row in ROWS.items():
        parts = [(means[column][name], means[column][name] - means[column]["honest"]) for column in SETTINGS]
        table.append(
            [
                row.label,
                *(
                    part
                    for value, gained in parts
                    for part in (f"{value:.2f} %", "" if name == "honest" else f"{gained:+.2f}")
                ),
            ]
        )
    lies = sum(row.lies for row in ROWS.values()) * len(SETTINGS) * len(SEEDS) * ROUNDS * LIARS
    refused = sum(count for rows in found.values() for runs in rows.values() for _, count in runs)
    gained = {name: {column: of[name] - of["honest"] for column, of in means.items()} for name in JUDGED}
    judged = "".join(
        f"- The target, at most {BAR:g} points lost (set before measuring), with {ROWS[name].label}: "
        + ", ".join(
            f"{'met' if points >= -BAR else '**missed**'} with clients {column} ({points:+.2f} points)"
            for column, points in columns.items()
        )
        + ".\n"
        for name, columns in gained.items()
    )
    text = (
        f"Written by `benchmarks/federated.py --liars`; do not edit between the markers. {LIARS} of {CLIENTS} clients "
        f"send their update with the sign flipped and {Setting.length:g} times as long (short lies: as long as honest "
        f"updates), and claim {CLAIM:g} samples. In the columns 'unlike', LDA (alpha 1) distributes each class among the "
        f"clients. "
        f"A linear classifier of {FEATURES * CLASSES} weights on {SAMPLES} points in {CLASSES} clusters; {ROUNDS} "
        f"rounds of {LOCAL_STEPS} local steps, on batches of 256 unless stated otherwise, `{SPEC}`, memory "
        f"`{MEMORY}`.\n\n{as_markdown(table)}\n\n"
        f"- Accuracy on {TESTS} other points, the mean over {len(SEEDS)} seeds. Points: against the run in which nobody "
        "lies, with the same clients. What robust means lose grows with how much the updates of honest clients differ: "
        "by the noise of small batches, or by what clients have seen.\n"
        f"- Of {lies} lies, the norm check refused {refused}.\n"
        f"{judged}"
    )
    return text, any(min(columns.values()) >= -BAR for columns in gained.values())
