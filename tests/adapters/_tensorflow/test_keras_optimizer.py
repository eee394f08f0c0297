"""Keras optimizers of both Kerases in one process: what wrapping must leave as it is, saving, and accumulation."""

import copy
import json
import os
import pickle
import subprocess
import sys

import pytest

tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")
tf_keras = pytest.importorskip("tf_keras")
hvd = pytest.importorskip("horovod.tensorflow")
np = pytest.importorskip("numpy")

from grace_ext import ConfigError  # noqa: E402
from grace_ext.adapters.horovod_tensorflow import DistributedOptimizer, load_model  # noqa: E402

pytestmark = pytest.mark.tier("test")


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    """Not at import: Horovod knows its process sets through the framework that was initialized or imported last."""
    hvd.init()


KINDS = {
    "keras": (keras, lambda **options: keras.optimizers.Adam(0.01, **options)),
    "tf_keras": (tf_keras, lambda **options: tf_keras.optimizers.Adam(0.01, **options)),
    "tf_keras-legacy": (tf_keras, lambda **options: tf_keras.optimizers.legacy.Adam(0.01, **options)),
    "keras-scaled": (keras, lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))),
    "tf_keras-scaled": (
        tf_keras,
        lambda: tf_keras.mixed_precision.LossScaleOptimizer(tf_keras.optimizers.SGD(0.1, momentum=0.9)),
    ),
    "tf_keras-legacy-scaled": (
        tf_keras,
        lambda: tf_keras.mixed_precision.LossScaleOptimizer(tf_keras.optimizers.legacy.SGD(0.1, momentum=0.9)),
    ),
}
every_kind = pytest.mark.parametrize("kind", KINDS)
X = np.random.default_rng(0).normal(size=(32, 6)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(32, 2)).astype(np.float32)


def model(api):
    api.utils.set_random_seed(1)
    inputs = api.Input((6,))
    return api.Model(inputs, api.layers.Dense(2)(api.layers.Dense(8, activation="tanh")(inputs)))


def trained(kind, wrap, **compile_options):
    api, make = KINDS[kind]
    net, optimizer = model(api), make()
    if wrap:
        optimizer = DistributedOptimizer(optimizer)
    net.compile(optimizer, api.losses.MeanSquaredError(), **compile_options)
    net.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return net


def state(optimizer) -> list:
    """Values of all variables; legacy optimizers call them weights."""
    variables = optimizer.variables
    return [np.asarray(variable) for variable in (variables() if callable(variables) else variables)]


def assert_equal(ours: list, theirs: list):
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "kind, options",
    [
        *((kind, {}) for kind in KINDS),
        *(
            (kind, options)
            for kind in ("keras", "tf_keras")
            for options in ({"run_eagerly": True}, {"steps_per_execution": 3})
        ),
    ],
)
def test_one_rank_trains_as_without(kind, options):
    ours, theirs = trained(kind, True, **options), trained(kind, False, **options)
    assert_equal(ours.get_weights(), theirs.get_weights())
    assert_equal(state(ours.optimizer), state(theirs.optimizer))
    assert ours.optimizer.compression_stats() == {"steps": 0}


@every_kind
def test_it_stays_the_same_object_of_the_same_class(kind):
    _, make = KINDS[kind]
    optimizer = make()
    plain = type(optimizer)
    wrapped = DistributedOptimizer(optimizer)
    assert wrapped is optimizer and isinstance(wrapped, plain) and wrapped.__class__ is plain
    assert type(wrapped).__name__ == plain.__name__ and type(make()) is plain
    with pytest.raises(ConfigError, match="wrapped by DistributedOptimizer already"):
        DistributedOptimizer(wrapped)


@every_kind
def test_custom_loops(kind):
    api, make = KINDS[kind]
    results = []
    for wrap in (DistributedOptimizer, lambda optimizer: optimizer):
        net, optimizer = model(api), wrap(make())
        variables = net.trainable_variables

        def gradients(net=net, variables=variables):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((net(X) - Y) ** 2)
            return tape.gradient(loss, variables)

        def step(optimizer=optimizer, gradients=gradients, variables=variables):
            optimizer.apply_gradients(zip(gradients(), variables, strict=True))

        step()
        step = tf.function(lambda step=step: step())
        step()
        step()
        if api is keras:
            optimizer.apply(gradients())
        else:
            optimizer.minimize(lambda net=net: tf.reduce_mean((net(X) - Y) ** 2), variables)
        assert optimizer.iterations.numpy() == 4
        results.append(net.get_weights())
    assert_equal(*results)


