"""The cores that a process may use: fake /proc and /sys, and this process's own affinity."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dflash_mp.control_groups import usable_cores

OWN = "proc/self/cgroup"


@pytest.fixture(autouse=True)
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))


def with_files(root: Path, **files: str) -> int:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n", encoding="ascii")
    return usable_cores(root)


def test_without_quotas_all_cores_of_the_affinity_may_be_used(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == 64
    assert with_files(tmp_path, **{OWN: "0::/", "sys/fs/cgroup/cpu.max": "max 100000"}) == 64
    assert with_files(tmp_path, **{"sys/fs/cgroup/cpu.max": "damaged"}) == 64


@pytest.mark.parametrize(
    ("cpu_max", "cores"), [("800000 100000", 8), ("350000 100000", 3), ("50000 100000", 1), ("9900000 100000", 64)]
)
def test_a_containers_quota_counts_whole_cores(tmp_path: Path, cpu_max: str, cores: int) -> None:
    assert with_files(tmp_path, **{OWN: "0::/", "sys/fs/cgroup/cpu.max": cpu_max}) == cores


def test_the_least_quota_of_the_groups_above_counts(tmp_path: Path) -> None:
    own, above = "sys/fs/cgroup/job/one/cpu.max", "sys/fs/cgroup/job/cpu.max"
    assert with_files(tmp_path, **{OWN: "0::/job/one", own: "1600000 100000", above: "400000 100000"}) == 4


def test_quotas_of_version_1_count_too(tmp_path: Path) -> None:
    quota, period = (f"sys/fs/cgroup/cpu/job/cpu.cfs_{name}_us" for name in ("quota", "period"))
    assert with_files(tmp_path, **{OWN: "3:cpu,cpuacct:/job\n2:memory:/", quota: "-1", period: "100000"}) == 64
    assert with_files(tmp_path, **{quota: "600000"}) == 6


def test_this_process_has_no_more_than_its_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5})
    assert usable_cores() == 1
