"""auto: switching between compressed and dense steps."""

import numpy as np
import pytest
from support.auto_exchanges import COMPRESSED, FLOAT32, FP16, TENSORS, make, step
from support.exchanges import arrays_of
from support.in_process_ranks import gradient, on_all_ranks
from support.listeners import without

from grace_ext import ConfigError
from grace_ext.exchange.session import StateSession
from grace_ext.policy.auto_tuner import AutoTuner
from grace_ext.transport.inprocess import InProcessTransport


@pytest.fixture(autouse=True)
def links_can_be_measured(monkeypatch):
    monkeypatch.setattr(InProcessTransport, "probe_transport", lambda self: self)


def take(exchange, *ways):
    """By hand."""
    without(exchange, AutoTuner)
    for bucket, way in zip(exchange.buckets, ways, strict=True):
        bucket.communicator.switch_to(way)


def end(exchange, finite=True):
    for bucket in exchange.buckets:
        bucket.communicator.end_step(finite)


def test_nothing_is_lost_by_switching():
    ways = [COMPRESSED, FLOAT32, FLOAT32, COMPRESSED, FP16, FP16, COMPRESSED, FLOAT32]

    def work(transport):
        exchange = make(transport)
        received, given = np.zeros(5000), np.zeros(5000)
        for i in range(3 * len(ways)):
            take(exchange, ways[i // 3], ways[-1 - i // 3])
            own = gradient(100 * transport.rank + i)
            received += step(exchange, own)[0]
            given += own
            end(exchange)
        state = arrays_of(exchange)
        return received, given, np.concatenate([state["residual:a"], state["residual:b"]]), state["residual:a"]

    results = on_all_ranks(work)
    given, residual = (np.mean([result[i] for result in results], axis=0) for i in (1, 2))
    for received, *_, of_a in results:
        np.testing.assert_array_equal(received, results[0][0])
        np.testing.assert_allclose(received + residual, given, atol=1e-2)  # fp16 without a memory
        assert not of_a.any(), "float32 leaves nothing for later"


@pytest.mark.parametrize("memory", ["momentum:0.5", "adam"])
def test_momenta_are_kept_and_nothing_is_lost_by_switching(memory):
    ways = [COMPRESSED, FLOAT32, FLOAT32, COMPRESSED, FLOAT32]

    def work(transport):
        exchange = make(transport, "topk:0.04/rice/raw", memory)
        received, given = np.zeros(5000), np.zeros(5000)
        for i in range(3 * len(ways)):
            take(exchange, ways[i // 3], ways[-1 - i // 3])
            assert not any(exchange.bypass_dtype(bucket) for bucket in exchange.buckets)
            own = gradient(100 * transport.rank + i)
            received += step(exchange, own)[0]
            given += own
            end(exchange)
        state = arrays_of(exchange)
        joined = {
            field: np.concatenate([state.get(f"{field}:{t.name}", np.zeros(t.size, np.float32)) for t in TENSORS])
            for field in ("residual", "velocity", "held")
        }
        shared = {key: array.tobytes() for key, array in state.items() if key.startswith("second_moment")}
        return received, given, sum(joined.values()), shared

    results = on_all_ranks(work)
    # With a momentum of a half, as much of the gradients is still to come as the first moment is.
    given, waiting = (np.mean([result[i] for result in results], axis=0) for i in (1, 2))
    for received, _, _, shared in results:
        np.testing.assert_array_equal(received, results[0][0])
        np.testing.assert_allclose(received + waiting, given, atol=1e-4)
        assert shared == results[0][3] and bool(shared) == memory.startswith("adam")


def test_a_step_that_is_not_finite_flushes_nothing():
    def work(transport):
        exchange = make(transport)
        take(exchange, COMPRESSED, COMPRESSED)
        step(exchange, gradient(transport.rank))
        owed = np.concatenate([arrays_of(exchange)[f"residual:{t.name}"] for t in TENSORS])
        assert owed.any()
        take(exchange, FLOAT32, FLOAT32)
        assert not step(exchange, np.full(5000, np.nan, np.float32))[1]
        end(exchange, finite=False)
        received, _ = step(exchange, np.zeros(5000, np.float32))
        return owed, received

    results = on_all_ranks(work)
    for _, received in results:
        np.testing.assert_allclose(received, np.mean([owed for owed, _ in results], axis=0), atol=1e-6)


def test_a_loaded_memory_is_sent_by_a_dense_strategy_too():
    """Which had sent all that it had before, and so bypassed the memory."""

    def work(transport):
        exchange, trained, session = make(transport), make(transport), StateSession(None, lambda *_: [])
        step(trained, gradient(transport.rank))
        owed = np.concatenate([arrays_of(trained)[f"residual:{tensor.name}"] for tensor in TENSORS])
        take(exchange, FLOAT32, FLOAT32)
        step(exchange, gradient(5))
        end(exchange)
        assert all(bucket.communicator.bypass_dtype for bucket in exchange.buckets)
        session.load(session.save(trained, []), exchange)
        session.settle(exchange, "test")
        assert not any(bucket.communicator.bypass_dtype for bucket in exchange.buckets)
        return owed, step(exchange, np.zeros(5000, np.float32))[0]

    results = on_all_ranks(work)
    for _, received in results:
        np.testing.assert_allclose(received, np.mean([owed for owed, _ in results], axis=0), atol=1e-6)


def test_what_auto_cannot_do_is_refused(monkeypatch):
    on_all_ranks(lambda transport: make(transport, memory="none"), ranks=1)
    for memory in ("ef21", "dgc", "demo"):
        with pytest.raises(ConfigError, match=f"auto.*{memory}"):
            on_all_ranks(lambda transport, memory=memory: make(transport, memory=memory), ranks=1)
    monkeypatch.setattr(InProcessTransport, "probe_transport", lambda self: None)
    with pytest.raises(ConfigError, match="measure"):
        on_all_ranks(make, ranks=1)