@every_kind
def test_copies_and_configs_are_plain(kind):
    net = trained(kind, True)
    optimizer = net.optimizer
    plain = optimizer.__class__
    config = optimizer.get_config()
    for copied in (plain.from_config(copy.deepcopy(config)), type(optimizer).from_config(copy.deepcopy(config))):
        assert type(copied) is plain and str(copied.get_config()) == str(config)
    theirs = trained(kind, False).optimizer
    try:
        expected = copy.deepcopy(theirs)
    except Exception as error:  # then Keras cannot, and neither can we
        with pytest.raises(type(error)):
            copy.deepcopy(optimizer)
    else:
        copied = copy.deepcopy(optimizer)
        assert type(copied) is plain is type(expected)
        assert_equal(state(copied), state(expected))
    try:
        pickle.dumps(theirs)
    except Exception as error:
        with pytest.raises(type(error)):
            pickle.dumps(optimizer)
    else:
        assert type(pickle.loads(pickle.dumps(optimizer))) is plain


@every_kind
def test_a_checkpoint_holds_what_the_plain_one_holds(kind, tmp_path):
    ours, theirs = trained(kind, True), trained(kind, False)
    names = []
    for name, net in (("ours", ours), ("theirs", theirs)):
        path = tf.train.Checkpoint(model=net, optimizer=net.optimizer).write(str(tmp_path / name))
        names.append(tf.train.list_variables(path))
    assert names[0] == names[1]
    fresh = model(KINDS[kind][0])
    fresh.compile(KINDS[kind][1](), "mse")
    fresh.fit(X, Y, verbose=0)
    tf.train.Checkpoint(model=fresh, optimizer=fresh.optimizer).read(str(tmp_path / "ours")).assert_consumed()
    assert_equal(state(fresh.optimizer), state(ours.optimizer))


