"""The arrays of a model as one vector."""

import numpy as np
import pytest
from support import launch

launch.skip_without("flwr")

from flwr.app import ArrayRecord  # noqa: E402
from support.flower_apps import flat, model, record  # noqa: E402

from grace_ext import ConfigError, ContainerError  # noqa: E402
from grace_ext.adapters._flower.layout import Layout  # noqa: E402


def counted() -> ArrayRecord:
    """A model with a counter, as batch normalization has one."""
    return record(weight=np.ones((2, 3), np.float32), batches=np.array(7, np.int64), half=np.ones(2, np.float16))


def test_arrays_come_back_from_the_vector_in_their_shapes_and_dtypes():
    arrays = model()
    layout = Layout.of(arrays)
    vector = layout.vector(arrays)
    assert layout.size == vector.size == 420 and vector.dtype == np.float32
    assert np.array_equal(vector, flat(arrays))
    back = layout.arrays(vector, ArrayRecord())
    for name, array in arrays.items():
        assert back[name].numpy().dtype == array.numpy().dtype and back[name].numpy().shape == array.numpy().shape
        assert np.array_equal(back[name].numpy().astype(np.float32), array.numpy().astype(np.float32))


def test_a_layout_is_read_as_it_was_written():
    layout = Layout.of(counted(), ["batch*"])
    assert Layout.read(layout.text).text == layout.text and Layout.read(layout.text).size == 8
    for text in (
        "",
        "3",
        "[[1, 2]]",
        '[["a", "b", "c", true]]',
        '[["a", ["x"], "float32", true]]',
        '[["a",[-2,3],"float32",true]]',
        '[["a",[65536,65536],"float32",true]]',
    ):
        with pytest.raises(ContainerError, match="no layout of a model"):
            Layout.read(text)


def test_what_is_not_of_floating_point_needs_a_pattern():
    with pytest.raises(ConfigError, match=r"'batches' is int64; allowed: float16, float32, float64, or a pattern"):
        Layout.of(counted())
    layout, arrays = Layout.of(counted(), ["*atch*"]), counted()
    assert layout.size == 8 and list(layout.unchanged(arrays)) == ["batches"]
    other = record(weight=np.zeros((2, 3), np.float32), batches=np.array(9, np.int64), half=np.zeros(2, np.float16))
    back = layout.arrays(layout.vector(other), layout.unchanged(arrays))
    assert list(back) == list(arrays) and back["batches"].numpy() == 7 and not back["weight"].numpy().any()


def test_a_model_without_anything_to_send_is_refused():
    with pytest.raises(ConfigError, match="no elements that could be sent"):
        Layout.of(record(batches=np.array(7, np.int64)), ["*"])


@pytest.mark.parametrize(
    "change, text",
    [
        ({"bias": None}, r"lacks the arrays \['bias'\] and has \[\] too many"),
        ({"more": np.ones(2, np.float32)}, r"lacks the arrays \[\] and has \['more'\] too many"),
        ({"bias": np.ones(18, np.float32)}, r"'bias' is float32\[18\]; it was float64\[19\]"),
        ({"bias": np.ones(19, np.int32)}, r"'bias' is int32\[19\]; it was float64\[19\]"),
    ],
)
def test_another_model_is_refused(change, text):
    arrays = {name: array.numpy() for name, array in model().items()} | change
    with pytest.raises(ConfigError, match=text):
        Layout.of(model()).vector(record(**{name: array for name, array in arrays.items() if array is not None}))


def test_digests_tell_models_and_layouts_apart():
    layout = Layout.of(model())
    assert layout.digest(model()) == layout.digest(model()) != layout.digest(model(seed=1))
    assert layout.digest(model()) != Layout.of(model(), ["bias"]).digest(model())
