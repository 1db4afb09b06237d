"""The executor with timers around its kernels: the process that `bench.step_profile` starts in place of `executor_svc`.

    python -m bench.profiling.executor OUT.json [options of executor_svc]

Every step that ran is in OUT.json when the process ends: when it began and ended (on `time.monotonic`, which all
processes of a machine share), its size, and the nanoseconds and calls per label.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

from executor_svc.__main__ import calm_openmp, main

_PR_SET_PTRACER, _PR_SET_PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1)


def run(out: Path, argv: list[str]) -> int:
    calm_openmp()  # as the product does it, before torch is loaded
    from bench.profiling.profiler import Profiler  # noqa: PLC0415

    # Where Yama guards ptrace, a sampler that is no ancestor may look in all the same.
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)
    profiler = Profiler()
    profiler.install()
    status = main(argv)
    profiler.write(out)
    return status


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]), sys.argv[2:]))
