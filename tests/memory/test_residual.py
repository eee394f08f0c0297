"""residual: error feedback, the plain way and as a transaction."""

import numpy as np
import pytest
from support.arrays import gauss

import grace_ext
from grace_ext import ConfigError
from grace_ext._util.rng import Stream


def begun(memory, name="w", value=1.0, size=4):
    """Start a step whose next state is `value` everywhere."""
    state, following = memory.begin(name, size)
    following[:] = value
    return state


def kept(memory, name="w"):
    return memory.state_dict()[name]["residual"].tolist()


@pytest.fixture
def residual():
    return grace_ext.memory("residual")


def test_plain_road(residual):
    gradient = np.array([1, 2, 3, 4], np.float32)
    first = residual.compensate("w", gradient)
    assert np.array_equal(first, gradient) and not np.shares_memory(first, gradient)
    residual.update("w", first, np.array([0, 2, 0, 5], np.float32))
    assert kept(residual) == [1, 0, 3, -1]
    assert residual.compensate("w", gradient).tolist() == [2, 2, 6, 3]
    assert residual.compensate("other", gradient).tolist() == [1, 2, 3, 4], "a state belongs to its name"
    assert kept(residual) == [1, 0, 3, -1], "compensate changes nothing"


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_a_non_finite_step_leaves_the_plain_state_as_it_was(residual, special):
    residual.update("w", np.full(4, 3, np.float32), np.ones(4, np.float32))
    bad = np.array([1, special, 1, 1], np.float32)
    for compensated, transmitted in ((bad, np.full(4, np.nan)), (bad, np.zeros(4)), (np.ones(4), bad)):
        residual.update("w", compensated.astype(np.float32), transmitted.astype(np.float32))
        assert kept(residual) == [2, 2, 2, 2]


