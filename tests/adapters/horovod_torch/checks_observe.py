"""What is checked inside the ranks of one job: observers."""

import json
import os
import shutil
import tempfile
import warnings
from pathlib import Path

import horovod.torch as hvd
import torch
from harness import compressed, same_on_all_ranks, train
from support.checking import check, raises

from grace_ext import ConfigError
from grace_ext.observe import JsonlWriter, advice


def shared_folder() -> Path:
    """A folder that all ranks know; all are on this machine."""
    return Path(hvd.broadcast_object(tempfile.mkdtemp(prefix="grace_ext") if hvd.rank() == 0 else None, name="folder"))


def remove(folder: Path) -> None:
    hvd.allreduce(torch.zeros(1), name="remove")  # nobody needs it any more
    if hvd.rank() == 0:
        shutil.rmtree(folder)


@check
def observers_write_and_change_nothing():
    folder = shared_folder()
    plainly, *_ = train(compressed(), steps=4)
    for selection in ("host", "device"):
        observe = [JsonlWriter(folder / selection / "all.{rank}.jsonl", every=2), str(folder / selection / "one.csv")]
        weights, optimizer, _ = train(compressed(selection=selection, observe=observe), steps=4)
        assert torch.equal(weights, plainly)
        same_on_all_ranks(weights)
        stats = optimizer.compression_stats()
        records = [json.loads(line) for line in open(folder / selection / f"all.{hvd.rank()}.jsonl")]
        assert [record["step"] for record in records] == [0, 2], records
        assert records[1]["residual_norm_ratio"] == stats["residual_norm_ratio"]
        assert {"0.weight", "5.weight"} & stats["residual_norm_ratio"].keys(), stats
        assert all(0 < ratio < 10 for ratio in stats["residual_norm_ratio"].values())
    hvd.allreduce(torch.zeros(1), name="written")
    assert sorted(path.name for path in (folder / "host").iterdir()) == [
        *(f"all.{rank}.jsonl" for rank in range(hvd.size())),
        "one.csv",
    ]
    with raises(ConfigError, "a path, an observer"):
        train(compressed(observe=7), steps=1)
    remove(folder)


@check
def the_link_is_probed_once_and_the_warning_comes_on_rank_0():
    advice._given.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        weights, optimizer, _ = train(compressed(), steps=22)
    same_on_all_ranks(weights)
    texts = [str(one.message) for one in caught if "GRACE_EXT_WARN" in str(one.message)]
    assert hvd.rank() == 0 or not texts, texts  # whether this machine's loopback is fast enough to be warned of is open
    assert len(texts) <= 1, texts
    os.environ["GRACE_EXT_WARN"] = "0"
    try:
        silent, *_ = train(compressed(), steps=22)
    finally:
        del os.environ["GRACE_EXT_WARN"]
    assert torch.equal(silent, weights)
