"""`pagemill serve` as a process: its lines, its address, its children."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

READY = "pagemill serve: ready"
START_LIMIT_S = 90.0
SMALL = [
    "--port", "0", "--admin-port", "0",
    "--gateway.metrics-port=0", "--scheduler.metrics-port=0", "--executor.metrics-port=0",
    "--kv-memory-bytes", "536870912",
]  # fmt: skip
"""Options under which stacks run beside each other."""


class ServeProcess:
    """A running `pagemill serve`. `lines` grows as it speaks; use as a context manager: it is killed at the end."""

    def __init__(self, *options: str) -> None:
        self.lines: list[str] = []
        self._news = threading.Condition()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PAGEMILL_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pagemill_client.cli", "serve", *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> ServeProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()  # its children die with it
        self.process.wait(timeout=20)
        self._reader.join(timeout=20)

    @property
    def target(self) -> str:
        """The gateway's address; waits until everything is ready."""
        self.wait_for(lambda: self.count(READY) > 0, START_LIMIT_S)
        return self.wait_for(lambda: self._find("gRPC on "), 60).rpartition("gRPC on ")[2]

    def count(self, text: str) -> int:
        """Number of lines with `text`."""
        return sum(text in line for line in self.lines)

    def wait_for(self, value: Callable[[], T], timeout_s: float) -> T:
        """The value once it is true; fails with all lines when time is up or the process has ended."""
        deadline = time.monotonic() + timeout_s
        with self._news:
            while not (found := value()):
                left = deadline - time.monotonic()
                assert left > 0, "\n".join(["time is up; it said:", *self.lines])
                assert self.process.poll() is None or self._reader.is_alive(), "\n".join(["it ended:", *self.lines])
                self._news.wait(min(left, 0.2))
            return found

    def pid_of(self, module: str) -> int:
        """Process id of the child that runs `module`."""
        for pid in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split():
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            if words[1:3] == ["-m", module]:
                return int(pid)
        raise AssertionError(f"no child runs {module}")

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal to the supervisor."""
        self.process.send_signal(number)

    def status(self, timeout_s: float) -> int:
        """Exit status; waits for the end."""
        status = self.process.wait(timeout=timeout_s)
        self._reader.join(timeout=timeout_s)
        return status

    def _find(self, text: str) -> str:
        return next((line for line in self.lines if text in line), "")

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr:
            for line in self.process.stderr:
                with self._news:
                    self.lines.append(line.rstrip())
                    self._news.notify_all()
