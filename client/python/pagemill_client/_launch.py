"""Run as a script: `_launch.py PARENT_PID PROGRAM ARGUMENT…` becomes PROGRAM, and dies with its parent.

The kernel (Linux) kills the process when the one that started it ends, however that ends: a supervisor that is killed
leaves nothing behind. Set here, after the fork and before the program, because code between fork and exec of a
threaded supervisor is not safe.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Replace this process."""
    parent = int(sys.argv[1])
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the line above
        sys.exit(1)
    os.execv(sys.argv[2], sys.argv[2:])  # noqa: S606 (the supervisor's own command line)


if __name__ == "__main__":
    main()
