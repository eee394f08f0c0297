"""What the benchmarks on hosts make of their measurements."""

import ast
import json
import sys
from pathlib import Path

import numpy as np
import pytest

import grace_ext
from grace_ext import registry

pytestmark = pytest.mark.tier("test")

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from _accuracy_map import file_name, specs  # noqa: E402
from _cluster_page import measured, summary  # noqa: E402
from _cluster_results import POINTS, SIDE_BY_SIDE, WITH_HOROVOD, Results, against_best, path_of  # noqa: E402
from _page import write_section  # noqa: E402
from _transformer_page import section  # noqa: E402
from _transformer_results import DENSE, difference, read, steps_to  # noqa: E402
from _transformer_results import path_of as transformer_path  # noqa: E402
from _transformer_tasks import TASKS, learning_rate  # noqa: E402

CURVE = [[10, 2.0, 0.5], [20, 4.0, 0.7], [30, 6.0, 0.8]]  # step, seconds, accuracy


def put(folder, rate, config, step, curve=(), **more):
    run = {
        "laps": [step],
        "curve": list(curve),
        "compute": 0.01,
        "stages": {"select": 0.002, "exchange": 0.5},
        "core": 0.02,
        "sent": 1e6,
        "date": "2026-01-01",
        "options": {"hosts": 4, "launcher": "mpirun"},
        **more,
    }
    Path(path_of(str(folder), "mlp", rate, config)).write_text(json.dumps(run))


@pytest.fixture
def results(tmp_path):
    put(tmp_path, "none", "horovod-fp16", 0.2, CURVE)
    put(tmp_path, "100mbit", "horovod-fp16", 1.5)
    put(tmp_path, "none", "sharded", 0.1, [[10, 1.0, 0.4], [20, 2.0, 0.6], [30, 3.0, 0.81]])
    put(tmp_path, "100mbit", "sharded", 0.11, [[10, 1.1, 0.4], [20, 2.2, 0.6], [30, 3.3, 0.81]])
    put(tmp_path, "100mbit", "ddp-fp16", 1.6)
    put(tmp_path, "none", "auto", 0.1)
    for comparison, instances in {
        SIDE_BY_SIDE: {"sharded": [0.1, 0.12], "auto": [0.11, 0.132]},
        WITH_HOROVOD: {"horovod-fp16": [0.2, 0.2], "sharded": [0.1, 0.12], "auto": [0.09, 0.11]},
    }.items():
        Path(path_of(str(tmp_path), "mlp", "none", comparison)).write_text(
            json.dumps({"instances": instances, "date": "2026-01-02"})
        )
    return Results(str(tmp_path))


def test_a_run_that_was_cut_takes_the_accuracies_of_unlimited_links_at_its_own_pace(results):
    assert results.is_cut("mlp", "100mbit", "horovod-fp16") and not results.is_cut("mlp", "100mbit", "sharded")
    assert results.curve("mlp", "100mbit", "horovod-fp16") == [(15.0, 0.5), (30.0, 0.7), (45.0, 0.8)]
    assert results.curve("mlp", "100mbit", "sharded")[0] == (1.1, 0.4)
    assert results.curve("mlp", "100mbit", "ddp-fp16") == []


def test_the_target_is_reached_between_two_evaluations(results):
    assert results.target("mlp") == pytest.approx(0.8 - POINTS)
    assert results.seconds_to("mlp", "none", "horovod-fp16") == pytest.approx(4 + 2 * 0.095 / 0.1)
    assert results.seconds_to("mlp", "100mbit", "horovod-fp16") == pytest.approx(30 + 15 * 0.95)
    assert results.seconds_to("mlp", "100mbit", "ddp-fp16") is None


def test_bars_compare_with_the_baseline_and_auto_with_the_best_side_by_side(results):
    verdicts = {what: (most, measured) for what, _, most, measured in results.verdicts()}
    most, measured = verdicts["MLP, 100 Mbit/s: seconds per step"]
    assert most == pytest.approx(1 / 15) and measured == {"sharded": pytest.approx(0.11 / 1.5)}
    _, measured = verdicts["MLP, 100 Mbit/s: time to the same accuracy"]
    assert measured["sharded"] == pytest.approx((2.2 + 1.1 * (0.195 / 0.21)) / 44.25)
    bars = [(against, measured["auto"]) for what, against, _, measured in results.verdicts() if "unlimited" in what]
    assert bars == [("Horovod's best", pytest.approx(0.5)), ("best fixed choice", pytest.approx(1.1))]


