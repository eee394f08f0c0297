"""The communicator `hierarchical`, against the same computed in one place with plain loops. Even and odd ranks are on two
hosts in tests of test_summing.py; here they are wherever ranks can be."""

import numpy as np
import pytest
from support.exchanges import arrays_of
from support.in_process_ranks import gradient, on_all_ranks
from support.summing_exchanges import TOPK, Recorder, make, residual_of, step

import grace_ext
from grace_ext import ConfigError, ContainerError, ExchangeError
from grace_ext.exchange.buckets import Tensor
from grace_ext.exchange.engine import Exchange
from grace_ext.exchange.shadow import shadow_step
from grace_ext.pipeline.spec import parse_stage
from grace_ext.transport import InProcessGroup, topology

TWO_BY_TWO, ROUND_ROBIN, UNEVEN, THREE = (0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 0, 0, 0), (0, 0, 1, 1, 2, 2, 0)
WEIGHT = 0.25  # a power of two, so that it does not matter when the sum is multiplied with it


def reference(sent, gradients, residual, placement):
    """One step. sent(array, name, rank) -> what receivers decode; gradients, residual: float32[ranks, d]; placement: the
    host of each rank -> the sum, and the next residuals."""
    ranks, d = gradients.shape
    out, following = np.zeros(d, np.float32), np.zeros_like(residual)
    members = [[rank for rank in range(ranks) if placement[rank] == host] for host in range(max(placement) + 1)]
    if len(members) == 1:
        for rank in range(ranks):
            out += gradients[rank] + residual[rank]
        return out, following
    count = min(len(local) for local in members)
    for number in range(count):
        part = slice(d * number // count, d * (number + 1) // count)
        for owner in sorted(local[number] for local in members):
            summed = np.zeros(part.stop - part.start, np.float32)
            for rank in members[placement[owner]]:
                summed += gradients[rank, part] + (residual[rank, part] if rank != owner else 0)
            summed += residual[owner, part]
            name = "a" if len(members) == ranks else f"a[{number}]"
            arrived = sent(summed, name, owner)
            out[part] += arrived
            following[owner, part] = summed - arrived
    return out, following


def expected(spec, gradients, placement, memory="residual", residual=0):
    """gradients: float32[steps, ranks, d] -> the results of the steps, and the residuals of the ranks after them."""
    compressor, outs, residual = grace_ext.compressor(spec), [], residual + np.zeros_like(gradients[0])
    for i, given in enumerate(gradients):

        def sent(array, name, rank, i=i):
            return grace_ext.decompress(compressor.compress(array, name=name, step=i, rank=rank), array.size)

        out, residual = reference(sent, given, residual, placement)
        outs.append(np.float32(WEIGHT) * out)
        residual = residual if memory == "residual" else 0 * residual
    return outs, residual


@pytest.mark.parametrize("d", [4999, 1])
@pytest.mark.parametrize(
    "spec, memory, placement",
    [
        (TOPK, "residual", TWO_BY_TWO),
        (TOPK, "residual", ROUND_ROBIN),
        (TOPK, "none", UNEVEN),
        (TOPK, "residual", THREE),
        (TOPK, "residual", (0, 0, 0)),
        (TOPK, "residual", (0, 1, 2)),
        (TOPK, "residual", (0,)),
        ("randomk:0.1/fp16", "residual", ROUND_ROBIN),
        ("randomk:0.1:unbiased=true/fp16", "none", UNEVEN),
        ("topk:0.05/bloom/raw", "residual", UNEVEN),
        ("dense/qsgd:4", "none", THREE),
        ("dense/fp16", "residual", (0, 0)),
        ("dense/fp16", "residual", TWO_BY_TWO),
        ("threshold:1.5", "residual", THREE),
    ],
)
def test_it_is_what_plain_loops_give(spec, memory, placement, d):
    ranks = len(placement)
    gradients = np.stack([[gradient(10 * rank + i, d) for rank in range(ranks)] for i in range(4)])

    def work(transport):
        exchange = make(transport, "hierarchical", spec, memory, d, weight=WEIGHT)
        outs = [step(exchange, given)[0] for given in gradients[:, transport.rank]]
        return outs, residual_of(exchange) if memory == "residual" else 0

    outs, residuals = expected(spec, gradients, placement, memory)
    for (results, residual), own in zip(on_all_ranks(work, ranks, hosts=placement), residuals, strict=True):
        np.testing.assert_array_equal(results, outs)
        np.testing.assert_array_equal(residual, own if memory == "residual" else 0)


@pytest.mark.parametrize("placement", [ROUND_ROBIN, UNEVEN, (0, 0)])
def test_what_others_than_the_owner_hold_is_sent_too(placement):
    """As after a change of ranks, or when a checkpoint of another communicator is loaded."""
    ranks, d = len(placement), 5000
    held = np.stack([gradient(50 + rank) for rank in range(ranks)])
    gradients = np.stack([[gradient(rank) for rank in range(ranks)]])

    def work(transport):
        exchange = make(transport, "hierarchical", weight=WEIGHT)
        a = d - d // 3
        state = held[transport.rank]
        exchange.load_state_dict({"residual": {"a": state[:a], "b": state[a:]}})
        return step(exchange, gradients[0, transport.rank])[0], residual_of(exchange)

    (out,), residuals = expected(TOPK, gradients, placement, residual=held)
    for (result, residual), own in zip(on_all_ranks(work, ranks, hosts=placement), residuals, strict=True):
        np.testing.assert_array_equal(result, out)
        np.testing.assert_array_equal(residual, own)


def test_between_hosts_goes_one_container_for_each_of_them():
    """Whatever the number of a host's ranks; dense values and copies of containers stay on the host."""

    def work(transport):
        recorder = Splits(transport)
        exchange = make(recorder, "hierarchical", "topk:0.01/rice/qsgd:7", d=200_000)
        step(exchange, gradient(transport.rank, 200_000))
        assert exchange.stats()["bytes_out"] == recorder.away
        assert sum(recorder.local) > 4 * 100_000
        return recorder.away

    container = grace_ext.compressor("topk:0.01/rice/qsgd:7").compress(gradient(0, 200_000)).size
    for placement in (TWO_BY_TWO, ROUND_ROBIN, 2 * TWO_BY_TWO, 2 * (0, 1, 2)):
        sent, count = on_all_ranks(work, len(placement), hosts=placement), max(placement) + 1
        for host in range(count):
            from_host = sum(given for given, its in zip(sent, placement, strict=True) if its == host)
            assert from_host == pytest.approx((count - 1) * container, rel=0.03)


class Splits(Recorder):
    """Counts what goes to ranks on this host, and to others."""

    def __init__(self, transport):
        super().__init__(transport)
        self.local, self.away = [], 0

    def alltoall(self, name, payload, splits):
        same = [host == self.hosts[self.rank] for host in self.hosts]
        self.local.append(np.sum(splits, where=same))
        self.away += np.sum(splits, where=np.logical_not(same))
        return super().alltoall(name, payload, splits)


@pytest.mark.parametrize(
    "placement, kinds", [(TWO_BY_TWO, 3 * ["alltoall"]), ((0, 1, 2), ["allgather"]), ((0, 0, 0, 0), ["allreduce"])]
)
def test_it_takes_no_more_collectives_than_the_places_need(placement, kinds):
    def work(transport):
        recorder = Recorder(transport)
        exchange = make(recorder, "hierarchical")
        step(exchange, gradient(transport.rank))
        communicator = exchange.buckets[0].communicator
        assert list(communicator.collectives_of(transport)) == kinds
        return [kind for kind, _ in recorder.given], communicator.wire_copies(transport)

    copies = {"allgather": 2, "allreduce": 1.5, "alltoall": 1}[kinds[0]]
    assert on_all_ranks(work, len(placement), hosts=placement) == [(kinds, copies)] * len(placement)


def test_one_host_sums_exactly_whatever_the_spec():
    """In float32, also where the spec itself would go by allreduce in float16."""
    gradients = [gradient(rank) for rank in range(3)]
    for spec in ("dense/fp16", "randomk:0.1/fp16", TOPK):

        def work(transport, spec=spec):
            assert parse_stage("communicator", "hierarchical").allreduce_dtype(grace_ext.compressor(spec)) == "float32"
            exchange = make(transport, "hierarchical", spec)
            return step(exchange, gradients[transport.rank])[0], residual_of(exchange)

        for out, residual in on_all_ranks(work, 3, hosts=(0, 0, 0)):
            np.testing.assert_array_equal(out, gradients[0] + gradients[1] + gradients[2])
            assert not residual.any()


@pytest.mark.parametrize("placement, hit", [(TWO_BY_TWO, 0), (TWO_BY_TWO, 3), (UNEVEN, 0), (UNEVEN, 2), (THREE, 3)])
@pytest.mark.parametrize("phase", ["local", "hosts"])
@pytest.mark.parametrize(
    "damage", [lambda array: array[:-1], lambda array: np.append(array, np.uint8(1)), lambda array: np.tile(array, 7)]
)
def test_what_an_owner_cannot_read_is_told_to_all(placement, hit, phase, damage):
    """Whichever it is, on whichever host; nobody waits in vain, and no memory changes."""

    def work(transport):
        is_hit = transport.rank == hit
        exchange = make(Damaging(transport, phase, damage) if is_hit else transport, "hierarchical")
        with pytest.raises(
            ContainerError if is_hit else ExchangeError, match=None if is_hit else f"rank {hit} got something other"
        ):
            step(exchange, gradient(transport.rank))
        exchange.abort()
        assert not residual_of(exchange).any()

    on_all_ranks(work, len(placement), hosts=placement)


def test_what_is_damaged_on_its_last_way_raises_there():
    def work(transport):
        exchange = make(Damaging(transport, "all", lambda array: array[::-1].copy()), "hierarchical")
        with pytest.raises(ContainerError):
            step(exchange, gradient(transport.rank))

    on_all_ranks(work, 4, hosts=TWO_BY_TWO)


class Damaging(Recorder):
    """Changes what this rank gets in one of the phases."""

    def __init__(self, transport, phase, damage):
        super().__init__(transport)
        self._phase, self._damage = phase, damage

    def alltoall(self, name, payload, splits):
        self._change = {"alltoall": self._damage} if name.endswith(f".{self._phase}") else None
        return super().alltoall(name, payload, splits)


def test_an_owner_that_joined_passes_on_all_that_its_host_gives():
    """Exactly, as nobody else keeps what it would leave out; its own residual stays."""

    def work(transport):
        exchange = make(transport, "hierarchical", joinable=True)
        step(exchange, gradient(transport.rank))
        before, out = arrays_of(exchange), np.empty(5000, np.float32)
        if transport.rank in (0, 1):  # all owners of the first slice
            assert shadow_step(exchange, lambda bucket: out)
            after = arrays_of(exchange)
            assert all(np.array_equal(before[name], after[name]) for name in after)
        else:
            out, _ = step(exchange, gradient(10 + transport.rank))
        return out

    results = on_all_ranks(work, 4, hosts=ROUND_ROBIN)
    for out in results:
        np.testing.assert_array_equal(out[:2500], gradient(12)[:2500] + gradient(13)[:2500])
        assert np.count_nonzero(out[2500:]) <= 2 * 250
        np.testing.assert_array_equal(out, results[0])


def test_memories_that_follow_single_ranks_are_refused():
    for memory, message in (("ef21", "use communicator allgather"), ("dgc", "dgc:masking=false")):
        with pytest.raises(ConfigError, match=message):
            make(InProcessGroup(1).transport(0), "hierarchical", TOPK, memory)
    with pytest.raises(ConfigError, match="factors"):
        parse_stage("communicator", "hierarchical").check(grace_ext.compressor("powersgd:2"))


# Which ranks share a host


def test_hosts_are_numbered_in_the_order_of_their_first_ranks(monkeypatch):
    def named(name):
        monkeypatch.setenv(topology.HOSTNAME_VARIABLE, name)
        return topology.own_host_digest()

    gathered = np.stack([named(name) for name in ("b", "a", "b", "c", "a", "")])
    assert gathered.dtype == np.uint8 and gathered.shape == (6, topology.HOST_BYTES)
    assert topology.number_hosts(gathered) == (0, 1, 0, 2, 1, 3)


def test_a_host_is_its_name_and_its_boot(monkeypatch):
    monkeypatch.delenv(topology.HOSTNAME_VARIABLE, raising=False)
    here = topology.own_host_digest()
    assert np.array_equal(here, topology.own_host_digest())
    monkeypatch.setattr(topology, "boot_id", lambda: "another")
    assert not np.array_equal(here, topology.own_host_digest())
    monkeypatch.undo()
    monkeypatch.setattr(topology.socket, "gethostname", lambda: "another")
    assert not np.array_equal(here, topology.own_host_digest())


def test_ranks_tell_each_other_their_hosts_with_their_layouts(monkeypatch):
    def exchange(rank, spec=TOPK):
        monkeypatch.setenv(topology.HOSTNAME_VARIABLE, f"rack{rank % 2}")
        made = Exchange(group.transport(rank), "residual", 1.0)
        made.transport.hosts = None
        made.set_buckets(
            [
                made.bucket(
                    "bucket", [Tensor("a", 50, 2)], grace_ext.compressor(spec), parse_stage("communicator", "hierarchical")
                )
            ]
        )
        return made, made.config_digest()

    group = InProcessGroup(4)
    made, layouts = zip(*map(exchange, range(4)), strict=True)
    with pytest.raises(ExchangeError, match="check_config_digests"):
        step(made[0], np.zeros(50, np.float32))
    made[0].check_config_digests(np.concatenate(layouts))
    assert made[0].transport.hosts == ROUND_ROBIN
    other = exchange(3, "topk:0.2")[1]
    with pytest.raises(ConfigError, match=r"ranks \[3\] have other parameters"):
        made[1].check_config_digests(np.concatenate([*layouts[:3], other]))
    assert made[1].transport.hosts is None
