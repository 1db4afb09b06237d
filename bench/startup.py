"""Time from starting `pagemill serve` to readiness, on a warm file cache: the median of several starts.

    python -m bench.startup --starts 5 --output startup.json

The clock runs from the creation of the `pagemill serve` process to its own `ready` line, which it prints when gRPC
health says SERVING. The first start only warms the file cache and is not counted.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

from bench import machine

READY = b"pagemill serve: ready"
LIMIT_S = 120


def start_once(model: str) -> float:
    """Seconds to readiness. Raises RuntimeError if the service does not come up or does not end cleanly."""
    ports = [f"--{role}.metrics-port=0" for role in ("gateway", "scheduler", "executor")]
    command = [
        sys.executable,
        "-m",
        "pagemill_client.cli",
        "serve",
        "--model",
        model,
        "--port",
        "0",
        "--admin-port",
        "0",
        *ports,
    ]
    command += ["--ready-timeout-s", str(LIMIT_S)]
    begin = time.perf_counter()
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL) as process:
        assert process.stderr is not None
        taken = None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if line.startswith(READY):
                taken = time.perf_counter() - begin
                process.send_signal(signal.SIGTERM)
    if taken is None or process.returncode != 0:
        raise RuntimeError(b"".join(lines).decode(errors="replace"))
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description="time from `pagemill serve` to readiness")
    parser.add_argument("--model", default="demo", help="directory, GGUF file or demo")
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--output", type=Path, help="JSON file for the result")
    args = parser.parse_args()
    start_once(args.model)
    meter = machine.CpuMeter()
    seconds = [start_once(args.model) for _ in range(args.starts)]
    result = {
        "median_s": statistics.median(seconds),
        "seconds": seconds,
        "other_cpus": round(meter.others_cpus(), 3),
        "model": args.model,
        "machine": machine.describe(),
    }
    spread = f"{min(seconds):.2f} to {max(seconds):.2f}"
    print(f"start to ready: median {result['median_s']:.2f} s of {args.starts} ({spread})")
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
