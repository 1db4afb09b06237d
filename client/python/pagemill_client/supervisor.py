"""Keeps a set of processes running: starts them together, restarts what crashes, stops them in order.

Until everything is ready, any exit is a failure: nothing worked yet, so the first line that says why is worth more
than another attempt. After that, a crash is what the other processes are built to survive, and the supervisor only
brings the process back.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Sequence

from pagemill_client.processes import USAGE_STATUS, Backoff, Child, ChildSpec, describe_status

PROBE_INTERVAL_S = 0.05

Probe = Callable[[], Awaitable[str | None]]
"""None when the whole is ready, otherwise what is missing in words."""


class ServeError(Exception):
    """The stack cannot start or cannot go on; the text is for the operator and names the culprit."""


class Supervisor:
    """Runs `specs`; they are stopped in their order. `announce` gets single lines, `on_line` every line of a child.

    `lines_shown`: the user sees what `on_line` gets, so that a failure need not repeat the last lines.
    """

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        *,
        max_crashes: int,
        announce: Callable[[str], None],
        on_line: Callable[[str, str], None],
        lines_shown: bool = False,
    ) -> None:
        self.children = [Child(spec, on_line) for spec in specs]
        self._backoffs = {child.role: Backoff(max_crashes) for child in self.children}
        self._announce = announce
        self._lines_shown = lines_shown
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._leaving: set[str] = set()

    async def start(self) -> None:
        """Start every process; they find each other in any order."""
        for child in self.children:
            await child.start()

    async def wait_ready(self, probe: Probe, timeout_s: float) -> None:
        """Return when `probe` is satisfied. Raises ServeError when a process ends before, or time is up."""
        deadline = time.monotonic() + timeout_s
        missing: str | None = "the first answer"
        while time.monotonic() < deadline:
            for child in self.children:
                if not child.running:
                    raise ServeError(self._obituary(child, await child.wait(), "before it was ready"))
            missing = await probe()
            if missing is None:
                return
            await asyncio.sleep(PROBE_INTERVAL_S)
        raise ServeError(f"not ready after {timeout_s:g} s, waiting for {missing}{self._tails(self.children)}")

    async def keep(self, stop: asyncio.Event) -> None:
        """Restart what crashes until `stop` is set. Raises ServeError for a process that cannot be kept."""
        for child in self.children:
            self._keepers[child.role] = asyncio.create_task(self._keep(child))
        stopped = asyncio.create_task(stop.wait())
        try:
            done, _ = await asyncio.wait([stopped, *self._keepers.values()], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stopped}:
                task.result()
        finally:
            stopped.cancel()

    async def drain(self, timeout_s: float, hurry: asyncio.Event) -> bool:
        """SIGTERM to one process after the other, each `timeout_s` to end; then, or when `hurry` is set, SIGKILL.

        The others stay supervised meanwhile: streams that are being finished survive a crash even now.
        True if every process ended by itself with status 0.
        """
        clean = True
        for child in self.children:
            self._leaving.add(child.role)
            child.signal(signal.SIGTERM)
            clean = await self._ended(child, timeout_s, hurry) and clean
        return clean

    async def kill(self) -> None:
        """End everything now."""
        for child in self.children:
            self._leaving.add(child.role)
            child.signal(signal.SIGKILL)
        for keeper in self._keepers.values():
            keeper.cancel()
        await asyncio.gather(*self._keepers.values(), return_exceptions=True)
        for child in self.children:
            if child.started_at:
                await child.wait()

    async def _keep(self, child: Child) -> None:
        while True:
            status = await child.wait()
            if child.role in self._leaving:
                return
            if status == USAGE_STATUS:
                raise ServeError(self._obituary(child, status, "and would again"))
            delay_s = self._backoffs[child.role].after_crash(child.lived_s)
            if delay_s is None:
                crashes = self._backoffs[child.role].crashes
                raise ServeError(self._obituary(child, status, f"{crashes} times in a row"))
            self._announce(f"{child.role} ended ({describe_status(status)}); starting it again in {delay_s:.1f} s")
            await asyncio.sleep(delay_s)
            if child.role in self._leaving:
                return
            await child.start()

    async def _ended(self, child: Child, timeout_s: float, hurry: asyncio.Event) -> bool:
        """Whether the process ended by itself with status 0; it has ended in any case."""
        if not child.running:
            return True  # between two starts: there is nothing to end
        waits = [asyncio.create_task(child.wait()), asyncio.create_task(hurry.wait())]
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        waits[1].cancel()
        killed = child.running
        if killed:
            self._announce(f"{child.role} did not end in time; killing it")
            child.signal(signal.SIGKILL)
        status = await waits[0]
        if status != 0 and not killed:
            self._announce(self._obituary(child, status, "while stopping"))
        return status == 0

    def _obituary(self, child: Child, status: int, when: str) -> str:
        return f"{child.role} ended {when} ({describe_status(status)}){self._tails([child])}"

    def _tails(self, children: Sequence[Child]) -> str:
        """The last lines of `children`, unless they have been seen: then only who said nothing at all."""
        unseen = [child for child in children if not (self._lines_shown and any(child.tail))]
        return "".join(f"\n{_tail(child)}" for child in unseen)


def _tail(child: Child) -> str:
    lines = [line for line in child.tail if line] or ["(nothing)"]
    return "\n".join([f"last lines of the {child.role}:", *(f"  {line}" for line in lines)])
