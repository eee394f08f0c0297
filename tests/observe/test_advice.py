"""Warned of, once and not without need: a residual that keeps growing, too much that waits under Adam, slow codecs."""

import threading
import types
import warnings

import numpy as np
import pytest
from support.exchanges import step
from support.in_process_ranks import on_all_ranks

import grace_ext
from grace_ext import ConfigError
from grace_ext.exchange.buckets import Tensor
from grace_ext.exchange.engine import Exchange
from grace_ext.observe import advice
from grace_ext.pipeline.spec import parse_stage
from grace_ext.registry import register
from grace_ext.sparsifiers.base import Sparsifier
from grace_ext.transport import InProcessGroup, link_probe
from grace_ext.transport.inprocess import InProcessTransport


@pytest.fixture(autouse=True)
def nothing_was_said(monkeypatch):
    monkeypatch.setattr(advice, "_given", set())


def exchange(transport, spec, memory="residual", d=2000, **options):
    made = Exchange(transport, memory, 1 / transport.size, **options)
    made.set_buckets(
        [
            made.bucket(
                "bucket",
                [Tensor("layer.weight", d, 2)],
                grace_ext.compressor(spec),
                parse_stage("communicator", "allgather"),
            )
        ]
    )
    return made


def steady(generator, d):
    """As in training: a direction that stays, of heavy-tailed elements, and noise of the batches."""
    mean = generator.standard_normal(d) * np.exp(1.5 * generator.standard_normal(d))
    return lambda i: mean + 3 * generator.standard_normal(d)


def fading(generator, d):
    """As when training converges: the residual falls behind the gradient."""
    steadily = steady(generator, d)
    return lambda i: steadily(i) / (1 + i / 50)


def noise(generator, d):
    return lambda i: generator.standard_normal(d)


def rising(generator, d):
    return lambda i: generator.standard_normal(d) * (1 + i / 50)


def warned(spec, gradients, steps, **options) -> list[str]:
    def work(transport):
        made = exchange(transport, spec, **options)
        given = gradients(np.random.default_rng(transport.rank), 2000)
        for i in range(steps):
            step(made, given(i).astype(np.float32))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        on_all_ranks(work, ranks=2)
    return [str(one.message) for one in caught]


@pytest.mark.parametrize(
    "memory, spec, expected",
    [("adam", "topk:0.001", 1), ("adam", "topk:0.1", 0), ("residual", "topk:0.001", 0), ("muon", "topk:0.001", 0)],
)
def test_under_adam_too_much_that_waits_is_warned_of(memory, spec, expected):
    found = [text for text in warned(spec, noise, 130, memory=memory) if "waits" in text]
    assert len(found) == expected and all("after 64 steps" in text and "layer.weight" in text for text in found)


@pytest.mark.parametrize("small, per, expected", [(0.001, "bucket", 1), (0.001, "tensor", 0), (0.5, "bucket", 0)])
def test_under_adam_tensors_that_are_never_sent_are_warned_of(small, per, expected):
    """As the tables of a recommendation model, whose gradients were a thousandth of those of its layers."""
    made = Exchange(InProcessGroup(1).transport(0), "adam", 1.0)
    tensors = [Tensor("layer", 1000, 2), Tensor("table", 1000, 2)]
    made.set_buckets(
        [
            made.bucket(
                "bucket",
                tensors,
                grace_ext.compressor(f"topk:0.1:per={per}/rice/raw"),
                parse_stage("communicator", "allgather"),
            )
        ]
    )
    generator, scale = np.random.default_rng(0), np.repeat([1, small], 1000)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(513):
            step(made, (scale * generator.standard_normal(2000)).astype(np.float32))
    found = [str(one.message) for one in caught if "hardly anything was sent" in str(one.message)]
    assert len(found) == expected and all("after 512 steps hardly anything was sent of table:" in text for text in found)


@pytest.mark.parametrize("gradients", [steady, fading, rising])
@pytest.mark.parametrize("spec, steps", [("topk:0.01/rice/qsgd:7", 2100), ("topk:0.1/rice/qsgd:7", 1050)])
def test_healthy_top_k_is_left_alone(spec, steps, gradients):
    assert warned(spec, gradients, steps) == []


@pytest.mark.parametrize(
    "spec, memory",
    [
        ("dense/onebit", "residual"),
        ("dense/terngrad", "residual"),
        ("powersgd:2", "residual"),
        ("randomk:0.1", "residual"),
        ("dense/qsgd:2:norm=l2", "none"),
        ("topk:0.1", "dgc"),
    ],
)
def test_other_healthy_pairings_are_left_alone(spec, memory):
    assert warned(spec, steady, 520, memory=memory) == []


def test_a_codec_whose_error_is_larger_than_its_input_is_warned_of_once_and_at_once():
    """The error of 2 bits with the L2 norm of 512 values is sqrt(512) times those: fed back, it grows without bound."""
    (text,) = warned("dense/qsgd:2:norm=l2", steady, 40)
    assert "keeps growing" in text and "at step 16" in text and "layer.weight" in text
    assert "memory='none'" in text and "GRACE_EXT_WARN=0" in text


