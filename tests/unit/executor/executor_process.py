"""An executor process for tests: the real worker, link and signals around a runner that needs a line on stdin per step.

Arguments: an ipc endpoint, and optionally "die-with-parent".
"""

from __future__ import annotations

import signal
import sys

import torch

from executor_svc.batch import Batch
from executor_svc.metrics import ExecutorMetrics
from executor_svc.service import _stop_on_signals
from executor_svc.worker import Worker
from pagemill.engine.v1 import executor_pb2 as pb
from pagemill.processes import die_with_parent
from pagemill.zmq_links import ZmqPeer, new_identity
from tests.unit.executor.executor_fakes import Bench, DigestRunner


class StdinRunner(DigestRunner):
    def forward(self, batch: Batch) -> torch.Tensor:
        sys.stdin.readline()
        return super().forward(batch)


def main() -> int:
    if "die-with-parent" in sys.argv:
        die_with_parent(signal.SIGTERM)
    bench = Bench(StdinRunner())
    link = ZmqPeer(sys.argv[1], new_identity("executor", "test"))
    hello = pb.ExecutorHello(protocol_min=1, protocol_max=1)
    worker = Worker(link, hello, bench.executor, bench.limits, metrics=ExecutorMetrics())
    _stop_on_signals(worker)
    return worker.run().value


if __name__ == "__main__":
    sys.exit(main())
