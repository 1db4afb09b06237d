"""`python -m scheduler_svc.gateway`: one gateway process."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Sequence
from importlib import metadata

from prometheus_client import start_http_server

from pagemill import logs
from pagemill.endpoints import EndpointError
from pagemill.logs import kv
from pagemill.model_files import ModelFileError, ModelInfo, read_model_info
from pagemill.processes import die_with_parent
from pagemill.settings import load
from pagemill.zmq_links import AsyncPeer, ZmqPeer, new_identity
from scheduler_svc.gateway import tokenizer
from scheduler_svc.gateway.chat import TemplateCompileError
from scheduler_svc.gateway.config import GatewaySettings
from scheduler_svc.gateway.gguf_tokenizer import UnsupportedTokenizerError
from scheduler_svc.gateway.link import Identity
from scheduler_svc.gateway.scheduler_client import SchedulerRejectedError
from scheduler_svc.gateway.server import Gateway

_log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a gateway until SIGTERM or SIGINT; the exit status: 0 drained, 1 cannot serve, 2 an option cannot be used."""
    settings = load(GatewaySettings, list(sys.argv[1:] if argv is None else argv))
    if settings.die_with_parent:
        die_with_parent(signal.SIGTERM)
    listener = logs.setup("gateway", settings.log_level)
    try:
        asyncio.run(_run(settings))
    except SchedulerRejectedError as error:
        return _give_up(f"the scheduler refused this gateway: {error}")
    except EndpointError as error:
        return _give_up(str(error), status=2)
    except (ModelFileError, UnsupportedTokenizerError, TemplateCompileError, OSError) as error:
        return _give_up(str(error))
    finally:
        listener.stop()
    return 0


def _give_up(line: str, status: int = 1) -> int:
    sys.stderr.write(f"{GatewaySettings.prog}: {line}\n")
    return status


async def _run(settings: GatewaySettings) -> None:
    info = read_model_info(settings.model)
    gateway = Gateway(settings, info, tokenizer.load(info), _connect(settings), _identity(info))
    stopping = _stop_on_signals()
    if settings.metrics_port:
        _serve_metrics(settings, gateway)
    await gateway.start()
    serving = asyncio.create_task(gateway.run())
    waiting = asyncio.create_task(stopping.wait())
    await asyncio.wait([serving, waiting], return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        waiting.cancel()
        await gateway.stop()
        await serving  # raises
    else:
        await gateway.drain()
        serving.cancel()


def _serve_metrics(settings: GatewaySettings, gateway: Gateway) -> None:
    try:
        start_http_server(settings.metrics_port, settings.metrics_host, gateway.metrics.registry)
    except OSError as error:
        where = f"{settings.metrics_host}:{settings.metrics_port}"
        line = f"metrics cannot listen on {where} (--metrics-host, --metrics-port): {error.strerror}"
        raise EndpointError(line) from error


def _connect(settings: GatewaySettings) -> AsyncPeer:
    name = socket.gethostname()[:64].replace("/", "-") or "gateway"
    return AsyncPeer(ZmqPeer(settings.scheduler_endpoint, new_identity("gateway", name), insecure=settings.insecure))


def _identity(info: ModelInfo) -> Identity:
    return Identity(
        version=metadata.version("pagemill"),
        incarnation=secrets.token_hex(8),
        host=socket.gethostname(),
        model_fingerprint=info.fingerprint,
    )


def _stop_on_signals() -> asyncio.Event:
    """Set by the first SIGTERM or SIGINT; the second ends the process at once."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if stopping.is_set():
            os._exit(128 + number)
        _log.info("signal", extra=kv(signal=signal.Signals(number).name))
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return stopping


if __name__ == "__main__":
    sys.exit(main())
