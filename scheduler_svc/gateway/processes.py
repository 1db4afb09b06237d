"""Process facts that only the kernel can arrange."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(sig: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process `sig` when its parent dies; does nothing where that is not Linux's prctl."""
    parent = os.getppid()
    try:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(sig), 0, 0, 0)
    except (OSError, AttributeError):
        return
    if os.getppid() != parent:  # it died in between, so no signal will come
        os.kill(os.getpid(), sig)
