"""How many CPUs this process may really use."""

from __future__ import annotations

import math
import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def usable_cpus(cgroup: Path = CGROUP) -> int:
    """The smaller of the affinity mask and the cgroup's CPU quota (rounded up), at least 1.

    OpenMP counts the mask but knows no quota: in a container with 2 of 64 CPUs it would start 64 threads that wait
    for each other.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(cgroup)
    return max(1, allowed if quota is None else min(allowed, math.ceil(quota)))


def _quota(cgroup: Path) -> float | None:
    """CPUs per the quota of cgroup v2, else v1; None: unlimited or not readable."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        limit = int((cgroup / "cpu" / "cpu.cfs_quota_us").read_text())
        return limit / int((cgroup / "cpu" / "cpu.cfs_period_us").read_text()) if limit > 0 else None
    except (OSError, ValueError):
        return None
