"""What a measurement ran on, and how much of the machine others used meanwhile."""

from __future__ import annotations

import os
import platform
import time
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("pagemill", "torch", "transformers", "grpcio", "pyzmq", "protobuf", "tokenizers")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def describe() -> dict[str, Any]:
    """Hardware, versions, date; for the JSON result."""
    cpu_lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in cpu_lines if line.startswith("model name")]
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "absent"
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cpu": names[0] if names else platform.machine(),
        "num_cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "versions": versions,
    }


class CpuMeter:
    """CPU time of this process tree, and of all others, since the meter was made."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._busy = _busy_s()
        self._own = _own_s()

    def others_cpus(self) -> float:
        """Mean number of CPUs the others kept busy; above about 0.1 a timing is not to be trusted."""
        others = (_busy_s() - self._busy) - self.own_s()
        return max(0.0, others / max(1e-9, time.monotonic() - self._start))

    def own_s(self) -> float:
        """CPU seconds of this process tree since the meter was made."""
        return _own_s() - self._own


def _busy_s() -> float:
    user, nice, system, _idle, _wait, irq, softirq = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + irq + softirq) / _TICKS_PER_S


def _own_s() -> float:
    """CPU seconds of this process, its living descendants, and those that were waited for."""
    stats: dict[int, tuple[int, float]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            stats[int(entry.name)] = (int(fields[1]), sum(map(int, fields[11:15])) / _TICKS_PER_S)
    total, family = 0.0, {os.getpid()}
    grown = True
    while grown:
        children = {pid for pid, (parent, _) in stats.items() if parent in family} - family
        grown = bool(children)
        family |= children
    for pid in family:
        total += stats.get(pid, (0, 0.0))[1]
    return total
