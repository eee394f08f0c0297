"""How many cores a process may use, with control groups in a folder."""

import math
import os

import pytest

from grace_ext._util.cores import available_cores, host_cores, quota


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def test_a_rank_that_is_bound_to_a_core_leaves_the_others_theirs():
    before, bound = host_cores(), os.sched_getaffinity(0)
    assert 0 < available_cores() <= min(before, len(bound))
    try:
        os.sched_setaffinity(0, {min(bound)})
        assert available_cores() <= 1 and host_cores() == before
    finally:
        os.sched_setaffinity(0, bound)


def test_version_2_takes_the_smallest_quota_on_the_way_to_the_root(tmp_path):
    write(tmp_path / "pod" / "worker", cpu__max="max 100000")
    assert quota("0::/pod/worker\n", tmp_path) == math.inf
    write(tmp_path / "pod", cpu__max="150000 100000")
    assert quota("0::/pod/worker\n", tmp_path) == 1.5
    write(tmp_path / "pod" / "worker", cpu__max="50000 100000")
    assert quota("0::/pod/worker\n", tmp_path) == 0.5


def test_version_1(tmp_path):
    write(tmp_path / "cpu" / "docker" / "a", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    groups = "12:cpu,cpuacct:/docker/a\n3:cpuset:/docker/b\n0::/\n"
    assert quota(groups, tmp_path) == math.inf
    write(tmp_path / "cpu" / "docker" / "a", cpu__cfs_quota_us=250000, cpu__cfs_period_us=100000)
    assert quota(groups, tmp_path) == 2.5


def test_a_container_sees_its_own_group_at_the_root(tmp_path):
    write(tmp_path, cpu__max="200000 100000")
    write(tmp_path / "cpu", cpu__cfs_quota_us=300000, cpu__cfs_period_us=100000)
    assert quota("0::/docker/outside\n", tmp_path) == 2
    assert quota("5:cpu:/docker/outside\n", tmp_path) == 3


@pytest.mark.parametrize("groups", ["", "0::/../other\n", "7:pids:/pod\n"])
def test_what_says_nothing(tmp_path, groups):
    write(tmp_path / "other", cpu__max="10000 100000")
    assert quota(groups, tmp_path / "root") == math.inf


def test_what_cannot_be_read_is_no_quota(tmp_path):
    write(tmp_path, cpu__max="some of it")
    assert quota("0::/\n", tmp_path) == math.inf
