"""How a channel is set up: where it may go in clear text, what is retried, keepalive, sizes. Pure but for TLS files."""

from __future__ import annotations

import ipaddress
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEFAULT_TARGET = "127.0.0.1:50051"
MAX_MESSAGE_BYTES = 16 * 1024 * 1024  # 128k token ids are about 390 KB; an unlimited size is never right

SERVICES = ("pagemill.v1.InferenceService", "pagemill.v1.ModelService", "grpc.health.v1.Health")

_SERVICE_CONFIG = json.dumps(
    {
        "methodConfig": [
            {
                "name": [{"service": name} for name in SERVICES],
                # The library retries a call only until response headers arrive. Servers send them at admission, so
                # work that was accepted is never run twice; a server's grpc-retry-pushback-ms is honoured. Not
                # RESOURCE_EXHAUSTED, which also says that a message is too large: `retries` looks at its reason.
                "retryPolicy": {
                    "maxAttempts": 3,
                    "initialBackoff": "0.1s",
                    "maxBackoff": "2s",
                    "backoffMultiplier": 2,
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            }
        ],
        # Ten failures in a row stop retries until successes earn them back: no retry storm onto a failing server.
        "retryThrottling": {"maxTokens": 10, "tokenRatio": 0.1},
    }
)


@dataclass(frozen=True, slots=True)
class TlsCredentials:
    """Files in PEM. None for `root_certificates`: the roots gRPC ships with; a key needs its certificate chain."""

    root_certificates: Path | None = None
    private_key: Path | None = None
    certificate_chain: Path | None = None

    def load(self) -> Any:
        """`grpc.ChannelCredentials`; raises OSError for a file that cannot be read."""
        import grpc  # noqa: PLC0415  (keeps the rest of this module importable without gRPC)

        return grpc.ssl_channel_credentials(
            root_certificates=_read(self.root_certificates),
            private_key=_read(self.private_key),
            certificate_chain=_read(self.certificate_chain),
        )


def is_local(target: str) -> bool:
    """Whether a gRPC target stays on this machine: a unix socket or a loopback address."""
    scheme, _, rest = target.partition(":")
    if scheme in ("unix", "unix-abstract"):
        return True
    address = rest.lstrip("/") if scheme in ("dns", "ipv4", "ipv6") else target
    host = address.partition("]")[0].removeprefix("[") if address.startswith("[") else address.rpartition(":")[0]
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def choose_credentials(target: str, tls: TlsCredentials | None, insecure: bool) -> TlsCredentials | None:
    """None for clear text, which leaves this machine only on the caller's word.

    Without either, a remote target gets TLS with the default roots. Raises ValueError if both are given.
    """
    if tls is not None and insecure:
        raise ValueError("got both TLS credentials and insecure=True, expected at most one")
    if tls is not None:
        return tls
    return None if insecure or is_local(target) else TlsCredentials()


def channel_options(target: str) -> list[tuple[str, Any]]:
    """Arguments of the gRPC channel."""
    options: list[tuple[str, Any]] = [
        ("grpc.service_config", _SERVICE_CONFIG),
        ("grpc.enable_retries", 1),
        ("grpc.primary_user_agent", "pagemill-client"),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        # A long prompt makes a silent stream: pings find a dead peer. Servers allow one per 10 s.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 0),
    ]
    # One connection per client object, so that a program that wants more opens more (gateways cap streams on each).
    options.append(("grpc.use_local_subchannel_pool", 1))
    if is_local(target):
        options += [
            ("grpc.enable_http_proxy", 0),
            # A local server that is just starting should be found at once, not after the default second.
            ("grpc.initial_reconnect_backoff_ms", 50),
            ("grpc.max_reconnect_backoff_ms", 2_000),
        ]
    return options


def _read(path: Path | None) -> bytes | None:
    return None if path is None else path.read_bytes()
