"""What every process checks before it does anything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("prog", "command"),
    [
        ("pagemill scheduler", ["scheduler_svc"]),
        ("pagemill gateway", ["scheduler_svc.gateway"]),
        ("pagemill executor", ["executor_svc"]),
        ("pagemill generate", ["pagemill_client.cli", "generate"]),
    ],
)
def test_s23_no_process_starts_with_the_parser_in_python(prog: str, command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command, "--config", "/nowhere"],  # read after the check
        cwd=ROOT,
        env={**os.environ, "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{prog}: protobuf runs its 'python' implementation, not 'upb'")
