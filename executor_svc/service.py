"""Puts an executor process together: runner, pool, link, metrics, signals, worker."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from concurrent.futures import Future, wait
from functools import partial
from logging.handlers import QueueListener
from types import FrameType
from typing import TypeVar

from executor_svc.compute import ComputeThread
from executor_svc.config import ExecutorSettings
from executor_svc.memory import DoesNotFitError
from executor_svc.metrics import ExecutorMetrics
from executor_svc.runner import PagedRunner
from executor_svc.runner import load as load_runner
from executor_svc.startup import WrongOptionError, check_model_len, prepare
from executor_svc.worker import HEARTBEAT_S, Exit, Worker, WorkerOptions
from pagemill import logs
from pagemill.endpoints import EndpointError
from pagemill.engine.v1 import executor_pb2 as pb
from pagemill.framing import Channel
from pagemill.links import PeerLink
from pagemill.logs import kv
from pagemill.model_files import read_model_info
from pagemill.zmq_links import EXECUTOR_BOUND, ZmqPeer, new_identity

log = logging.getLogger(__name__)

_FORCED_EXIT_STATUS = 130
_USAGE_STATUS = 2

T = TypeVar("T")


def serve(settings: ExecutorSettings, started: float) -> int:
    """Run until stopped; returns the exit status, 2 for options that cannot be honoured.

    `started`: of the process, on `time.monotonic`.
    """
    listener = logs.setup("executor", settings.log_level)
    try:
        return _serve(settings, started)
    except (EndpointError, WrongOptionError) as error:
        return _refuse(error, listener, "", _USAGE_STATUS)
    except (DoesNotFitError, ValueError, OSError) as error:  # OSError: files
        return _refuse(error, listener, "cannot start: ", Exit.FAILED.value)
    finally:
        if listener._thread is not None:
            listener.stop()


def _refuse(error: Exception, listener: QueueListener, prefix: str, status: int) -> int:
    log.debug("cannot start", exc_info=error)
    listener.stop()
    sys.stderr.write(f"{ExecutorSettings.prog}: {prefix}{' '.join(str(error).split())}\n")
    return status


def _serve(settings: ExecutorSettings, started: float) -> int:
    phases = {"import": time.monotonic() - started}
    metrics = ExecutorMetrics()
    if settings.metrics_port:
        _serve_metrics(metrics, settings)
    # Connected before the long part, so that a wrong endpoint fails at once; until the hello the scheduler hears
    # heartbeats only.
    link = ZmqPeer(
        settings.scheduler_endpoint,
        new_identity("executor", settings.name),
        bound=EXECUTOR_BOUND,
        insecure=settings.insecure,
    )
    log.info(
        "loading",
        extra=kv(model=settings.model, endpoint=settings.scheduler_endpoint, metrics_port=settings.metrics_port),
    )
    compute = ComputeThread()
    compute.start()
    runner = _beating(link, pb.EXECUTOR_STATE_LOADING, compute.call(partial(_load, settings)))
    phases["load"] = time.monotonic() - started - sum(phases.values())
    log.info("warming up", extra=kv(load_s=phases["load"], weight_bytes=runner.weight_bytes))
    ready = _beating(link, pb.EXECUTOR_STATE_WARMING, compute.call(partial(prepare, runner, settings)))
    phases["warm_up"] = time.monotonic() - started - sum(phases.values())
    options = WorkerOptions(lease_s=settings.lease_ms / 1000, exit_after_reject=settings.exit_after_reject)
    worker = Worker(link, ready.hello, ready.executor, ready.limits, metrics=metrics, compute=compute, options=options)
    _stop_on_signals(worker)
    metrics.started(
        {**phases, "total": time.monotonic() - started}, ready.limits.num_blocks, ready.limits.num_host_blocks
    )
    hello = ready.hello
    log.info(
        "ready",
        extra=kv(
            model=runner.model_name,
            device=hello.device,
            dtype=hello.dtype,
            kv_dtype=hello.kv_dtype,
            blocks=hello.num_device_blocks,
            host_blocks=hello.num_host_blocks,
            swap_out_bytes_per_s=hello.swap_out_bytes_per_s,
            swap_in_bytes_per_s=hello.swap_in_bytes_per_s,
            prefill_tokens_per_s=hello.prefill_tokens_per_s,
            **{f"{phase}_s": seconds for phase, seconds in phases.items()},
        ),
    )
    return worker.run().value


def _beating(link: PeerLink, state: pb.ExecutorState, work: Future[T]) -> T:
    """The result of `work`; while it takes its time the scheduler hears what the executor is doing."""
    started = time.monotonic()
    channel = Channel(pb.ExecutorEnvelope)
    while not wait([work], HEARTBEAT_S).done:
        since_ms = int((time.monotonic() - started) * 1000)
        link.send(channel.pack(heartbeat=pb.Heartbeat(state=state, since_ms=since_ms)))
    return work.result()


def _serve_metrics(metrics: ExecutorMetrics, settings: ExecutorSettings) -> None:
    try:
        metrics.serve(settings.metrics_host, settings.metrics_port)
    except OSError as error:
        address = f"{settings.metrics_host}:{settings.metrics_port}"
        raise WrongOptionError(f"--metrics-port: {address} cannot be bound: {error.strerror}") from error


def _load(settings: ExecutorSettings) -> PagedRunner:
    info = read_model_info(settings.model)
    check_model_len(settings, info.max_model_len)  # before the weights, which take long
    return load_runner(
        info,
        dtype=settings.dtype,
        weight_dtype=settings.weight_dtype,
        kv_dtype=settings.kv_dtype,
        block_size=settings.block_size,
        attention=settings.attention_backend,
        num_threads=settings.num_threads or None,
        deterministic=settings.deterministic,
    )


def _stop_on_signals(worker: Worker) -> None:
    """The first SIGTERM or SIGINT stops the worker in order, the second ends the process at once."""

    def handle(number: int, frame: FrameType | None) -> None:
        if worker.stopping:
            os._exit(_FORCED_EXIT_STATUS)
        worker.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