def test_bars_over_ddp_compare_with_ddps_hooks_and_with_the_same_over_horovod(results, tmp_path):
    put(tmp_path, "100mbit", "ddp-auto", 0.1)
    put(tmp_path, "100mbit", "auto", 0.2)
    put(tmp_path, "none", "ddp-auto", 0.3)
    put(tmp_path, "none", "ddp-powersgd", 0.2)
    put(tmp_path, "none", "ddp-allgather", 0.25)
    found = {
        (what, against): (most, measured) for what, against, most, measured in Results(str(tmp_path)).verdicts_over_ddp()
    }
    slow, free = (f"MLP, {rate}: seconds per step" for rate in ("100 Mbit/s", "unlimited"))
    assert found == {
        (slow, "DDP, fp16"): (pytest.approx(1 / 12), {"ddp-auto": pytest.approx(0.1 / 1.6)}),
        (slow, "the same over Horovod"): (1.0, {"ddp-auto": pytest.approx(0.5)}),
        (free, "the fastest over DDP"): (1.05, {"ddp-auto": pytest.approx(1.5)}),
        (free, "the same over Horovod"): (1.0, {"ddp-auto": pytest.approx(3.0)}),
    }


def test_the_page_says_which_machine_measured_which_model(tmp_path):
    put(tmp_path, "none", "auto", 0.1, machine="one machine")
    assert measured(Results(str(tmp_path))) == "Measured on 2026-01-01 on one machine"
    path = Path(path_of(str(tmp_path), "mlp", "none", "auto"))
    path.rename(path_of(str(tmp_path), "cnn", "none", "auto"))
    put(tmp_path, "none", "auto", 0.1, machine="another machine")
    put(tmp_path, "1gbit", "auto", 0.1, machine="another machine", date="2026-01-03")
    assert measured(Results(str(tmp_path))) == (
        "Measured MLP on 2026-01-01 to 2026-01-03 on another machine; CNN on 2026-01-01 on one machine"
    )


def test_the_readme_compares_with_the_faster_of_horovods_own(results, tmp_path):
    put(tmp_path, "100mbit", "horovod-fp32", 1.4)
    put(tmp_path, "100mbit", "allgather", 0.1, CURVE)
    rows = [line for line in summary(Results(str(tmp_path))).splitlines() if line.startswith("| MLP")]
    assert len(rows) == 1 and "| 100 Mbit/s | 1,400 † (fp32) |  | 100 | " in rows[0]
    assert rows[0].endswith("| 6 |")


def test_the_best_of_equals_is_not_the_smallest_of_its_measurements():
    random = np.random.default_rng(0)
    own, *others = random.normal(1.0, 0.05, (5, 3, 4000))
    fixed = {str(number): one for number, one in enumerate(others)}
    ratios = [
        against_best(own[:, i].tolist(), {name: one[:, i].tolist() for name, one in fixed.items()}) for i in range(4000)
    ]
    assert np.mean(ratios) == pytest.approx(1.0, abs=0.003)
    assert against_best([1.0, 1.1], {"slow": [3.0, 3.0], "fast": [0.5, 0.55]}) == pytest.approx(2.0)


def test_codec_time_leaves_the_waiting_out(results):
    assert results.codec("mlp", "none", "sharded") == pytest.approx(0.002)


def test_a_section_is_replaced_and_the_others_stay(tmp_path):
    write_section(str(tmp_path), "one", "First", "old\n")
    write_section(str(tmp_path), "two", "Second", "kept\n")
    path = Path(write_section(str(tmp_path), "one", "First", "new\n"))
    text = path.read_text()
    assert text.startswith("# Benchmarks\n") and "old" not in text
    assert text.index("## First") < text.index("new") < text.index("## Second") < text.index("kept")
    assert text.count("one:begin") == text.count("two:end") == 1


