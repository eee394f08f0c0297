"""The TensorFlow examples' models, data and tables, without starting ranks."""

import sys
from pathlib import Path

import numpy as np
import pytest

from grace_ext.policy import DEFAULT_ROWS_SPEC, DEFAULT_SPEC

tf = pytest.importorskip("tensorflow")
pytest.importorskip("horovod.tensorflow")
pytest.importorskip("tqdm")

pytestmark = pytest.mark.tier("test")
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def scripts():
    """The modules tensorflow_tape_text, tensorflow_keras_fashion_mnist and compare_tensorflow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))
        import compare_tensorflow
        import horovod.tensorflow as hvd
        import tensorflow_keras_fashion_mnist
        import tensorflow_tape_text

        hvd.init()
        yield tensorflow_tape_text, tensorflow_keras_fashion_mnist, compare_tensorflow
        for name in (
            "_comparison",
            "_launch",
            "compare_tensorflow",
            "tensorflow_keras_fashion_mnist",
            "tensorflow_tape_text",
        ):
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def model(scripts):
    return scripts[0].Model()


def test_the_text_is_pythons_and_tensorflows_own(scripts):
    text, _, _ = scripts
    words = text.read_words()
    counts = np.bincount(words, minlength=text.ROWS)
    assert words.dtype == np.int64 and len(words) > 1_000_000 and len(counts) == text.ROWS
    assert (np.diff(counts[:-1]) <= 0).all() and np.count_nonzero(counts) > 20_000
    np.testing.assert_array_equal(words, text.read_words())


def test_gradients_of_the_tables_are_the_rows_that_horovod_would_gather(scripts, model):
    text, _, _ = scripts
    words = tf.random.uniform([3, 9], maxval=text.ROWS, dtype=tf.int64)
    with tf.GradientTape() as tape:
        loss = model.sampled_loss(words)
    gradients = tape.gradient(loss, model.variables)
    tables, dense = gradients[:3], gradients[3:]
    assert all(isinstance(gradient, tf.IndexedSlices) and gradient.indices.dtype == tf.int64 for gradient in tables)
    rows, of_dense = text.horovod_bytes(model, 3 * 8)
    assert rows == sum(4 * int(tf.size(gradient.values)) + 8 * int(tf.size(gradient.indices)) for gradient in tables)
    assert of_dense == sum(4 * int(tf.size(gradient)) for gradient in dense)


def test_a_state_sees_no_word_after_it(scripts, model):
    text, _, _ = scripts
    words = tf.random.uniform([1, 21], maxval=text.ROWS, dtype=tf.int64)
    changed = tf.tensor_scatter_nd_update(words, [[0, 18]], [(words[0, 18] + 1) % text.ROWS])
    difference = tf.reduce_max(abs(model.states(words)[0] - model.states(changed)[0]), axis=1).numpy()
    assert difference[:18].max() == 0 < difference[18:].min()


def test_rows_that_come_twice_are_summed(scripts):
    text, _, _ = scripts
    twice = tf.IndexedSlices(tf.constant([[1.0, 2], [3, 4], [5, 6]]), tf.constant([7, 2, 7]), tf.constant([9, 2]))
    once = text.rows_once(twice)
    assert sorted(once.indices.numpy()) == [2, 7]
    np.testing.assert_array_equal(tf.convert_to_tensor(once), tf.convert_to_tensor(twice))
    dense = tf.zeros(3)
    assert text.rows_once(dense) is dense


def test_the_model_of_the_keras_example(scripts):
    _, fashion, _ = scripts
    model = fashion.make_model()
    assert 1.1e6 < model.count_params() < 1.3e6
    assert model(np.zeros((2, 28, 28, 1), np.uint8)).shape == (2, 10)


@pytest.fixture
def launched(scripts, monkeypatch):
    """Stands for horovodrun: runs that end at once and leave the logs that the examples write."""
    text, fashion, compare = scripts
    calls = []

    def train(label, options, log_file, ranks, timeout, example):
        calls.append((Path(example).name, options[options.index("--compression") + 1]))
        score = {"accuracy": 0.9} if example == compare.FASHION else {"perplexity": 100.0, "horovod_bytes_of_rows": 4000}
        sent = {"none": 4000, "horovod": 4000}.get(calls[-1][1], 100)
        return compare.Run(label, [{**score, "steps": 2, "bytes_sent": sent, "seconds_per_step": 0.02}])

    monkeypatch.setattr(compare, "train", train)
    return compare, calls


def test_the_comparison_runs_both_examples_twice_and_writes_the_table(launched, tmp_path, monkeypatch, capsys):
    compare, calls = launched
    readme = tmp_path / "README.md"
    readme.write_text("before\n" + "\nold\n".join(compare.MARKERS) + "\nafter")
    monkeypatch.setattr(sys, "argv", ["x", "--data", "d", "--out", str(tmp_path / "out"), "--readme", str(readme)])
    compare.main()
    assert calls == [
        ("tensorflow_keras_fashion_mnist.py", "none"),
        ("tensorflow_keras_fashion_mnist.py", DEFAULT_SPEC),
        ("tensorflow_tape_text.py", "horovod"),
        ("tensorflow_tape_text.py", DEFAULT_ROWS_SPEC),
    ]
    table = (tmp_path / "out" / "comparison.md").read_text()
    assert "| text, Horovod | perplexity 100.0 | 20.0 | 2 kB | 1× |" in table and "`make demo-tensorflow`" in table
    assert f"grace_ext {DEFAULT_SPEC} | 90.00 % accuracy | 20.0 | 50 B | 40× |" in table
    assert (tmp_path / "out" / "tensorflow_bytes.png").stat().st_size > 1000
    before, _, after = readme.read_text().partition(table)
    assert before.startswith("before") and after.endswith("after") and "old" not in before + after
    assert "perplexity 100.0" in capsys.readouterr().out


@pytest.mark.parametrize("options", [["--spec", "topk:"], ["--spec", "nonsense"], ["--readme", __file__]])
def test_the_comparison_refuses_what_cannot_work_before_it_starts(launched, tmp_path, monkeypatch, options):
    compare, calls = launched
    monkeypatch.setattr(sys, "argv", ["x", "--data", "d", "--out", str(tmp_path), *options])
    with pytest.raises(SystemExit):
        compare.main()
    assert calls == []


@pytest.fixture
def benchmarks(scripts, monkeypatch):
    """benchmarks/embedding.py and benchmarks/accuracy_tensorflow.py."""
    for folder in ("benchmarks", "examples"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    import accuracy_tensorflow
    import embedding

    yield embedding, accuracy_tensorflow
    for name in ("accuracy", "accuracy_tensorflow", "embedding"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("perplexity", "sent", "checksums", "met"),
    [(100.9, 6.6e3, [1, 1], True), (101.1, 6.6e3, [1, 1], False), (90, 6.7e3, [1, 1], False), (90, 6.6e3, [1, 2], False)],
)
def test_the_bars_of_the_embedding_benchmark(benchmarks, scripts, perplexity, sent, checksums, met):
    embedding, _ = benchmarks

    def run(perplexity, sent, checksums):
        return scripts[2].Run(
            "",
            [
                {
                    "perplexity": perplexity,
                    "bytes_sent": sent,
                    "horovod_bytes_of_rows": 1e5,
                    "steps": 1,
                    "checksums": checksums,
                }
            ],
        )

    assert embedding.is_met([run(100, 2e5, [3, 3])], [run(perplexity, sent, checksums)]) == met


@pytest.mark.parametrize(
    ("accuracy", "checksums", "met"), [(0.8951, [1, 1], True), (0.8949, [1, 1], False), (0.95, [1, 2], False)]
)
def test_the_bars_of_the_accuracy_benchmark(benchmarks, scripts, accuracy, checksums, met):
    _, benchmark = benchmarks
    plain, compressed = (
        scripts[2].Run("", [{"accuracy": value, "checksums": sums}])
        for value, sums in ((0.9, [3, 3]), (accuracy, checksums))
    )
    assert benchmark.is_met([plain], [compressed]) == met
