"""Listening gRPC ports: one clear line when one cannot be had."""

from __future__ import annotations

import socket

import grpc

from pagemill.endpoints import EndpointError


def listen(server: grpc.aio.Server, host: str, port: int, *, what: str, options: str) -> int:
    """Have `server` listen in clear text, once started; the port, chosen by the system for 0.

    Raises EndpointError naming `what` and the `options` that say where.
    """
    address = f"[{host}]" if ":" in host and not host.startswith("[") else host
    where = f"{address}:{port}"
    reason = why_not_bindable(host.strip("[]"), port)  # gRPC would log a line of its own
    if reason is not None:
        raise EndpointError(f"{what} cannot listen on {where} ({options}): {reason}")
    try:
        return int(server.add_insecure_port(where))
    except RuntimeError as error:
        raise EndpointError(f"{what} cannot listen on {where} ({options})") from error


def why_not_bindable(host: str, port: int) -> str | None:
    """What the system says if none of the host's addresses can be bound; None if one can, now."""
    reason = None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        return error.strerror
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except OSError as error:
            reason = error.strerror or str(error)
        else:
            return None
    return reason
