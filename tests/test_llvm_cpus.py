"""How many threads a team has by default: CPU masks, quotas and other ranks."""

import os

import pytest

from backends.llvm.cpus import available_cpus, cgroup_quota, default_threads
from backends.llvm.team import Team


def test_default_team_is_shared_between_ranks(compiler):
    assert default_threads(1) == available_cpus()
    assert default_threads(2) == max(1, available_cpus() // 2)
    assert default_threads(1000) == 1
    assert Team(compiler, ranks_on_host=1000).threads == 1


def quota(tmp_path, membership, limits):
    """cgroup_quota() on a made-up system: the process's groups and the files of limits."""
    (tmp_path / "membership").write_text(membership)
    for name, text in limits.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return cgroup_quota(tmp_path / "cgroup", tmp_path / "membership")


@pytest.mark.parametrize(
    "membership, limits, expected",
    [
        ("0::/\n", {}, None),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n"}, None),
        ("0::/a/b\n", {"a/b/cpu.max": "200000 100000\n"}, 2.0),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", {"a/b/cpu.max": "50000 100000\n", "a/cpu.max": "800000 100000\n"}, 0.5),
        ("0::/not/visible/here\n", {"cpu.max": "300000 100000\n"}, 3.0),
        (
            "4:memory:/m\n3:cpu,cpuacct:/c\n",
            {
                "cpu,cpuacct/c/cpu.cfs_quota_us": "200000\n",
                "cpu,cpuacct/c/cpu.cfs_period_us": "100000\n",
            },
            2.0,
        ),
        (
            "1:cpu:/c\n0::/\n",
            {"cpu/c/cpu.cfs_quota_us": "-1\n", "cpu/c/cpu.cfs_period_us": "100000\n"},
            None,
        ),
    ],
)
def test_cgroup_quota(tmp_path, membership, limits, expected):
    assert quota(tmp_path, membership, limits) == expected


@pytest.mark.parametrize("limit, expected", [(None, 8), (2.0, 2), (2.9, 2), (0.5, 1), (64.0, 8)])
def test_quota_limits_the_cpus(monkeypatch, limit, expected):
    monkeypatch.setattr("backends.llvm.cpus.cgroup_quota", lambda: limit)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert available_cpus() == expected