FORMATS = [
    (kind, name)
    for kind in KINDS
    for name in ("x.keras", "x.h5", "folder")
    if not (name == "folder" and KINDS[kind][0] is keras)
]  # Keras 3 does not write SavedModels with optimizers
LOADER = """
import sys
sys.modules["grace_ext"] = None  # importing it fails
import json, numpy as np, keras, tf_keras
for api, path, out in json.load(open(sys.argv[1])):
    net = {"keras": keras, "tf_keras": tf_keras}[api].models.load_model(path)
    if not (api == "keras" and path.endswith("h5")):  # after that Keras 3's own optimizers cannot train either
        net.fit(np.ones((4, 6)), np.ones((4, 2)), verbose=0)  # SavedModels restore an optimizer when it is used
    variables = net.optimizer.variables
    variables = variables() if callable(variables) else variables
    np.savez(out, *net.get_weights(), *[np.asarray(v) for v in variables], kind=str(type(net.optimizer)))
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Models of all kinds in all formats, wrapped and plain, and what a process without grace_ext loaded from them."""
    folder = tmp_path_factory.mktemp("saved")
    jobs = []
    for kind in KINDS:
        for wrap in (True, False):
            net = trained(kind, wrap)
            for _, name in [case for case in FORMATS if case[0] == kind]:
                path = folder / f"{kind}-{wrap}" / name
                path.parent.mkdir(exist_ok=True)
                net.save(path)
                jobs.append((KINDS[kind][0].__name__, str(path), str(path) + ".npz"))
    (folder / "jobs.json").write_text(json.dumps(jobs))
    done = subprocess.run(
        [sys.executable, "-c", LOADER, str(folder / "jobs.json")], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.parametrize("kind, name", FORMATS)
def test_a_saved_model_loads_where_grace_ext_is_not(kind, name, saved):
    ours, theirs = (np.load(saved / f"{kind}-{wrap}" / f"{name}.npz") for wrap in (True, False))
    assert ours.files == theirs.files
    assert_equal([ours[key] for key in ours.files], [theirs[key] for key in theirs.files])
    if name == "x.keras" and "legacy" not in kind:  # which keeps the whole state
        assert "9" in {str(ours[key]) for key in ours.files}, "iterations"


@pytest.mark.parametrize(
    "kind, name", [(kind, name) for kind, name in FORMATS if KINDS[kind][0] is tf_keras or name != "x.h5"]
)
def test_load_model_loads_and_wraps_again(kind, name, saved):
    path = saved / f"{kind}-True" / name
    net = load_model(path, keras=KINDS[kind][0], compression="dense/raw")
    assert type(net.optimizer) is not net.optimizer.__class__
    net.fit(np.ones((4, 6)), np.ones((4, 2)), verbose=0)
    expected = np.load(str(path) + ".npz")
    assert str(expected["kind"]) == str(net.optimizer.__class__)
    assert_equal([*net.get_weights(), *state(net.optimizer)], [expected[key] for key in expected.files if key != "kind"])
    assert net.optimizer.compression_stats() == {"steps": 0}


def test_load_model_without_an_optimizer(tmp_path):
    model(keras).save(tmp_path / "x.keras")
    with pytest.raises(ConfigError, match="saved without an optimizer"):
        load_model(tmp_path / "x.keras")


@every_kind
@pytest.mark.parametrize("average, eagerly", [(False, True), (True, False)])
def test_backward_passes_are_summed(kind, average, eagerly):
    api, make = KINDS[kind]
    ours, theirs = model(api), model(api)
    optimizer = DistributedOptimizer(make(), backward_passes_per_step=2, average_aggregated_gradients=average)
    ours.compile(optimizer, "mse", run_eagerly=eagerly)
    ours.fit(X, Y, batch_size=4, epochs=1, shuffle=False, verbose=0)
    assert optimizer.iterations.numpy() == 8
    plain = make()
    inner = getattr(plain, "inner_optimizer", plain)
    for start in range(0, 32, 8):
        with tf.GradientTape() as tape:
            losses = [tf.reduce_mean((theirs(X[at : at + 4]) - Y[at : at + 4]) ** 2) for at in (start, start + 4)]
            loss = tf.add_n(losses) / (2 if average else 1)
        variables = theirs.trainable_variables
        if api is keras and not inner.built:
            inner.build(variables)
        inner.iterations.assign_add(1)  # the first pass counts too
        inner.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    for one, other in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    assert not np.array_equal(ours.get_weights()[0], model(api).get_weights()[0])


@pytest.mark.parametrize("kind", ["keras", "tf_keras", "tf_keras-legacy"])
@pytest.mark.parametrize("sparse_as_dense", [False, True])
def test_sparse_gradients_are_summed_as_rows(kind, sparse_as_dense, monkeypatch):
    api, make = KINDS[kind]
    optimizer = DistributedOptimizer(make(), backward_passes_per_step=3, sparse_as_dense=sparse_as_dense)
    seen = []
    exchange = optimizer._grace.exchange
    monkeypatch.setattr(
        optimizer._grace, "exchange", lambda gradients, variables: seen.extend(gradients) or exchange(gradients, variables)
    )
    table = api.layers.Embedding(10, 2)
    table.build(None)
    before = np.asarray(table.trainable_variables[0])

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def step(rows):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(table(rows))
        gradients = tape.gradient(loss, table.trainable_variables)
        assert isinstance(gradients[0], tf.IndexedSlices)
        optimizer.apply_gradients(zip(gradients, table.trainable_variables, strict=True))

    for rows in ([1, 2], [2], [7, 7, 7]) * 2:
        step(tf.constant(rows, tf.int64))
    assert {isinstance(gradient, tf.IndexedSlices) for gradient in seen} == {not sparse_as_dense}
    moved = np.flatnonzero(np.abs(np.asarray(table.trainable_variables[0]) - before).sum(1))
    assert moved.tolist() == [1, 2, 7]


def two_heads(kind, passes, tasks, in_graph, heads=2, zeros=False):
    """Ones as gradients of a trunk and of one head by turns; what SGD(1) has made of zeros then. zeros: in the place of None."""
    api, _ = KINDS[kind]
    make = api.optimizers.legacy.SGD if kind == "tf_keras-legacy" else api.optimizers.SGD
    optimizer = DistributedOptimizer(make(1.0), backward_passes_per_step=passes)
    variable = keras.Variable if kind == "keras" else tf.Variable
    names = "abcde"[:heads]
    variables = [variable(np.zeros(2, np.float32), name=name) for name in ("trunk", *names)]

    def step(task):
        none = tf.zeros(2) if zeros else None
        gradients = [tf.ones(2), *(tf.ones(2) if name == task else none for name in names)]
        optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))

    step = tf.function(step) if in_graph else step
    for task in tasks:
        step(task)
    return [float(np.asarray(one)[0]) for one in variables]


