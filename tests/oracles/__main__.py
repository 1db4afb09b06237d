"""`python -m tests.oracles --kind chain --scheduler-endpoint ipc://…`: an oracle executor as a process."""

from __future__ import annotations

import argparse
import signal
import sys
import threading

from pagemill.zmq_links import EXECUTOR_BOUND, ZmqPeer, new_identity
from tests.oracles.base import Geometry, OracleExecutor
from tests.oracles.chain import ChainExecutor
from tests.oracles.kv import KvExecutor
from tests.oracles.scripted import ScriptedExecutor

KINDS: dict[str, type[OracleExecutor]] = {"chain": ChainExecutor, "kv": KvExecutor, "scripted": ScriptedExecutor}


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.oracles")
    parser.add_argument("--kind", choices=sorted(KINDS), default="chain")
    parser.add_argument("--scheduler-endpoint", required=True)
    parser.add_argument("--insecure", action="store_true")
    parser.add_argument("--name", default="oracle")
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--delay-in-s", type=float, default=0.0)
    parser.add_argument("--delay-out-s", type=float, default=0.0)
    defaults = Geometry()
    for name in vars(defaults):
        kind = type(getattr(defaults, name))
        parser.add_argument("--" + name.replace("_", "-"), type=kind, default=getattr(defaults, name))
    args = parser.parse_args()
    link = ZmqPeer(
        args.scheduler_endpoint, new_identity("executor", args.name), bound=EXECUTOR_BOUND, insecure=args.insecure
    )
    geometry = Geometry(**{name: getattr(args, name) for name in vars(defaults)})
    oracle = KINDS[args.kind](
        link, geometry, step_s=args.step_s, delay_in_s=args.delay_in_s, delay_out_s=args.delay_out_s
    )
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        oracle.run(stop)
    finally:
        link.close()
    for line in (oracle.rejected and [f"rejected: {oracle.rejected}"]) or oracle.violations:
        sys.stderr.write(line + "\n")
    return 1 if oracle.rejected or oracle.violations else 0


if __name__ == "__main__":
    sys.exit(main())
