"""`python -m executor_svc`: load a model, say hello to the scheduler, run its plans."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from types import FrameType

from executor_svc.config import ExecutorSettings
from pagemill.processes import die_with_parent
from pagemill.settings import load


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0 stopped on request, 1 refused or failed (one line says why), 2 wrong options."""
    settings = load(ExecutorSettings, sys.argv[1:] if argv is None else argv)
    if settings.die_with_parent:
        die_with_parent(signal.SIGTERM)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop_while_loading)
    calm_openmp()
    # Late, so that --help and wrong options answer without waiting seconds for torch. Modules make hundreds of
    # thousands of objects that stay, and looking for garbage among them is a sixth of the time.
    gc.disable()
    from executor_svc.service import serve  # noqa: PLC0415

    gc.freeze()
    gc.enable()
    return serve(settings, started=_process_start())


def calm_openmp() -> None:
    """How long OpenMP's threads spin before they sleep, unless the operator has said so. Before torch is loaded."""
    # Threads that wait may spin for some 20 us, the gap between two operators of a step, and must sleep then: beside a
    # gateway and a scheduler on the same two cores a spinning OpenMP made a 512-token step take 4.1 s instead of 1.0 s,
    # while sleeping at once made a decode step of 54 rows take 0.29 s instead of 0.18 s. The library reads this once,
    # when torch loads it.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "5000")


def _stop_while_loading(number: int, frame: FrameType | None) -> None:
    os._exit(0)  # nothing to undo, and an orderly end would wait for the thread that loads


def _process_start() -> float:
    """When this process began, on `time.monotonic`: imports are part of the start."""
    try:
        with open("/proc/self/stat", "rb") as stat:
            ticks = int(stat.read().rpartition(b")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError):
        age = 0.0
    return time.monotonic() - max(0.0, age)


if __name__ == "__main__":
    sys.exit(main())