@pytest.fixture
def transformers(tmp_path):
    for method, losses, sent in ((DENSE, {0: 4.0, 1: 4.2}, 4e6), ("new", {0: 4.04, 1: 4.16, 2: 9.0}, 2e4)):
        for seed, loss in losses.items():
            curve = [{"step": 5, "bytes_sent": 1, "seconds": 1, "loss": 7, "accuracy": 0}]
            curve += [{"step": 10, "bytes_sent": sent, "seconds": 0.5, "loss": loss, "accuracy": loss / 10}]
            run = {"label": method, "steps": 10, "parameters": 100_000, "curve": curve}
            Path(transformer_path("gpt", method, seed, str(tmp_path))).write_text(json.dumps(run))
    return read("gpt", str(tmp_path))


def test_transformers_are_compared_over_the_seeds_that_both_have(transformers):
    dense, new = transformers[DENSE], transformers["new"]
    assert difference(new, dense, "loss") == pytest.approx(0) and difference(new, dense, "accuracy") == pytest.approx(0)
    del new.runs[1]
    assert difference(new, dense, "loss") == pytest.approx(1.0)
    assert difference(new, dense, "accuracy") == pytest.approx(-0.4)
    assert (dense.fewer_bytes, new.fewer_bytes) == (pytest.approx(1), pytest.approx(200))
    assert new.ms_per_step == pytest.approx(50)


def test_muon_and_adamw_share_a_models_parameters():
    task = TASKS["gpt-muon"]
    model = task.model()
    muon, adamw = task.optimizers(model, task.lr / 2, task.betas)
    found = [[p for group in one.param_groups for p in group["params"]] for one in (muon, adamw)]
    assert sorted(map(id, found[0] + found[1])) == sorted(map(id, model.parameters()))
    assert [name for name, p in model.named_parameters() if any(p is one for one in found[0])] == [
        f"blocks.{i}.{layer}.weight" for i in range(4) for layer in ("qkv", "out", "up", "down")
    ]
    assert muon.param_groups[0]["lr"] == task.muon_lr / 2, "it follows the other rate"
    assert len(TASKS["gpt"].optimizers(model, 1e-3, task.betas)) == 1


def test_the_table_of_transformers_begins_with_what_is_not_compressed(transformers):
    lines = section(TASKS["gpt"], transformers).splitlines()
    assert lines[2] == "10 steps." and lines[6].startswith(f"| {DENSE} | 4.100 | 2 | 4.000 … 4.200 |  | 1×")
    assert lines[7].startswith("| new | 5.733 | 3 | 4.040 … 9.000 | +0.00 | 200×")


def test_the_accuracy_map_has_every_part_and_valid_specs():
    for label, spec in specs().items():
        assert grace_ext.compressor(spec) and "_" not in file_name(label)
    assert len({file_name(label) for label in specs()}) == len(specs())
    used = " ".join(specs().values())
    for kind in ("value", "sparsifier"):
        missing = [name for name in registry.names(kind) if name not in used and name not in ("nonzero",)]
        assert not missing, kind


def test_the_target_of_the_map_is_reached_between_two_evaluations():
    run = {"curve": [{"step": 10, "accuracy": 0.8}, {"step": 20, "accuracy": 0.9}, {"step": 30, "accuracy": 0.88}]}
    assert steps_to(run, 0.85) == pytest.approx(15) and steps_to(run, 0.4) == pytest.approx(5)
    assert steps_to(run, 0.91) is None


