"""One supervised child process: its output, its end, and when it may be started again."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pagemill import processes as launcher

LAUNCHER = Path(launcher.__file__)
"""Becomes the child's program after it has tied it to this process."""
TAIL_LINES = 15
MAX_LINE_BYTES = 8192
USAGE_STATUS = 2
"""Exit status of a role that refuses its options; starting it again cannot help."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to run as `role`: arguments of the Python interpreter, and variables on top of the supervisor's own."""

    role: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


class Backoff:
    """When a crashed process may start again: doubling waits, reset by a life of `stable_s`. Pure."""

    def __init__(self, max_crashes: int, *, first_s: float = 0.1, cap_s: float = 10.0, stable_s: float = 60.0) -> None:
        self._max_crashes = max_crashes
        self._first_s = first_s
        self._cap_s = cap_s
        self._stable_s = stable_s
        self.crashes = 0

    def after_crash(self, lived_s: float) -> float | None:
        """Seconds to wait before the next start; None when it has crashed too often in a row."""
        self.crashes = 1 if lived_s >= self._stable_s else self.crashes + 1
        if self.crashes >= self._max_crashes:
            return None
        return min(self._cap_s, float(self._first_s * 2 ** (self.crashes - 1)))


def describe_status(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


class Child:
    """A process and its last lines. `start` may be called again after the process has ended."""

    def __init__(self, spec: ChildSpec, on_line: Callable[[str, str], None]) -> None:
        self.spec = spec
        self.role = spec.role
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.started_at = 0.0
        self._on_line = on_line
        self._process: asyncio.subprocess.Process | None = None
        self._pump: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self.running and self._process else None

    @property
    def running(self) -> bool:
        """Whether a process was started and has not ended."""
        return self._process is not None and self._process.returncode is None

    @property
    def lived_s(self) -> float:
        """Seconds since the last start."""
        return time.monotonic() - self.started_at

    async def start(self) -> None:
        """Start the process in a session of its own, so that Ctrl-C in the terminal reaches only the supervisor."""
        self.tail.clear()
        self.started_at = time.monotonic()
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(LAUNCHER), str(os.getpid())),
            *(sys.executable, *self.spec.arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **self.spec.environment},
        )
        assert self._process.stdout is not None
        self._pump = asyncio.create_task(self._read_lines(self._process.stdout))

    async def wait(self) -> int:
        """The exit status, once it has ended and its output is read."""
        assert self._process is not None
        assert self._pump is not None
        status = await self._process.wait()
        await asyncio.wait([self._pump], timeout=1.0)  # a grandchild may hold the pipe open
        return status

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens if the process has ended."""
        if self.running and self._process is not None:
            self._process.send_signal(number)

    async def _read_lines(self, stream: asyncio.StreamReader) -> None:
        pending = b""
        while chunk := await stream.read(65536):
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                self._line(line)
            if len(pending) > MAX_LINE_BYTES:
                self._line(pending)
                pending = b""
        if pending:
            self._line(pending)

    def _line(self, raw: bytes) -> None:
        line = raw[:MAX_LINE_BYTES].decode(errors="replace").rstrip()
        self.tail.append(line)
        self._on_line(self.role, line)
