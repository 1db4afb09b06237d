"""`python -m scheduler_svc`: the scheduler process."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time

from pagemill import logs
from pagemill.endpoints import EndpointError
from pagemill.logs import kv
from pagemill.processes import age_s
from pagemill.settings import load
from pagemill.wake import WakePipe
from pagemill.zmq_links import EXECUTOR_BOUND, GATEWAY_BOUND, Waiter, ZmqHub
from scheduler_svc import metrics
from scheduler_svc.config import SchedulerSettings
from scheduler_svc.engine import Engine

log = logging.getLogger("scheduler_svc")

LAST_WORD_S = 1.0
"""Time for the last frames to leave when the process ends."""


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; the exit status: 0 drained, 1 hurried by a second signal, 2 refused to start."""
    settings = load(SchedulerSettings, sys.argv[1:] if argv is None else argv)
    listener = logs.setup("scheduler", settings.log_level)
    try:
        return _serve(settings)
    except EndpointError as error:
        sys.stderr.write(f"{settings.prog}: {error}\n")
        return 2
    finally:
        listener.stop()


def _serve(settings: SchedulerSettings) -> int:
    hubs: list[ZmqHub] = []
    try:
        for endpoint, role, bound in (
            (settings.gateway_endpoint, "gateway", GATEWAY_BOUND),
            (settings.executor_endpoint, "executor", EXECUTOR_BOUND),
        ):
            hubs.append(ZmqHub(endpoint, role=role, bound=bound, insecure=settings.insecure))
        status = _run(settings, *hubs)
    except BaseException:
        _close(hubs, 0.0)
        raise
    _close(hubs, LAST_WORD_S if status == 0 else LAST_WORD_S / 4)
    return status


def _close(hubs: list[ZmqHub], linger_s: float) -> None:
    for hub in hubs:
        hub.close(linger_s)


def _run(settings: SchedulerSettings, gateway_hub: ZmqHub, executor_hub: ZmqHub) -> int:
    wake = WakePipe()
    wake.set_by_signals()
    waiter = Waiter([gateway_hub, executor_hub], [wake.fd])

    def wait(timeout_s: float) -> bool:
        found = waiter.wait(timeout_s)
        wake.clear()
        return found

    engine = Engine(
        core_config=settings.core(),
        config=settings.engine(),
        executor_hub=executor_hub,
        gateway_hub=gateway_hub,
        first_epoch=time.time_ns() // 1_000_000,
        wait=wait,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: engine.request_stop())
    port = 0
    if settings.metrics_port:
        try:
            port = metrics.serve(engine, settings.metrics_host, settings.metrics_port)
        except OSError as error:
            where = f"{settings.metrics_host}:{settings.metrics_port}"
            raise EndpointError(f"metrics cannot listen on {where}: {error.strerror}") from error
    engine.counters.startup_seconds["ready"] = startup_s = age_s()
    log.info(
        "ready",
        extra=kv(
            gateways=gateway_hub.endpoint,
            executors=executor_hub.endpoint,
            metrics_port=port,
            pid=os.getpid(),
            startup_s=round(startup_s, 3),
        ),
    )
    return engine.run()


if __name__ == "__main__":
    sys.exit(main())
