"""`pagemill serve`: one gateway, scheduler and executor on this machine, supervised."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagemill.model_files import ModelFileError, find_demo_model
from pagemill.settings import ServiceSettings, load
from pagemill_client import roles
from pagemill_client.config import ServeSettings
from pagemill_client.listeners import Listener, check_free
from pagemill_client.processes import ChildSpec
from pagemill_client.roles import EXECUTOR, GATEWAY, SCHEDULER, STOP_ORDER, OptionError
from pagemill_client.supervisor import Probe, ServeError, Supervisor
from pagemill_client.terminal import err

PROBE_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class Stack:
    """What to run and where it will listen. `target` is the gateway's address for clients."""

    settings: ServeSettings
    children: tuple[ChildSpec, ...]
    target: str
    listeners: tuple[str, ...]
    """What to tell the operator about where it listens."""
    ports: tuple[Listener, ...]
    """The TCP ports that must be free before the start."""
    loaded: Mapping[str, Any]
    """The settings of each role, by its name."""


def main(argv: list[str]) -> int:
    """Run `pagemill serve` until SIGINT or SIGTERM. Exit status 0 after a clean stop, 1 after a failure, 2 when an
    option cannot be: a port that is taken too, for then whatever answers there is not ours.
    """
    if {"-h", "--help"} & set(argv):
        return _help()
    with tempfile.TemporaryDirectory(prefix="pagemill-") as directory:  # mode 0700; removed at the end
        try:
            stack = plan(argv, Path(directory))
            check_free(stack.ports)
        except (OptionError, ModelFileError) as error:
            err(f"{ServeSettings.prog}: {error}")
            return 2
        return asyncio.run(serve(stack))


def plan(argv: list[str], directory: Path) -> Stack:
    """The stack for a command line, its sockets in `directory`. Nothing is started.

    Raises OptionError or ModelFileError; exits with status 2 and one line for a value that a role refuses.
    """
    types = {role.name: role.settings_type() for role in STOP_ORDER}
    shared = roles.share_out(
        argv, roles.defaults(ServeSettings), {name: roles.defaults(kind) for name, kind in types.items()}
    )
    settings = load(ServeSettings, shared.serve)
    model = find_demo_model() if settings.model == "demo" else Path(settings.model)
    if not model.exists():
        raise OptionError(f"--model: no such file or directory: {model}")
    for role in (GATEWAY, EXECUTOR):
        shared.by_role[role.name] += ["--model", str(model)]
    loaded: dict[str, Any] = {name: load(kind, shared.by_role[name]) for name, kind in types.items()}
    added = _connect(loaded, directory)
    _check_times(settings, loaded)
    host, others = loaded[GATEWAY.name].host, _other_ports(loaded)
    port = loaded[GATEWAY.name].port or _free_port(host, {listener.port for listener in others})
    added[GATEWAY.name] += ["--port", str(port)]  # chosen here, so that a restarted gateway is found where it was
    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return Stack(
        settings,
        tuple(
            ChildSpec(role.name, ("-m", role.module, *shared.by_role[role.name], *added[role.name]))
            for role in STOP_ORDER
        ),
        target,
        _listeners(target, loaded),
        (Listener("--port", host, port), *others),
        loaded,
    )


async def serve(stack: Stack) -> int:
    """Run the stack until a signal; see `main`."""
    stop, hurry = asyncio.Event(), asyncio.Event()
    stop_on_signals(stop, hurry)
    return await run(stack, stop, hurry, on_line=lambda _, line: err(line), announce=_announce, lines_shown=True)


def stop_on_signals(stop: asyncio.Event, hurry: asyncio.Event) -> None:
    """The first SIGINT or SIGTERM sets `stop`, further ones `hurry`."""

    def on_signal() -> None:
        event = hurry if stop.is_set() else stop
        event.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)


async def run(
    stack: Stack,
    stop: asyncio.Event,
    hurry: asyncio.Event,
    *,
    on_line: Callable[[str, str], None],
    announce: Callable[[str], None],
    on_ready: Callable[[], None] = lambda: None,
    lines_shown: bool = False,
) -> int:
    """Start, wait, keep, drain. `stop` begins the drain (also during the start), `hurry` cuts it short."""
    start = time.monotonic()
    supervisor = Supervisor(
        stack.children,
        max_crashes=stack.settings.max_crashes,
        announce=announce,
        on_line=on_line,
        lines_shown=lines_shown,
    )
    try:
        await supervisor.start()
        if await _ready_or_stopped(supervisor, stack, stop):
            announce(f"ready after {time.monotonic() - start:.1f} s")
            for line in stack.listeners:
                announce(line)
            on_ready()
            await supervisor.keep(stop)
        announce("stopping")
        return 0 if await supervisor.drain(stack.settings.stop_timeout_s, hurry) else 1
    except ServeError as error:
        announce(str(error))
        return 1
    finally:
        await supervisor.kill()