@pytest.mark.parametrize("spec", ["residual", "residual:bits=16", "residual:bits=8"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_on_the_plain_road_all_is_float32_whatever_the_gradient_is(spec, dtype):
    memory, gradient = grace_ext.memory(spec), gauss(200).astype(dtype)
    for _ in range(2):
        compensated = memory.compensate("w", gradient)
        assert compensated.dtype == np.float32 and not np.shares_memory(compensated, gradient)
        memory.update("w", compensated.astype(dtype), np.zeros(200, dtype))
    assert memory._residual.current("w").dtype == np.float32 == memory.state_dict()["w"]["residual"].dtype
    np.testing.assert_allclose(memory.compensate("w", 0 * gradient), 2 * gradient.astype(np.float32), rtol=0, atol=0.2)


def test_the_plain_road_has_vectors_only(residual):
    gradient = gauss(200).reshape(10, 20)
    for wrong, shape in ((gradient, r"\(10, 20\)"), (np.float32(3), r"\(\)")):
        with pytest.raises(ConfigError, match=rf"gradient of 'w' has the shape {shape}; allowed: one dimension"):
            residual.compensate("w", wrong)
    with pytest.raises(ConfigError, match=r"compensated of 'w' has the shape \(10, 20\)"):
        residual.update("w", gradient, gradient)
    with pytest.raises(ConfigError, match=r"transmitted of 'w' has the shape \(10, 20\)"):
        residual.update("w", gradient.reshape(-1), gradient)
    with pytest.raises(ConfigError, match="compensated of 'w' has 200 elements, transmitted 1"):
        residual.update("w", gradient.reshape(-1), np.zeros(1, np.float32))
    with pytest.raises(ConfigError, match="not int64"):
        residual.compensate("w", np.arange(3))
    assert residual.state_dict() == {}


def test_commit_puts_the_next_state_in_force(residual):
    assert begun(residual, value=1).tolist() == [0, 0, 0, 0], "the first state is zero"
    assert kept(residual) == [0, 0, 0, 0]
    residual.commit()
    assert kept(residual) == [1, 1, 1, 1]
    assert begun(residual, value=2).tolist() == [1, 1, 1, 1]
    residual.commit()
    assert kept(residual) == [2, 2, 2, 2]


def test_rollback_leaves_the_state_as_it_was(residual):
    begun(residual, value=1)
    residual.commit()
    for _ in range(2):
        begun(residual, value=np.nan)
        residual.rollback()
        assert kept(residual) == [1, 1, 1, 1]
    residual.commit()  # nothing is begun any more
    assert kept(residual) == [1, 1, 1, 1]
    begun(residual, value=5)
    residual.commit()
    assert kept(residual) == [5, 5, 5, 5]


def test_a_transaction_covers_the_names_begun_since_the_last_one(residual):
    begun(residual, "a", 1)
    begun(residual, "b", 1)
    residual.commit()
    begun(residual, "a", 2)
    residual.commit()
    assert kept(residual, "a") == [2] * 4 and kept(residual, "b") == [1] * 4
    begun(residual, "b", 3)
    begun(residual, "a", 3)
    residual.rollback()
    assert kept(residual, "a") == [2] * 4 and kept(residual, "b") == [1] * 4


def test_begin_twice_is_one_step(residual):
    begun(residual, value=1)
    begun(residual, value=2)
    residual.commit()
    assert kept(residual) == [2] * 4


def test_state_and_next_state_are_two_arrays(residual):
    for value in (1, 2, 3):
        state, following = residual.begin("w", 4)
        assert state.dtype == following.dtype == np.float32 and state.size == following.size == 4
        assert not np.shares_memory(state, following)
        following[:] = value
        assert not (state == value).any()
        residual.commit()


def test_state_dict_round_trip(residual):
    begun(residual, "a", 1)
    begun(residual, "b", 2, size=3)
    residual.commit()
    saved = residual.state_dict()
    assert {name: state["residual"].dtype for name, state in saved.items()} == {"a": np.float32, "b": np.float32}

    begun(residual, "a", 9)
    residual.commit()
    assert saved["a"]["residual"].tolist() == [1] * 4, "a copy"

    other = grace_ext.memory("residual")
    begun(other, "c", 7)
    other.load_state_dict(saved)
    saved["a"]["residual"][:] = 100
    assert sorted(other.state_dict()) == ["a", "b"]
    assert kept(other, "a") == [1] * 4 and kept(other, "b") == [2] * 3
    other.commit()  # what was begun before is forgotten
    assert kept(other, "a") == [1] * 4
    assert begun(other, "a", 5).tolist() == [1] * 4
    other.commit()
    assert kept(other, "a") == [5] * 4


def test_another_size_is_refused_and_changes_nothing(residual):
    residual.load_state_dict({"w": {"residual": np.ones(4, np.float32)}})
    for size in (1, 3, 5):
        with pytest.raises(ConfigError, match=f"residual of 'w' has 4 elements, the gradient {size}"):
            residual.begin("w", size)
        with pytest.raises(ConfigError, match=f"residual of 'w' has 4 elements, the gradient {size}"):
            residual.compensate("w", np.ones(size, np.float32))
    residual.commit()
    assert kept(residual) == [1] * 4
    state, following = residual.begin("w", 4)
    assert state.size == following.size == 4


def test_the_memory_function():
    memory = grace_ext.memory("residual")
    assert grace_ext.memory(memory) is memory and memory.stateful
    assert grace_ext.memory("residual") is not memory
    with pytest.raises(ConfigError, match="unknown memory .moment.; known: .*none.*residual"):
        grace_ext.memory("moment")
    with pytest.raises(ConfigError, match="no option|only the first option"):
        grace_ext.memory("residual:rate=0.9")


def sent_of(memory, compressor, gradient, step):
    """What receivers get of a step with error feedback."""
    state, following = memory.begin("w", gradient.size)
    blob = compressor.encode_compensated(gradient, state, following, Stream(0, "w", step)).blob
    memory.commit()
    return grace_ext.decompress(blob, gradient.size)


@pytest.mark.parametrize("spec", ["topk:0.05/rice/raw", "topk:0.05/rice/onebit", "randomk:0.1/shared/raw"])
def test_of_the_mean_of_all_steps_nothing_is_missing_in_the_end(residual, spec):
    """The survey's δ² -> 0: what is missing of the sum is the residual, which stays bounded, so that it falls as 1 / T².

    The bound is that of Karimireddy et al., Error feedback fixes SignSGD, 2019, Lemma 3: ‖e‖² <= 4 (1 - δ) / δ² max ‖g‖².
    """
    c, d = grace_ext.compressor(spec), 2000
    sums, largest, missing = np.zeros((2, d)), 0.0, {}
    for step in range(1, 1001):
        gradient = gauss(d, step) + 1
        sums += gradient, sent_of(residual, c, gradient, step)
        largest = max(largest, float(gradient @ gradient))
        kept = residual.state_dict()["w"]["residual"].astype(np.float64)
        assert kept @ kept <= 4 * (1 - c.sparsifier.density) / c.sparsifier.density**2 * largest
        if step in (1, 10, 100, 1000):
            assert np.allclose(sums[0] - sums[1], kept, rtol=0, atol=2e-3)
            missing[step] = np.sum((sums[0] - sums[1]) ** 2) / np.sum(sums[0] ** 2)
    assert missing[1] > 0.7 and missing[10] > missing[100] > 50 * missing[1000]
    assert missing[1000] < 0.001


def test_sgd_with_error_feedback_keeps_its_rate():
    """E[f(w) - f(w*)] = O(1 / √T) of the survey's theorem, for the mean of the iterates and steps of 1 / √T: four times as many
    steps halve it, and it comes near to that of SGD without compression."""
    d, gaps = 500, {}
    optimum, curvature = gauss(d, 1), np.linspace(0.02, 1, d).astype(np.float32)
    for spec in ("dense/raw", "topk:0.05/rice/raw"):
        c = grace_ext.compressor(spec)
        for steps in (64, 256, 1024, 4096):
            memory, w, total = grace_ext.memory("residual"), np.zeros(d, np.float32), np.zeros(d)
            for step in range(steps):
                gradient = curvature * (w - optimum) + gauss(d, step + 2)
                w = w - np.float32(2 / np.sqrt(steps)) * sent_of(memory, c, gradient, step)
                total += w
            gaps[spec, steps] = 0.5 * float(np.sum(curvature * (total / steps - optimum) ** 2))
    for spec in ("dense/raw", "topk:0.05/rice/raw"):
        scaled = [gaps[spec, steps] * np.sqrt(steps) for steps in (64, 256, 1024, 4096)]
        assert max(scaled[1:]) <= 1.2 * scaled[0]
    assert gaps["topk:0.05/rice/raw", 4096] < 1.3 * gaps["dense/raw", 4096]
