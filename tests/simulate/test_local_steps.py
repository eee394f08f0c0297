"""Local steps in virtual time, against small cases that are worked out by hand."""

import numpy as np
import pytest

from grace_ext import ConfigError
from grace_ext.policy.cost_model import Codec
from grace_ext.rounds.header import HEADER
from grace_ext.simulate import LocalSetting, Trace, fastest, simulate_local_steps
from grace_ext.simulate.traces import constant

#: A byte for each element, half a second to encode anything, a quarter to decode a container.
CODEC = Codec(lambda elements, summed: elements, lambda elements: 0.5, lambda elements, containers: 0.25 * containers)
HEADERS = HEADER.itemsize / 1000  # seconds of the headers of two workers, at 1,000 bytes a second


def setting(**options):
    given = {"params": 1000, "links": [constant(1000.0)] * 2, "compute": 1.0, "total": 6, "steps": 3, **options}
    return LocalSetting(**given)


def test_an_exchange_takes_codecs_bytes_and_messages():
    """Two workers: each sends 1,000 bytes to the other in one message, and a collective waits for a latency and one for each."""
    found = simulate_local_steps(setting(latency=0.1), CODEC, "allgather")
    exchange = (HEADERS + 0.2) + 0.5 + (1.0 + 0.2) + 2 * 0.25
    first, second, last = found.transfers
    assert (first.step, second.step, last.step) == (3, 6, 6)
    assert first.start == pytest.approx(3) and second.start == pytest.approx(6 + exchange)
    assert [one.seconds for one in found.transfers] == pytest.approx([exchange, exchange, HEADERS + 0.2])
    assert first.waited == pytest.approx(exchange) and first.sent == pytest.approx(1000 + HEADER.itemsize)
    assert found.seconds == pytest.approx(6 + 2 * exchange + last.seconds) and found.computing == 6
    assert found.efficiency == pytest.approx(6 / found.seconds)
    assert found.sent == pytest.approx(2 * 1000 + 3 * HEADER.itemsize)


def test_gradients_of_each_step_have_no_headers():
    found = simulate_local_steps(setting(steps=1, total=2, headers=False), CODEC, "allgather")
    assert [one.seconds for one in found.transfers] == pytest.approx([2.0, 2.0, 0.0])
    assert found.seconds == pytest.approx(6) and found.sent == 2000


def test_what_is_unfinished_is_exchanged_at_the_end():
    found = simulate_local_steps(setting(total=4), CODEC, "allgather")
    assert [one.step for one in found.transfers] == [3, 4]
    assert found.transfers[0].seconds == pytest.approx(found.transfers[1].seconds)


def test_fragments_are_exchanged_at_their_offsets_and_behind_local_steps():
    """Fragments of 500 bytes every 4 steps, the second one from step 2 on. Exchanges of 1.5 s and a header hide behind 2 steps
    of 1 s each only in part, and one that begins while the link is in use would wait."""
    found = simulate_local_steps(setting(steps=4, total=8, fragments=2, delay=1), CODEC, "allgather")
    exchange = HEADERS + 0.5 + 0.5 + 0.5
    late = exchange - 1.0  # a step hides a second
    hidden, ends = found.transfers[:3], found.transfers[3:]
    assert [(one.step, one.fragment) for one in hidden] == [(2, 1), (4, 0), (6, 1)]
    assert [one.start for one in hidden] == pytest.approx([2, 4 + late, 6 + 2 * late])
    assert [one.waited for one in hidden] == pytest.approx([late] * 3)
    # Fragment 0 is under way at the end, and nothing of it is left then; of fragment 1 there are two steps.
    assert [(one.step, one.fragment) for one in ends] == [(8, 0), (8, 0), (8, 1)]
    assert [one.seconds for one in ends] == pytest.approx([exchange, HEADERS, exchange])
    assert found.seconds == pytest.approx(8 + 3 * late + 2 * exchange + HEADERS)


def test_an_exchange_that_fits_behind_local_steps_costs_nothing():
    found = simulate_local_steps(setting(steps=6, total=12, delay=3), CODEC, "allgather")
    assert found.transfers[0].waited == 0 and found.transfers[0].seconds > 2
    blocking = simulate_local_steps(setting(steps=6, total=12), CODEC, "allgather")
    assert found.seconds == pytest.approx(blocking.seconds - blocking.transfers[0].seconds)


def test_the_slowest_link_ends_a_collective_and_links_change():
    slow = constant(250.0)
    found = simulate_local_steps(setting(links=[constant(1000.0), slow]), CODEC, "allgather")
    assert found.transfers[0].seconds == pytest.approx(4 * (HEADERS + 1.0) + 1.0)
    changing = Trace([3.0 + HEADERS + 0.5, 2.0, 100.0], [1000.0, 0.0, 1000.0])  # nothing for 2 s after the first encoding
    found = simulate_local_steps(setting(links=[changing] * 2), CODEC, "allgather")
    assert found.transfers[0].seconds == pytest.approx(HEADERS + 0.5 + 2.0 + 1.0 + 0.5)


def test_a_worker_that_is_slower_is_waited_for():
    quick, slow = (simulate_local_steps(setting(spread=spread, total=300), CODEC, "allgather") for spread in (0.0, 0.5))
    assert slow.computing == pytest.approx(quick.computing, rel=0.1)
    assert slow.seconds > 1.05 * quick.seconds and slow.transfers[5].waited > slow.transfers[5].seconds
    again = simulate_local_steps(setting(spread=0.5, total=300), CODEC, "allgather")
    assert again == slow
    assert simulate_local_steps(setting(spread=0.5, total=300, seed=1), CODEC, "allgather") != slow


def test_many_workers():
    """By `allgather` each gets the containers of all others, by `sharded` about two, whatever their number."""
    links = [constant(1e6)] * 512
    one = setting(params=10**6, links=links, compute=0.0, total=1, steps=1)
    gathered, sharded = (simulate_local_steps(one, CODEC, name).transfers[0] for name in ("allgather", "sharded"))
    assert gathered.sent == pytest.approx(511 * (10**6 + HEADER.itemsize))
    assert sharded.sent == pytest.approx(2 * 511 / 512 * 10**6 + 511 * HEADER.itemsize, rel=1e-2)
    name, found = fastest(one, CODEC, ["allgather", "sharded"])
    assert name == "sharded" and found.transfers[0] == sharded


@pytest.mark.parametrize(
    "options, said",
    [
        ({"links": [constant(1.0)]}, "1 links; allowed"),
        ({"params": 2, "fragments": 3}, "params=2 with fragments=3"),
        ({"total": 0}, "total=0; allowed"),
        ({"compute": float("nan")}, "compute=nan; allowed"),
        ({"latency": -1.0}, "latency=-1.0; allowed"),
        ({"spread": float("inf")}, "spread=inf; allowed"),
        ({"delay": 3}, "delay=3; allowed with steps=3 and fragments=1: 0 to 2"),
        ({"steps": 0}, "steps=0"),
    ],
)
def test_what_makes_no_sense_is_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        setting(**options)
    with pytest.raises(ConfigError, match="no cost model of communicator 'majority'"):
        simulate_local_steps(setting(), CODEC, "majority")
    assert np.isfinite(simulate_local_steps(setting(), CODEC, "allreduce").seconds)