@pytest.mark.parametrize("kind", ["keras", "tf_keras", "tf_keras-legacy"])
@pytest.mark.parametrize("in_graph", [False, True])
def test_what_other_passes_have_summed_is_applied_without_a_gradient_in_the_last_one(kind, in_graph):
    assert two_heads(kind, 2, "abababab", in_graph) == [-8, -4, -4]
    assert two_heads(kind, 2, "babaabba", in_graph) == [-8, -4, -4]
    assert two_heads(kind, 3, "abb" * 2, in_graph) == [-6, -2, -4]


def test_a_graph_that_cannot_tell_which_sums_there_are_says_so():
    for heads, first in ((2, "aba"), (3, "abcabc")):
        assert two_heads("keras", 3, first, True, heads)[0] == -len(first)
    with pytest.raises(tf.errors.InvalidArgumentError, match="unconnected_gradients"):
        two_heads("keras", 2, "abba" + "ca", True, 3)
    assert two_heads("keras", 2, "abba" + "ca", False, 3) == [-6, -3, -2, -1]
    assert two_heads("keras", 2, "abba" + "ca", True, 3, zeros=True) == [-6, -3, -2, -1]
    with pytest.raises(ConfigError, match="unconnected_gradients"):
        two_heads("keras", 6, "abcde" * 6, True, 5)


@pytest.mark.parametrize("in_graph", [False, True])
def test_a_variable_without_a_gradient_since_the_last_update_is_left_alone(in_graph):
    """Adam would move it by its momentum."""
    optimizer = DistributedOptimizer(keras.optimizers.Adam(0.1), backward_passes_per_step=2)
    a, b = variables = [keras.Variable(np.zeros(2, np.float32), name=name) for name in "ab"]

    def step(with_b):
        optimizer.apply([tf.ones(2), tf.ones(2) if with_b else None], variables)

    step = tf.function(step) if in_graph else step
    moved = []
    for with_b in (True, False, False, False, True, True):
        step(with_b)
        moved.append((float(a[0]), float(b[0])))
    assert moved[1][1] == moved[3][1] != 0 and moved[3][1] != moved[5][1]
    assert len({first for first, _ in moved}) == 4


@pytest.mark.parametrize("in_graph", [False, True])
def test_rows_and_dense_gradients_of_a_variable_are_summed(in_graph):
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
    table = keras.Variable(np.zeros((3, 2), np.float32), name="table")

    def step(rows):
        gradient = tf.IndexedSlices(tf.ones((2, 2)), tf.constant([1, 1]), tf.constant([3, 2]))
        optimizer.apply([gradient if rows else tf.ones((3, 2))], [table])

    step = tf.function(step) if in_graph else step
    sums = []
    for rows in (True, False, False, True, True, True, False, False):
        step(rows)
        sums.append(np.asarray(table)[:, 0].tolist())
    assert sums[1::2] == [[-1, -3, -1], [-2, -6, -2], [-2, -10, -2], [-4, -12, -4]]


def test_sums_of_passes_are_loaded_by_name():
    def made():
        optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=3)
        variables = [keras.Variable(np.zeros(2, np.float32), name=name) for name in ("trunk", "a", "b")]
        return optimizer, variables

    def apply(optimizer, variables, task):
        optimizer.apply([tf.ones(2), *(tf.fill([2], 2.0) if name == task else None for name in "ab")], variables)

    optimizer, variables = made()
    apply(optimizer, variables, "a")
    state = optimizer._grace.accumulator.state_dict()
    assert state["names"] == ["trunk", "a"]
    for saved in (state, {"calls": state["calls"], "sums": state["sums"]}):  # as of former versions
        optimizer, variables = made()
        optimizer._grace.accumulator.load_state_dict(saved)
        assert [*map(len, optimizer._grace.accumulator.state_dict()["sums"])] == [1, 1]
        for task in "ba" if "names" in saved else "ab":
            apply(optimizer, variables, task)
        assert [float(one[0]) for one in variables] == [-3, -4, -2]
    optimizer, variables = made()
    optimizer._grace.accumulator.load_state_dict({**state, "names": ["trunk", "gone"]})
    apply(optimizer, variables, "b")
    with pytest.raises(ConfigError, match="gone"):
        apply(optimizer, variables, "b")


