"""Ties a process to the one that started it. Standard library only.

Also a script: `python -I -S processes.py PARENT_PID PROGRAM ARGUMENT…` becomes PROGRAM, and is killed when its parent
ends, however that ends: a supervisor that is killed leaves nothing behind. A program of its own, because code between
fork and exec of a threaded supervisor is not safe.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress

_PR_SET_PDEATHSIG = 1


def die_with_parent(sig: signal.Signals = signal.SIGKILL, parent: int | None = None) -> None:
    """Have the kernel send this process `sig` when its parent dies; only Linux does.

    `parent` is the expected parent's id where it is known: if that one is gone already, `sig` is sent at once. The
    kernel takes the end of the thread that started this process for the parent's. Survives exec.
    """
    if parent is None:
        parent = os.getppid()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(sig), 0, 0, 0)
    if os.getppid() != parent:  # it died before the line above, so no signal will come
        os.kill(os.getpid(), sig)


def age_s() -> float:
    """Seconds since this process began, the interpreter's start included; 0 where the system does not tell."""
    try:
        with open("/proc/self/stat", "rb") as file:
            started_ticks = int(file.read().rpartition(b")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, AttributeError, ValueError, IndexError):
        return 0.0


def main() -> None:
    """Replace this process by the program named on the command line."""
    die_with_parent(parent=int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])  # noqa: S606 (the supervisor's own command line)


if __name__ == "__main__":
    main()
