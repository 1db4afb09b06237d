"""Builds of the kernels that no installation makes: other vector widths, emulated instructions, sanitizers."""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

SOURCES = Path(__file__).resolve().parents[3] / "executor_svc/native/src"
COMMON = ["-std=c++17", "-fPIC", "-shared", "-fopenmp", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math",
          "-fno-exceptions", "-fno-rtti", "-fvisibility=hidden", "-DPM_X86=0"]  # fmt: skip


@functools.cache
def build(*flags: str) -> Path:
    """The portable kernels compiled with these flags besides; skips the test where there is no compiler."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ on PATH")
    path = Path(tempfile.mkdtemp(prefix="pagemill-kernels-")) / "kernels.so"
    sources = [SOURCES / name for name in ("dispatch.cpp", "plan.cpp", "sequence.cpp", "isa_portable.cpp")]
    subprocess.run([compiler, *COMMON, *flags, "-o", path, *sources], check=True, timeout=250)
    return path
