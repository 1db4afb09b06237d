"""A process that ends with the one that started it, as a module and as a script."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pagemill import processes

SLEEP = "import time; print('up', flush=True); time.sleep(600)"
OWN = f"import signal; from pagemill.processes import die_with_parent; die_with_parent(signal.SIGTERM); {SLEEP}"


@pytest.mark.parametrize(
    "child",
    [
        "[sys.executable, '-c', {own!r}]",
        "[sys.executable, '-I', '-S', {script!r}, str(os.getpid()), sys.executable, '-c', {sleep!r}]",
    ],
    ids=["by itself", "launched"],
)
def test_it_ends_with_its_parent(child: str) -> None:
    """The parent is killed; the test waits for the end of the output, which the child holds open while it lives."""
    command = child.format(own=OWN, sleep=SLEEP, script=processes.__file__)
    code = f"import os, subprocess, sys, time; subprocess.Popen({command}); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"up\n"
        parent.kill()
        assert parent.stdout.read() == b""


def test_a_launched_program_whose_parent_is_gone_does_not_start() -> None:
    not_the_parent = str(os.getppid())
    command = [sys.executable, "-I", "-S", processes.__file__, not_the_parent, sys.executable, "-c", "print('started')"]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (-9, b"")


def test_a_launched_program_has_its_arguments_and_status() -> None:
    code = "import sys; print(sys.argv[1:]); sys.exit(7)"
    command = [sys.executable, "-I", "-S", processes.__file__, str(os.getpid()), sys.executable, "-c", code, "a", "b c"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (7, "['a', 'b c']\n")
