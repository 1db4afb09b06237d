"""The core runs where nothing but the standard library is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

PROGRAM = """
import importlib, pkgutil, sys

OWN = ("scheduler_svc", "scheduler_svc.core", "cache_svc", "cache_svc.blocks")
# Not of the standard library's many modules: what talks to the outside, or waits.
OUTSIDE = {"asyncio", "socket", "threading", "multiprocessing", "subprocess", "logging", "time", "ssl", "random"}

class Block:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if name in OWN or name.startswith(("scheduler_svc.core.", "cache_svc.blocks.")):
            return None
        if top not in sys.stdlib_module_names:
            raise ImportError(f"blocked: {name}")
        return None

for name in list(sys.modules):
    if name.partition(".")[0] not in sys.stdlib_module_names and name != "__main__":
        del sys.modules[name]
sys.meta_path.insert(0, Block())
sys.path.insert(0, sys.argv[1])
if len(sys.argv) > 2:
    importlib.import_module(sys.argv[2])
before = set(sys.modules)
names = []
for package in ("cache_svc.blocks", "scheduler_svc.core"):
    module = importlib.import_module(package)
    names += [f"{package}.{info.name}" for info in pkgutil.iter_modules(module.__path__)]
for name in names:
    importlib.import_module(name)
new = set(sys.modules) - before
foreign = sorted(
    name for name in new
    if name.partition(".")[0] not in sys.stdlib_module_names and not name.startswith(("scheduler_svc", "cache_svc"))
)
assert not foreign, foreign
assert not new & OUTSIDE, new & OUTSIDE
assert len(names) >= 20, names
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.params import ExecutorLimits, SchedulerConfig, SequenceSpec
scheduler = Scheduler(SchedulerConfig())
scheduler.attach_executor(ExecutorLimits(16, 8, 8, 64, 24, 64), 0.0)
assert scheduler.submit(SequenceSpec(1, [1, 2, 3], 4), 0.0) is None
assert scheduler.schedule(0.0).num_tokens == 3
print("imported", len(names))
"""


def run_blocked(*arguments: str) -> subprocess.CompletedProcess[str]:
    # -S -E -I: no site-packages, no environment. pkgutil is imported before the check of what is new.
    command = [sys.executable, "-I", "-S", "-c", PROGRAM, str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_core_and_blocks_import_and_run_with_everything_but_the_standard_library_blocked() -> None:
    done = run_blocked()
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("imported")


@pytest.mark.parametrize("module", ["numpy", "pagemill", "scheduler_svc.engine", "executor_svc"])
def test_the_block_works(module: str) -> None:
    done = run_blocked(module)
    assert done.returncode != 0
    assert f"blocked: {module}" in done.stderr