def test_nothing_to_apply():
    for passes in (1, 2):
        optimizer = DistributedOptimizer(tf_keras.optimizers.SGD(), backward_passes_per_step=passes)
        optimizer.apply_gradients([])
        assert optimizer.iterations.numpy() == 0


def test_keras_accumulates_itself():
    ours, theirs = model(keras), model(keras)
    ours.compile(DistributedOptimizer(keras.optimizers.SGD(0.1, gradient_accumulation_steps=4, global_clipnorm=0.5)), "mse")
    theirs.compile(keras.optimizers.SGD(0.1, global_clipnorm=0.5), "mse")
    ours.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
    theirs.fit(X, Y, batch_size=16, shuffle=False, verbose=0)
    for one, other in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    assert int(ours.optimizer.iterations) == 2


def test_a_schedule_goes_on():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    net = model(keras)
    net.compile(DistributedOptimizer(keras.optimizers.SGD(schedule)), "mse")
    net.fit(X, Y, batch_size=8, verbose=0)
    assert float(net.optimizer.learning_rate) == pytest.approx(0.1 / 16)


def test_a_name():
    for kind in ("keras", "tf_keras", "tf_keras-legacy"):
        assert DistributedOptimizer(KINDS[kind][1](), "other").get_config()["name"] == "other"


def test_mixed_precision_wants_the_outer_optimizer():
    with pytest.raises(ConfigError, match=r"DistributedOptimizer\(keras.optimizers.LossScaleOptimizer\(optimizer\)\)"):
        keras.optimizers.LossScaleOptimizer(DistributedOptimizer(keras.optimizers.Adam()))
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        net = model(keras)
        with pytest.raises(ConfigError, match="mixed_float16"):
            net.compile(DistributedOptimizer(keras.optimizers.Adam()), "mse")
        net.compile(DistributedOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())), "mse")
        net.fit(X, Y, verbose=0)
    finally:
        keras.config.set_dtype_policy(before)


@pytest.mark.parametrize("kind", ["tf_keras", "tf_keras-legacy"])
def test_tf_keras_can_scale_around_it_without_passes(kind):
    api, make = KINDS[kind]
    for passes in (1, 2):
        net = model(api)
        inner = DistributedOptimizer(make(), backward_passes_per_step=passes)
        net.compile(api.mixed_precision.LossScaleOptimizer(inner), "mse")
        if passes == 1:
            net.fit(X, Y, verbose=0)
        else:
            with pytest.raises(ConfigError, match=r"DistributedOptimizer\(LossScaleOptimizer\(optimizer\)"):
                net.fit(X, Y, verbose=0)


@pytest.mark.parametrize(
    "options, text",
    [
        ({"op": hvd.Adasum}, "Adasum"),
        ({"device_dense": "/cpu:0"}, "device_dense"),
        ({"device_sparse": "/gpu:0"}, "device_"),
        ({"backward_passes_per_step": 0}, "1 and more"),
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "Average only"),
    ],
)
def test_what_cannot_be_honoured_is_refused(options, text):
    optimizer = keras.optimizers.SGD()
    with pytest.raises(ConfigError, match=text):
        DistributedOptimizer(optimizer, **options)
    assert type(optimizer) is keras.optimizers.SGD


def test_one_rank_captures_nothing_and_says_so(tmp_path):
    with pytest.warns(UserWarning, match="there is one rank"):
        DistributedOptimizer(keras.optimizers.SGD(), capture=tmp_path)


def test_two_ways_to_accumulate_are_refused():
    for make in (lambda inner: inner, keras.optimizers.LossScaleOptimizer):
        with pytest.raises(ConfigError, match="give one of them"):
            DistributedOptimizer(make(keras.optimizers.SGD(gradient_accumulation_steps=2)), backward_passes_per_step=2)


@pytest.mark.parametrize("given", ["adam", None, keras.optimizers.SGD])
def test_what_is_no_optimizer_is_refused(given):
    with pytest.raises(ConfigError, match="an optimizer of keras or tf_keras is expected"):
        DistributedOptimizer(given)


def test_another_backend_is_refused():
    pytest.importorskip("torch")
    script = (
        "import keras, horovod.tensorflow as hvd\nhvd.init()\n"
        "from grace_ext.adapters.horovod_tensorflow import DistributedOptimizer\n"
        "DistributedOptimizer(keras.optimizers.SGD())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "KERAS_BACKEND": "torch"},
    )
    assert "ConfigError: Keras runs on the backend 'torch'" in done.stderr, done.stderr[-2000:]
