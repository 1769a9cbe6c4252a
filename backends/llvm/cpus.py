"""How many threads this process may really run at once: the CPU mask and the container's quota."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def default_threads(ranks_on_host: int = 1) -> int:
    """The team size when nobody asked for one: an equal share of the CPUs for every rank that runs
    on this host, at least 1."""
    return max(1, available_cpus() // ranks_on_host)


def available_cpus() -> int:
    """CPUs in this process's affinity mask, or fewer where a cgroup's quota grants less time than
    that (rounded down, at least 1)."""
    try:
        cpus = len(os.sched_getaffinity(0))
    except AttributeError:  # no masks on this system
        cpus = os.cpu_count() or 1
    quota = cgroup_quota()
    return cpus if quota is None else max(1, min(cpus, int(quota)))


def cgroup_quota(root: Path = _CGROUP_ROOT, membership: Path = _MEMBERSHIP) -> float | None:
    """CPUs' worth of time that the tightest cgroup (v1 or v2) around this process grants, or None.

    `root` is where cgroups are mounted, `membership` the file that names this process's groups.
    """
    quotas = []
    for line in _read(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # the v2 hierarchy, alone or beside v1 ones
            mounts, read_quota = (root, root / "unified"), _quota_v2
        elif "cpu" in controllers.split(","):
            mounts, read_quota = (root / controllers, root / "cpu"), _quota_v1
        else:
            continue
        # A limit on any enclosing group holds too. Inside a container the path may be the host's,
        # which is not visible here; the walk up then ends at the container's own group.
        group = Path(path.lstrip("/"))
        quotas += [read_quota(m / g) for m in mounts for g in (group, *group.parents)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota_v2(group: Path) -> float | None:
    limit, _, period = _read(group / "cpu.max").partition(" ")
    return None if limit in ("", "max") else int(limit) / int(period)


def _quota_v1(group: Path) -> float | None:
    limit, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
    return None if limit == "" or int(limit) < 0 else int(limit) / int(period)


def _read(path: Path) -> str:
    """A small file's text, "" when it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
