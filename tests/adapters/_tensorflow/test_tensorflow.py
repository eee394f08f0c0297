"""What the TensorFlow adapter does in one process: arrays in and out, names, options. Jobs: tests/adapters/horovod_tensorflow."""

import concurrent.futures

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")
hvd = pytest.importorskip("horovod.tensorflow")

from grace_ext import ConfigError  # noqa: E402
from grace_ext.adapters._horovod.options import group_names  # noqa: E402
from grace_ext.adapters._tensorflow import nodes as module  # noqa: E402
from grace_ext.adapters._tensorflow.names import common_names, name_of, unique  # noqa: E402
from grace_ext.adapters._tensorflow.options import Options  # noqa: E402
from grace_ext.adapters.horovod_tensorflow import DistributedGradientTape, compression_stats  # noqa: E402

pytestmark = pytest.mark.tier("test")


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    hvd.init()


def address(array):
    return array.__array_interface__["data"][0]


def test_results_are_not_written_while_somebody_looks_at_them():
    results = module.ResultArrays([100, 60])
    held = [results.unused(), results.unused(), results.unused()]
    assert not any(np.shares_memory(held[i], held[j]) for i, j in ((0, 1), (0, 2), (1, 2)))
    at = {address(array) for array in held}
    held.clear()
    again = results.unused()
    assert address(again) in at
    assert address(results.unused()) in at - {address(again)}


@pytest.mark.parametrize("sizes", [(64, 32), (5, 64, 640), (3, 1000, 16)])
def test_tensorflow_reads_the_larger_part_of_the_results_without_a_copy(sizes):
    array = module.ResultArrays(sizes).unused()
    assert array.shape == (sum(sizes),) and array.dtype == np.float32
    starts = np.cumsum([0, *sizes[:-1]])
    aligned = [size for start, size in zip(starts, sizes, strict=True) if (address(array) + 4 * start) % 64 == 0]
    assert max(sizes) in aligned


def test_a_result_comes_out_where_numpy_wrote_it():
    array = module.ResultArrays([1000]).unused()
    array[:] = 7
    tensor = tf.function(lambda: tf.numpy_function(lambda: array, [], tf.float32))()
    assert address(np.asarray(memoryview(tensor))) == address(array)


@pytest.mark.parametrize("size", [10, module._PART, 3 * module._PART + 5])
def test_packing_joins_scales_and_copies_in_parts(size):
    class Graph:
        helper = concurrent.futures.ThreadPoolExecutor(1)

    nodes = module.BucketNodes.__new__(module.BucketNodes)
    nodes._graph, nodes._prescale = Graph, 0.5
    arrays = np.arange(size, dtype=np.float32), np.ones((3, 4), np.float16), np.float32(9)
    out = np.zeros(size + 13, np.float32)
    nodes._pack(arrays, out)
    assert np.array_equal(out, 0.5 * np.concatenate([np.ravel(array).astype(np.float32) for array in arrays]))


def test_names_tell_variables_apart():
    keras = pytest.importorskip("keras")
    assert name_of(tf.Variable(1.0, name="scale")) == "scale"
    assert name_of(keras.Variable(1.0, name="bias")).endswith("bias")
    assert unique(["a", "b", "a", "a"]) == ["a", "b", "a#2", "a#3"]


def test_ranks_call_variables_the_same_whatever_they_made_before():
    names = ["dense_2/kernel", "dense_2/bias", "norm/gamma", "dense_5/kernel", "lstm_1/lstm_cell/kernel", "dense_2/kernel#2"]
    common = ["dense/kernel", "dense/bias", "norm/gamma", "dense_1/kernel", "lstm/lstm_cell/kernel", "dense/kernel#2"]
    assert common_names(names) == common_names(common) == common
    assert common_names(["block_1", "block_2", "block"]) == ["block", "block_1", "block_2"]


def test_groups_by_number_and_by_variable():
    a, b, c = variables = [tf.Variable(1.0, name=name) for name in "abc"]
    names = {id(variable): variable.name for variable in variables}
    assert group_names(None, names) is None
    assert group_names(2, names) == [["a:0", "b:0"], ["c:0"]]
    assert group_names([[b, a], [tf.Variable(1.0)]], names) == [["b:0", "a:0"], []]
    for wrong, text in ((-1, "positive number"), ("a", "positive number"), ([[a], [a]], "only appear once")):
        with pytest.raises(ConfigError, match=text):
            group_names(wrong, names)


@pytest.mark.parametrize(
    "options, text",
    [({"op": "Adasum"}, "op"), ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "gradient_predivide_factor")],
)
def test_options_that_cannot_be_honoured(options, text):
    if options["op"] == "Adasum":
        options = {"op": hvd.Adasum}
    with pytest.raises(ConfigError, match=text):
        Options(**options)


def test_with_one_rank_gradients_are_the_tapes_own():
    variable = tf.Variable([1.0, 2.0])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(variable**2)
    tape = DistributedGradientTape(tape)
    assert isinstance(tape, tf.GradientTape) and tape.compression_stats() == {"steps": 0}
    assert tape.gradient(loss, variable).numpy().tolist() == [2.0, 4.0]
    assert tape.compression_stats() == compression_stats(variable) == {"steps": 0}


def test_a_tape_is_expected():
    with pytest.raises(ConfigError, match=r"tf\.GradientTape"):
        DistributedGradientTape("tape")
