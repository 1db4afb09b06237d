"""Whether the TCP ports that the roles will listen on are free, found out before anything is started.

A service that holds the gRPC port may well answer "healthy": only a port that was free before the gateway started
makes the answer there the gateway's own.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from pagemill_client.roles import OptionError


@dataclass(frozen=True, slots=True)
class Listener:
    """A fixed port that a role will bind: by which option, where."""

    option: str
    host: str
    port: int

    @property
    def address(self) -> str:
        """host:port as people write it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def check_free(listeners: Sequence[Listener]) -> None:
    """Listen on all of them for a moment, together. Raises OptionError: one line with the option and the address."""
    with contextlib.ExitStack() as held:
        for i, listener in enumerate(listeners):
            try:
                _listen(listener, held)
            except OSError as error:
                rival = _rival(listener, listeners[:i]) if error.errno == errno.EADDRINUSE else None
                raise OptionError(_refusal(listener, error, rival)) from error


def _listen(listener: Listener, held: contextlib.ExitStack) -> None:
    """Raises OSError if one of the host's addresses is in use, or none can be bound at all."""
    found = socket.getaddrinfo(listener.host, listener.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    failure: OSError | None = None
    bound = 0
    for family, kind, protocol, _, address in found:
        try:
            server = held.enter_context(socket.socket(family, kind, protocol))
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: TIME_WAIT does not count
            server.bind(address)
            server.listen(1)
            bound += 1
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
            failure = error  # a name may have an IPv6 address on a machine without IPv6
    if failure is not None and not bound:
        raise failure


def _rival(listener: Listener, earlier: Sequence[Listener]) -> Listener | None:
    return next((other for other in earlier if other.port == listener.port), None)


def _refusal(listener: Listener, error: OSError, rival: Listener | None) -> str:
    if rival is not None:
        return (
            f"{listener.option}: {listener.address} is also {rival.option}'s {rival.address}; "
            "give each a port of its own (0 switches a metrics page or the admin service off)"
        )
    reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
    return f"{listener.option}: cannot listen on {listener.address}: {reason}"