async def _ready_or_stopped(supervisor: Supervisor, stack: Stack, stop: asyncio.Event) -> bool:
    """True once ready, False if `stop` came first."""
    # gRPC is loaded only here: the children are starting meanwhile.
    from pagemill_client.aio import AsyncClient  # noqa: PLC0415
    from pagemill_client.errors import PagemillError  # noqa: PLC0415

    async with AsyncClient(stack.target, insecure=True) as client:

        async def probe() -> str | None:
            try:
                if await client.ready(timeout_s=PROBE_TIMEOUT_S):
                    return None
                alive = await client.alive(timeout_s=PROBE_TIMEOUT_S)
            except PagemillError as error:  # another server has the port: our gateway is about to say so and end
                return f"the gateway to answer at {stack.target} (something there answers {error.status})"
            return "an executor to become ready" if alive else f"the gateway to answer at {stack.target}"

        waits = [
            asyncio.create_task(_wait_ready(supervisor, probe, stack.settings.ready_timeout_s)),
            asyncio.create_task(stop.wait()),
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if waits[0].done():
                waits[0].result()
            return not stop.is_set()
        finally:
            for task in waits:
                task.cancel()
            await asyncio.gather(*waits, return_exceptions=True)


async def _wait_ready(supervisor: Supervisor, probe: Probe, timeout_s: float) -> bool:
    await supervisor.wait_ready(probe, timeout_s)
    return True


def _connect(loaded: Mapping[str, Any], directory: Path) -> dict[str, list[str]]:
    """Endpoint options for each role: private sockets, but for what the user chose."""
    added: dict[str, list[str]] = {role.name: [] for role in STOP_ORDER}
    for peer in (GATEWAY, EXECUTOR):
        option = f"{peer.name}_endpoint"
        endpoint = getattr(loaded[SCHEDULER.name], option)
        if option not in loaded[SCHEDULER.name].model_fields_set:
            endpoint = f"ipc://{directory}/{peer.name}s.sock"
            added[SCHEDULER.name] += [f"--{peer.name}-endpoint", endpoint]
        if "scheduler_endpoint" not in loaded[peer.name].model_fields_set:
            added[peer.name] += ["--scheduler-endpoint", endpoint]
    return added


def _check_times(settings: ServeSettings, loaded: Mapping[str, Any]) -> None:
    for role in (GATEWAY, SCHEDULER):
        drain_s = loaded[role.name].drain_timeout_s
        if drain_s >= settings.stop_timeout_s:
            raise OptionError(
                f"--stop-timeout-s {settings.stop_timeout_s:g} must be above the {role.name}'s "
                f"--drain-timeout-s {drain_s:g}: it would be killed while it drains"
            )


def _listeners(target: str, loaded: Mapping[str, Any]) -> tuple[str, ...]:
    lines = [f"gRPC on {target}"]
    gateway = loaded[GATEWAY.name]
    if gateway.admin_port:
        lines.append(f"admin gRPC on {Listener('--admin-port', gateway.admin_host, gateway.admin_port).address}")
    for role in STOP_ORDER:
        settings = loaded[role.name]
        if settings.metrics_port:
            lines.append(
                f"metrics of the {role.name} on http://{settings.metrics_host}:{settings.metrics_port}/metrics"
            )
    return tuple(lines)


def _other_ports(loaded: Mapping[str, Any]) -> tuple[Listener, ...]:
    """All but the one that clients call."""
    metrics = [
        Listener(f"--{role.name}.metrics-port", loaded[role.name].metrics_host, loaded[role.name].metrics_port)
        for role in STOP_ORDER
        if loaded[role.name].metrics_port
    ]
    gateway = loaded[GATEWAY.name]
    admin = [Listener("--admin-port", gateway.admin_host, gateway.admin_port)] if gateway.admin_port else []
    return (*admin, *metrics)


def _free_port(host: str, promised: Collection[int]) -> int:
    """Of the system's choice, but none that another listener has been promised: it may be chosen while that is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.ExitStack() as held:
        while True:  # what was chosen is held meanwhile, so that each choice is another
            probe = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, 0))
            if (port := int(probe.getsockname()[1])) not in promised:
                return port


def _announce(line: str) -> None:
    err(f"{ServeSettings.prog}: {line}")


def _help() -> int:
    """Own options as every command shows them, then those of the roles."""
    with contextlib.suppress(SystemExit):
        load(ServeSettings, ["--help"])
    try:
        for role in STOP_ORDER:
            sys.stdout.write(f"\noptions passed on to the {role.name} (--{role.name}.NAME if another has it too):\n")
            sys.stdout.write("".join(f"{line}\n" for line in _option_lines(role.settings_type())))
    except OptionError as error:
        err(f"{ServeSettings.prog}: {error}")
        return 1
    return 0


def _option_lines(settings_type: type[ServiceSettings]) -> list[str]:
    own = roles.defaults(ServeSettings)
    defaults = roles.defaults(settings_type)
    lines = []
    for name, field in settings_type.model_fields.items():
        flag = name.replace("_", "-")
        if flag not in own:
            lines.append(f"  --{flag:<28} {field.description} (default: {defaults[flag]})")
    return lines
