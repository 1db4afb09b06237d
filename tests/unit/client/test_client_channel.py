"""Where clear text may go, and that the names of channel options exist."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

import pagemill_client
from pagemill_client.channel import SERVICES, TlsCredentials, channel_options, choose_credentials, is_local
from pagemill_client.errors import from_rpc


@pytest.mark.parametrize(
    "target",
    [
        "127.0.0.1:50051", "localhost:1", "[::1]:50051", "unix:/run/x.sock", "unix:///run/x.sock", "unix-abstract:x",
        "ipv4:127.0.0.1:1", "ipv6:[::1]:1", "dns:///localhost:1", "127.8.9.10:1",
    ],
)  # fmt: skip
def test_local_targets_are_clear_text(target: str) -> None:
    assert is_local(target)
    assert choose_credentials(target, None, insecure=False) is None


@pytest.mark.parametrize(
    "target",
    [
        "10.0.0.1:50051", "example.org:443", "[2001:db8::1]:1", "dns:///example.org:1", "0.0.0.0:1",
        "localhost.evil.org:1", "127.0.0.1.evil.org:1", "localhost@evil.org:1",
    ],
)  # fmt: skip
def test_remote_targets_get_tls_unless_told_otherwise(target: str) -> None:
    assert not is_local(target)
    assert choose_credentials(target, None, insecure=False) == TlsCredentials()
    assert choose_credentials(target, None, insecure=True) is None


def test_own_credentials_are_used_even_locally_and_never_with_insecure() -> None:
    tls = TlsCredentials(root_certificates=Path("ca.pem"))
    assert choose_credentials("127.0.0.1:1", tls, insecure=False) is tls
    with pytest.raises(ValueError, match="both"):
        choose_credentials("127.0.0.1:1", tls, insecure=True)


def test_credentials_that_cannot_be_read_say_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        TlsCredentials(root_certificates=tmp_path / "missing.pem").load()


def test_every_channel_option_is_a_key_grpc_knows() -> None:
    """A misspelt option is ignored without a word, so the library itself is asked."""
    library = importlib.import_module("grpc._cython.cygrpc").__file__
    assert library is not None
    content = Path(library).read_bytes()
    for name, _ in [*channel_options("127.0.0.1:1"), *channel_options("example.org:1")]:
        assert name.encode() in content, name


def test_retries_cover_all_services_and_are_throttled() -> None:
    config = json.loads(dict(channel_options("x:1"))["grpc.service_config"])
    (method,) = config["methodConfig"]
    assert [name["service"] for name in method["name"]] == list(SERVICES)
    assert method["retryPolicy"]["maxAttempts"] == 3
    # The others are decided by reason (`retries`), for which gRPC has no eye.
    assert method["retryPolicy"]["retryableStatusCodes"] == ["UNAVAILABLE"]
    assert config["retryThrottling"]["maxTokens"] == 10


class _Call:
    def __init__(self, trailers: tuple[tuple[str, str | bytes], ...] | None) -> None:
        self._trailers = trailers

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> None:
        return None

    def trailing_metadata(self) -> tuple[tuple[str, str | bytes], ...] | None:
        return self._trailers


@pytest.mark.parametrize(
    "trailers",
    [None, (), (("grpc-status-details-bin", b"\xff\xff\xff"),), (("grpc-retry-pushback-ms", "soon"),)],
)
def test_trailers_that_do_not_parse_count_as_absent(trailers: tuple[tuple[str, str | bytes], ...] | None) -> None:
    error = from_rpc(_Call(trailers))
    assert (error.status, error.reason, error.violations, error.retry_after_s) == ("UNAVAILABLE", "", (), None)


def test_everything_exported_exists_and_is_sorted() -> None:
    assert pagemill_client.__all__ == sorted(pagemill_client.__all__)
    for name in pagemill_client.__all__:
        assert getattr(pagemill_client, name) is not None
    assert set(pagemill_client.__all__) == set(pagemill_client._HOME)


def test_importing_the_package_loads_no_grpc() -> None:
    code = "import sys, pagemill_client.cli; sys.exit(any(m in sys.modules for m in ('grpc', 'pydantic', 'asyncio')))"
    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == 0