@pytest.mark.parametrize("file", sorted(ROOT.glob("benchmarks/*.py")), ids=lambda path: path.name)
def test_what_a_benchmark_imports_from_grace_ext_is_there(file):
    """Their workers run on hosts and for hours, so that hardly a test starts them."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "grace_ext":
            exec(ast.unparse(node), {})


def test_the_learning_rate_rises_and_falls_to_a_tenth():
    rates = [learning_rate(step, 300) for step in range(300)]
    assert rates[0] == pytest.approx(0.1) and max(rates) == 1 and rates[9] == 1
    assert rates[10:] == sorted(rates[10:], reverse=True) and rates[-1] == pytest.approx(0.1, abs=1e-3)


def test_the_page_of_the_recommendation_model_has_hit_rates_volumes_and_times(tmp_path):
    import argparse

    import ncf

    described = {"steps": 10, "batch": 100, "parameters": 1000, "density": 0.5, "date": "2026-01-01", "machine": "here"}
    for label, hits, sent, milliseconds in (
        ("Horovod float32", (0.5, 0.6), 40_000, 90.0),
        ("SKCompress", (0.4,), 10_000, 30.0),
    ):
        for seed, hit in enumerate(hits):
            found = {**described, "label": label, "seed": seed, "hit_rate": hit, "bytes_sent": sent, "ms_per_step": 1.0}
            Path(ncf.path_of(label, f"seed{seed}", str(tmp_path))).write_text(json.dumps(found))
        found = {**described, "label": label, "ms_per_step": milliseconds, "ms_codecs": 4.0}
        Path(ncf.path_of(label, "100mbit", str(tmp_path))).write_text(json.dumps(found))
    ncf.page(argparse.Namespace(results=str(tmp_path), out=str(tmp_path)))
    text = (tmp_path / "ncf.md").read_text()
    assert "50 % of the elements of a gradient are not zero" in text
    assert "| Horovod float32 | 0.5500 | 2 | 0.5000 … 0.6000 |  | 1.0000 | 4,000 |" in text
    assert "| SKCompress | 0.4000 | 1 | 0.4000 … 0.4000 | -10.0 | 0.2500 | 1,000 |" in text
    assert "| SKCompress | 30.0 | 4.0 | 3.00 |" in text


def local_run(folder, method, which, curve, **more):
    import _local_steps_results

    label, library, arguments = _local_steps_results.methods()[method]
    found = {"label": label, "library": library, "arguments": arguments, "steps": 100, "parameters": 1000, "curve": curve}
    path = _local_steps_results.path_of(str(folder), "gpt", method, which)
    Path(path).write_text(
        json.dumps({**found, "bytes_sent": 4000, "ms_per_step": 20.0, "date": "2026-01-01", "machine": "here", **more})
    )


def test_on_limited_links_steps_with_and_without_an_exchange_take_turns():
    import local_steps
    from _local_steps_results import is_alone, methods

    local = [arguments for _, library, arguments in methods().values() if library == "local"]
    assert any("fragments" in arguments for arguments in local)
    for arguments in local:
        settled, turn = local_steps.lengths_of("local", arguments)
        assert turn % arguments["steps"] == 0 and turn >= 60  # whole rounds
        # What is exchanged last has been applied, and the first fragment's next turn is yet to come.
        after = settled % arguments["steps"]
        assert arguments.get("delay", 0) <= after < arguments["steps"] / arguments.get("fragments", 1)
        options = {"settled": settled, "turn": turn}
        alone = [is_alone(step, options) for step in range(1, settled + 4 * turn + 1)]
        assert alone == (settled + turn) * [False] + turn * [True] + turn * [False] + turn * [True]
    assert local_steps.lengths_of("horovod", {}) == (0, 0) and not is_alone(100, {"settled": 0})


def test_the_page_of_local_steps_has_loss_bytes_and_seconds(tmp_path):
    import argparse

    import local_steps

    dense = [{"step": 50, "loss": 6.0, "bytes_sent": 200_000}, {"step": 100, "loss": 5.0, "bytes_sent": 400_000}]
    folder = tmp_path / "transformers"
    folder.mkdir()
    described = {"label": "Horovod float32", "steps": 100, "parameters": 1000}
    (folder / "gpt_horovod-fp32_0.json").write_text(json.dumps({**described, "curve": dense}))
    local_run(tmp_path, "horovod-fp32", "100mbit-20ms", [], ms_per_step=500.0)
    faster = [{"step": 50, "loss": 6.0, "bytes_sent": 2000}, {"step": 100, "loss": 4.0, "bytes_sent": 4000, "rounds": 7}]
    local_run(tmp_path, "sparseloco-15", "seed0", faster)
    local_run(tmp_path, "fedavg-15", "seed0", [{"step": 100, "loss": 3.2, "bytes_sent": 28_000, "rounds": 7}])
    local_run(tmp_path, "fedavg-15", "seed1", [{"step": 100, "loss": 9.0, "bytes_sent": 28_000, "rounds": 7}])
    local_run(tmp_path, "adam-5", "seed0", [{"step": 100, "loss": 5.05, "bytes_sent": 300, "rounds": 21}])
    local_run(tmp_path, "sparseloco-15", "100mbit-20ms", [], ms_per_step=20.0)
    local_run(tmp_path, "sparseloco-15", "1gbit-0ms", [], ms_per_step=10.0)
    local_run(tmp_path, "diloco-5", "seed0", [{"step": 100, "loss": 5.5, "bytes_sent": 4000, "rounds": 20}])
    local_run(tmp_path, "streaming-5", "seed0", [{"step": 100, "loss": 5.5, "bytes_sent": 8000, "rounds": 40}])
    for method, milliseconds in (
        ("horovod-fp16", 3000.0),
        ("default", 40.0),
        ("alone", 5.0),
        ("adam-5", 5.5),
        ("streaming-5", 5.5),
        ("default-ddp", 45.0),
    ):
        local_run(tmp_path, method, "10mbit-20ms", [], ms_per_step=milliseconds)
        local_run(tmp_path, method, "100mbit-0ms", [], ms_per_step=milliseconds / 2, alone_ms_per_step=2.5)
    for method in ("horovod-fp16", "default"):
        (folder / f"gpt_{method}_0.json").write_text(json.dumps({**described, "curve": dense}))
    local_run(tmp_path, "adam-5-longer", "seed0", [{"step": 110, "loss": 5.0, "bytes_sent": 300, "rounds": 22}])
    (tmp_path / "local-steps.md").write_text("# Local steps\n\nby hand\n")
    given = argparse.Namespace(results=str(tmp_path), out=str(tmp_path), transformers=str(folder))
    local_steps.page(given)
    text = (tmp_path / "local-steps.md").read_text()
    assert text.startswith("# Local steps\n\nby hand\n")
    assert "| Horovod float32, each step | 5.0000 | 1 | +0.00 | 1.0 | 1.0 | 100 |" in text
    assert "| SparseLoCo, H = 15 | 4.0000 | 1 | -20.00 | 100.0 | 7.0 | 75 |" in text
    assert "| DiLoCo, H = 5 | 5.5000 | 1 | +10.00 | 100.0 | 20.0 | not reached |" in text
    assert "| SparseLoCo, streaming, H = 5, delay 1 | 5.5000 | 1 | +10.00 | 50.0 | 10.0 | not reached |" in text
    assert (
        "| SparseLoCo, H = 15: loss, divided by that of plain averaging, H = 15 | at most 1 | 1.2500, **missed** | 1 |"
        in text
    )
    assert (
        "LocalAdamW, H = 5: loss, divided by that of Horovod float32, each step | at most 1.015 | 1.0100, met | 1 |" in text
    )
    assert "| SparseLoCo, H = 15: times fewer bytes in an exchange | at least 215 | 7.0, **missed** | 1 |" in text
    assert "| SparseLoCo, LocalAdamW, H = 5: times fewer bytes in an exchange | at least 215 | 266.7, met | 1 |" in text
    assert "| method | 10mbit-20ms | 100mbit-0ms | 100mbit-20ms | 1gbit-0ms |" in text
    assert "| Horovod float32, each step |  |  | 500.0 / 50 |  |" in text
    assert "| SparseLoCo, H = 15 |  |  | 20.0 / 2 | 10.0 / 1 |" in text
    assert (
        "| SparseLoCo, streaming, H = 5, delay 1: step at 100mbit-0ms, divided by one without an exchange"
        " | at most 1.05 | 1.100, **missed** | 1 |" in text
    )
    longer = "SparseLoCo, LocalAdamW, H = 5, 1.1 times the steps"
    assert f"| 10mbit-20ms | 88 | {longer} | 1 | 1 | 0.15 | at most 0.33: met | 495.9, at least 50: met |" in text
    assert f"| 100mbit-0ms | 88 | {longer} | 1 | 0 | 0.15 | at most 0.33: met | 495.9 |" in text
    assert (
        "Local steps measured on 2026-01-01 on here" in text
        and "Steps on limited links measured on 2026-01-01 on here" in text
    )
    assert (tmp_path / "local-steps.png").stat().st_size > 10_000


def test_what_a_worker_has_written_is_a_result_once_it_is_kept(tmp_path):
    import _page

    path = str(tmp_path / "run-0.json")
    Path(_page.part_of(path)).write_text('{"loss": 3.0}')
    assert _page.by_seed(str(tmp_path), "run") == {}
    _page.keep(_page.read_part(path), path)
    assert _page.by_seed(str(tmp_path), "run")[0]["loss"] == 3.0
    assert [one.name for one in tmp_path.iterdir()] == ["run-0.json"]
