"""Options of the gateway process: flags, environment and file, validated once."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import ClassVar

from pydantic import Field, model_validator

from pagemill.endpoints import GATEWAYS_SOCKET, check_host, default_endpoint
from pagemill.settings import ServiceSettings


class GatewaySettings(ServiceSettings):
    """All that an operator may choose about a gateway."""

    prog: ClassVar[str] = "pagemill gateway"

    model: Path
    """Model whose tokenizer and chat template are used: a Hugging Face directory or a GGUF file."""
    model_name: str = Field(default="", max_length=128, pattern=r"^[\x21-\x7e]*$")
    """Name that clients use for the model. Default: the model file's or directory's own name."""
    scheduler_endpoint: str = default_endpoint(GATEWAYS_SOCKET)
    """Where the scheduler's gateway socket is: ipc://PATH or (with --insecure) tcp://HOST:PORT."""
    insecure: bool = False
    """Allow plaintext where encryption belongs: a tcp link to the scheduler, a public address without TLS."""
    host: str = "127.0.0.1"
    """Address to serve gRPC on."""
    port: int = Field(default=50051, ge=0, le=65535)
    """Port to serve gRPC on; 0 takes a free one."""
    admin_host: str = "127.0.0.1"
    """Address to serve the admin service on, which has no authentication: whoever reaches it may use it."""
    admin_port: int = Field(default=50052, ge=0, le=65535)
    """Port to serve the admin service on; 0 serves none."""
    metrics_host: str = "127.0.0.1"
    """Address to serve Prometheus metrics on."""
    metrics_port: int = Field(default=9100, ge=0, le=65535)
    """Port to serve Prometheus metrics on; 0 serves none."""
    reflection: bool = False
    """Offer gRPC server reflection."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Most tokens of prompt and output together. Default: the model's own limit, or the executor's if that is lower."""
    max_live_requests: int = Field(default=10_000, ge=1)
    """Requests in this gateway, waiting or running, beyond which new ones get QUEUE_FULL."""
    max_streams_per_connection: int = Field(default=100, ge=1)
    """Concurrent calls per client connection; further ones wait inside the client, which may open more connections."""
    max_connections: int | None = Field(default=None, ge=1)
    """Client connections; further ones are hung up on. Default, and most: half of the files that this process may open,
    since each connection is one; by default no more than 10000."""
    max_message_bytes: int = Field(default=8 * 1024 * 1024, ge=64 * 1024, le=256 * 1024 * 1024)
    """Largest gRPC message in bytes, either way; a larger request ends with RESOURCE_EXHAUSTED, unread."""
    slow_client_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds that a client may leave its stream unread before it is ended with SLOW_CONSUMER."""
    session_wait_s: float = Field(default=3.0, ge=0)
    """Seconds that a new request waits while the scheduler is not connected, before NOT_READY."""
    answer_timeout_s: float = Field(default=5.0, gt=0)
    """Seconds that the scheduler may take to queue or refuse a request. Then it is sent again over a new session; after
    three times the request fails with NOT_READY."""
    resume_timeout_s: float = Field(default=60.0, ge=0)
    """Seconds that a stream which was admitted waits for a restarted scheduler that does not take it yet."""
    drain_timeout_s: float = Field(default=30.0, ge=0)
    """Seconds that running streams get to finish after SIGTERM."""
    chat_render_timeout_s: float = Field(default=2.0, gt=0)
    """Seconds that one rendering of the chat template may take."""
    die_with_parent: bool = False
    """Exit when the process that started this one dies."""

    @property
    def connection_limit(self) -> int:
        """Most client connections."""
        return self.max_connections or min(10_000, _half_of_the_files())

    @model_validator(mode="after")
    def _files_for_connections(self) -> GatewaySettings:
        most = _half_of_the_files()
        if self.max_connections is not None and self.max_connections > most:
            raise ValueError(f"--max-connections: at most {most}, half of the files this process may open (ulimit -n)")
        return self

    @model_validator(mode="after")
    def _plaintext_stays_at_home(self) -> GatewaySettings:
        check_host(self.host, "--host", insecure=self.insecure)
        check_host(self.admin_host, "--admin-host", insecure=self.insecure)
        check_host(self.metrics_host, "--metrics-host", insecure=self.insecure)
        return self


def _half_of_the_files() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1_000_000 if soft == resource.RLIM_INFINITY else max(1, soft // 2)
