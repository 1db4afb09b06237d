"""A descriptor that other threads and signals can make readable, so that whoever polls wakes up."""

from __future__ import annotations

import contextlib
import os
import signal
import threading


class WakePipe:
    """`fd` is readable from `set` to `clear`. `set` may be called from any thread and from signal handlers."""

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write_fd, False)
        self._lock = threading.RLock()
        """So that none writes to the number of a descriptor that is somebody else's by now."""

    def set(self) -> None:
        """Make it readable. Nothing happens where it is so already, or when it is closed: then nobody polls."""
        with self._lock, contextlib.suppress(OSError):
            os.write(self._write_fd, b"x")

    def set_by_signals(self) -> None:
        """From now on every signal that has a handler makes it readable too. In the main thread only."""
        signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)

    def clear(self) -> None:
        """Make it unreadable again."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 65536)

    def close(self) -> None:
        """Give both descriptors back."""
        os.close(self.fd)
        with self._lock:
            write_fd, self._write_fd = self._write_fd, -1  # first: a signal may come in between
            os.close(write_fd)