@pytest.mark.filterwarnings("error")
def test_where_warnings_are_errors_the_log_has_it(caplog):
    made = exchange(InProcessGroup(1).transport(0), "dense/qsgd:2:norm=l2")
    gradient = steady(np.random.default_rng(0), 2000)
    for i in range(40):
        step(made, gradient(i).astype(np.float32))
    assert any("keeps growing" in text for text in caplog.messages)


@pytest.mark.parametrize("gradients", [noise, steady])
def test_elements_that_are_never_sent_are_warned_of(temporary_registry, gradients):
    """Their residual is a random walk, which stays far below the bound for long, or grows with each step."""

    @register
    class FirstHalf(Sparsifier):
        name = "firsthalf"

        def select(self, dense, scope):
            indices = np.arange(dense.size // 2, dtype=np.uint32)
            return indices, dense[indices]

    (text,) = warned("firsthalf/raw/raw", gradients, 140)
    assert "keeps growing" in text


def test_the_environment_silences_both(monkeypatch):
    monkeypatch.setenv("GRACE_EXT_WARN", "0")
    assert warned("dense/qsgd:2:norm=l2", steady, 40) == []
    assert link(FAST, monkeypatch) == ([], [])


# The link

FAST = 1e-12  # seconds a byte


class Link(InProcessTransport):
    """Takes `seconds` for each byte of an allreduce, by a clock of each rank that nothing else moves."""

    clock = threading.local()

    def __init__(self, group, rank, seconds, probes):
        super().__init__(group, rank)
        self.seconds, self.probes = seconds, probes

    def probe_transport(self):
        return self

    def allreduce(self, name, array):
        if self.rank == 0 and ".probe." in name:
            self.probes.append(array.size)
        self.clock.now = self.now() + self.seconds * array.nbytes
        return super().allreduce(name, array)

    @classmethod
    def now(cls):
        return getattr(cls.clock, "now", 0.0)


def link(seconds, monkeypatch, spec="topk:0.01/rice/qsgd:7", steps=25, ranks=2, first=0):
    """The texts of warnings, and the elements of the probes."""
    probes = []
    monkeypatch.setattr(InProcessGroup, "transport", lambda group, rank: Link(group, rank, seconds, probes))
    monkeypatch.setattr(link_probe, "time", types.SimpleNamespace(perf_counter=Link.now))

    def work(transport):
        made = exchange(transport, spec, d=50_000)
        made.load_state_dict({"step": first})
        generator = np.random.default_rng(transport.rank)
        for _ in range(steps):
            step(made, generator.standard_normal(50_000).astype(np.float32))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        on_all_ranks(work, ranks=ranks)
    return [str(one.message) for one in caught], probes


def test_a_fast_link_is_warned_of(monkeypatch):
    (text,), probes = link(FAST, monkeypatch)
    assert "costs more time than it saves" in text and "0.2 MB" in text and "Gbit/s" in text
    for word in ("dense/raw", "fp16", "GRACE_EXT_WARN=0"):
        assert word in text
    assert probes == [2**15] * 3 + [2**18] * 3 + [2**21] * 3
    assert link(FAST, monkeypatch)[0] == [], "once"


def test_a_slow_link_is_not(monkeypatch):
    texts, probes = link(1e-6, monkeypatch)
    assert texts == []
    assert probes == [2**15] * 3, "a slow link is not burdened with more"


def test_probes_follow_the_step_of_the_exchange(monkeypatch):
    """Which all ranks share, and not how many steps each has seen."""
    assert not link(FAST, monkeypatch, steps=19)[1]
    assert link(FAST, monkeypatch, steps=20)[1]
    assert not link(FAST, monkeypatch, first=20, steps=100)[1]
    monkeypatch.setattr(advice, "_given", set())
    texts, probes = link(FAST, monkeypatch, first=195, steps=10)
    assert probes and not texts, "all take part, but five steps are too few to judge"
    monkeypatch.setattr(advice, "_given", set())
    assert len(link(FAST, monkeypatch, first=185, steps=20)[0]) == 1


def test_one_rank_and_plain_gradients_are_not_probed(monkeypatch):
    assert link(FAST, monkeypatch, ranks=1) == ([], [])
    assert link(FAST, monkeypatch, "dense/raw") == ([], [])


def test_ranks_that_disagree_about_warnings_are_told(monkeypatch):
    group = InProcessGroup(2)
    made = []
    for rank, value in enumerate("10"):
        monkeypatch.setenv("GRACE_EXT_WARN", value)
        made.append(exchange(Link(group, rank, 0.0, []), "topk:0.1"))
    with pytest.raises(ConfigError, match=r"ranks \[1\]"):
        made[0].check_config_digests(np.concatenate([one.config_digest() for one in made]))
