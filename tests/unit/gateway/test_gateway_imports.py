"""What a gateway process loads: no accelerator stack, no scheduler."""

from __future__ import annotations

import subprocess
import sys

FORBIDDEN = (
    "torch",
    "transformers",
    "numpy",
    "scheduler_svc.core",
    "scheduler_svc.engine",
    "cache_svc",
    "executor_svc",
)


def test_the_gateway_loads_neither_torch_nor_numpy_nor_the_scheduler() -> None:
    code = f"import sys, scheduler_svc.gateway.__main__\nprint([m for m in sys.modules if m.startswith({FORBIDDEN!r})])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_the_chat_worker_loads_no_grpc() -> None:
    code = "import sys, scheduler_svc.gateway.chat_worker; print('grpc' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
