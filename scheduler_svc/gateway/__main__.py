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
from scheduler_svc.gateway.scheduler_client import Identity, SchedulerRejectedError
from scheduler_svc.gateway.server import Gateway

_log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a gateway until SIGTERM or SIGINT; exit status 0 after a drain, 1 with one line when it cannot serve."""
    settings = load(GatewaySettings, list(sys.argv[1:] if argv is None else argv))
    if settings.die_with_parent:
        die_with_parent(signal.SIGTERM)
    listener = logs.setup("gateway", settings.log_level)
    try:
        asyncio.run(_run(settings))
    except SchedulerRejectedError as error:
        return _give_up(f"the scheduler refused this gateway: {error}")
    except (ModelFileError, UnsupportedTokenizerError, TemplateCompileError, EndpointError, OSError) as error:
        return _give_up(str(error))
    finally:
        listener.stop()
    return 0


def _give_up(line: str) -> int:
    sys.stderr.write(f"{GatewaySettings.prog}: {line}\n")
    return 1


async def _run(settings: GatewaySettings) -> None:
    info = read_model_info(settings.model)
    gateway = Gateway(settings, info, tokenizer.load(info), _connect(settings), _identity(info))
    stopping = _stop_on_signals()
    if settings.metrics_port:
        start_http_server(settings.metrics_port, settings.metrics_host, gateway.metrics.registry)
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
