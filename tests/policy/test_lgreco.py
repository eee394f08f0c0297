"""lgreco: the fewest bytes for the error of the spec's density."""

import numpy as np
import pytest
from support.arrays import gauss
from support.in_process_ranks import on_all_ranks

import grace_ext
from grace_ext import ConfigError
from grace_ext.exchange.buckets import Tensor
from grace_ext.exchange.engine import Exchange
from grace_ext.pipeline.spec import parse_stage
from grace_ext.transport import InProcessGroup

SIZES, SCALES, DENSITY = (40_000, 20_000, 10_000), (1.0, 0.1, 0.01), 0.05
SPEC = f"topk:{DENSITY}/rice/raw"


def make(transport, schedule, memory="none", spec=SPEC):
    exchange = Exchange(transport, memory, 1 / transport.size, schedule=schedule and {"density": schedule})
    exchange.set_buckets(
        [
            exchange.bucket(
                f"b{i}", [Tensor(f"t{i}", size, 2)], grace_ext.compressor(spec), parse_stage("communicator", "allgather")
            )
            for i, size in enumerate(SIZES)
        ]
    )
    return exchange


def step(exchange, number, change=lambda given: given, scales=SCALES):
    """The bytes and the squared error of all buckets in a step. All ranks have the same gradients."""
    given = [
        change(np.float32(scales[i]) * gauss(bucket.size, 97 * number + i)) for i, bucket in enumerate(exchange.buckets)
    ]
    for bucket, one in zip(exchange.buckets, given, strict=True):
        exchange.start(bucket, lambda out, one=one: np.copyto(out, one))
    nbytes, error = sum(exchange.pending(bucket).wire_bytes for bucket in exchange.buckets), 0.0
    for bucket, one in zip(exchange.buckets, given, strict=True):
        out = np.empty(bucket.size, np.float32)
        exchange.finish(bucket, out)
        error += float(np.square(one - out, dtype=np.float64).sum())
    exchange.end_step()
    return nbytes, error


@pytest.mark.parametrize("factor", [1.0, 0.9])
def test_fewer_bytes_for_the_error_of_the_specs_density(factor):
    def work(transport):
        plain, chosen = make(transport, None), make(transport, f"lgreco:{factor}")
        return [(step(plain, number), step(chosen, number)) for number in range(14)]

    for (uniform_bytes, allowed), (nbytes, error) in on_all_ranks(work, 2)[0][1:]:
        assert error <= 1.02 * factor * allowed
        assert factor < 1 or nbytes < 0.9 * uniform_bytes, "elements of the small buckets are worth less than their bytes"


def test_densities_stay_between_measurements():
    def work(transport):
        exchange, seen = make(transport, "lgreco"), []
        for number in range(15):
            step(exchange, number, scales=SCALES[:: -1 if number > 4 else 1])
            seen.append(tuple(exchange.stats()["densities"].values()))
        return seen

    seen = on_all_ranks(work, 2)[0]
    assert [number for number in range(1, 15) if seen[number] != seen[number - 1]] == [10], "not at once, in step 5"
    assert seen[0][0] > seen[0][1] >= seen[0][2] and seen[10][0] <= seen[10][1] < seen[10][2]


def test_new_buckets_are_looked_at_in_their_first_step():
    def work(transport):
        exchange = make(transport, "lgreco")
        for number in range(3):
            step(exchange, number)
        exchange.set_buckets(exchange.buckets)
        step(exchange, 3)
        return list(exchange.stats()["densities"].values())

    first, second, third = on_all_ranks(work, 2)[0]
    assert first > second >= third


def test_a_gradient_that_is_not_finite_changes_nothing():
    exchange = make(InProcessGroup(1).transport(0), "lgreco", "residual")
    for number in range(10):
        step(exchange, number)
    before = exchange.stats()["densities"]
    step(exchange, 10, lambda given: given * np.float32(np.nan))
    assert exchange.stats()["densities"] == before
    step(exchange, 11)


def test_what_does_not_fit_together():
    for schedule, spec, message in [
        ("lgreco:0", SPEC, "error=0.0; allowed: finite and above 0"),
        ("lgreco:nan", SPEC, "error=nan; allowed"),
        ("lgreco", "randomk:0.1", "draw the same positions"),
    ]:
        with pytest.raises(ConfigError, match=message):
            make(InProcessGroup(1).transport(0), schedule, spec=spec)
