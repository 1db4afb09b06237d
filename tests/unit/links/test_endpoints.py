from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from pagemill import endpoints
from pagemill.endpoints import EndpointError, IpcClaim


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ipc://relative", "absolute"),
        ("ipc://@abstract", "absolute"),
        ("ipc://*", "absolute"),
        ("ipc:///" + "x" * 107, "107"),
        ("tcp://127.0.0.1:5560", "--insecure"),
        ("udp://127.0.0.1:5560", "expected ipc"),
        ("nonsense", "expected ipc"),
    ],
)
def test_endpoints_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(EndpointError, match=message):
        endpoints.parse(text)


@pytest.mark.parametrize(
    "host",
    ["*", "0.0.0.0", "[::]", "::", "0", "0x0", "0.0", "00.0.0.0", "[::0]", "[0:0:0:0:0:0:0:0]", "[::%lo]"]
    + [f"{head}{tail}" for head, tail in (("[::ffff:", "0.0.0.0]"), ("[::ffff:", "0:0]"), ("::ffff:", "0.0.0.0"))],
)
def test_every_interface_is_never_bound(host: str) -> None:
    with pytest.raises(EndpointError, match="one address"):
        endpoints.parse(f"tcp://{host}:5560", insecure=True)


def test_name_that_resolves_to_every_interface_is_never_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::ffff:0.0.0.0", 0, 0, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: found)
    with pytest.raises(EndpointError, match="one address"):
        endpoints.bind_address(endpoints.parse("tcp://host.example.org:5560", insecure=True))


@pytest.mark.parametrize("text", ["tcp://127.0.0.1", "tcp://:5560", "tcp://127.0.0.1:99999", "tcp://127.0.0.1:x"])
def test_tcp_needs_host_and_port(text: str) -> None:
    with pytest.raises(EndpointError, match="HOST:PORT"):
        endpoints.parse(text, insecure=True)


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("::1", True), ("[::1]", True), ("localhost", True), ("127.8.8.8", True)]
    + [(h, False) for h in ("0.0.0.0", "::", "10.0.0.1", "example.org", "", "localhost.example.org")],
)
def test_s12_only_loopback_addresses_are_loopback(host: str, expected: bool) -> None:
    assert endpoints.is_loopback(host) is expected
    endpoints.check_host(host, "--host", insecure=True)
    if expected:
        endpoints.check_host(host, "--host", insecure=False)
    else:
        with pytest.raises(EndpointError, match=r"^--host .* needs --insecure$"):
            endpoints.check_host(host, "--host", insecure=False)


def test_names_are_resolved_for_binding() -> None:
    address = endpoints.bind_address(endpoints.parse("tcp://localhost:0", insecure=True))
    assert address in ("tcp://127.0.0.1:*", "tcp://[::1]:*")
    with pytest.raises(EndpointError, match="unknown host"):
        endpoints.bind_address(endpoints.parse("tcp://no-such-host.invalid:1", insecure=True))


def test_longest_path_is_allowed() -> None:
    assert endpoints.parse("ipc:///" + "x" * 106).path is not None


def test_default_follows_the_runtime_directory_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert endpoints.default_endpoint("a.sock") == f"ipc://{tmp_path}/pagemill/a.sock"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "gone"))
    assert endpoints.default_endpoint("a.sock") == f"ipc:///tmp/pagemill-{os.getuid()}/a.sock"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert endpoints.default_endpoint("a.sock") == f"ipc:///tmp/pagemill-{os.getuid()}/a.sock"


def test_directory_is_made_private(socket_dir: Path) -> None:
    claim = IpcClaim(socket_dir / "new" / "a.sock")
    assert (socket_dir / "new").stat().st_mode & 0o777 == 0o700
    claim.release()


def test_a_typo_leaves_no_directories_behind(socket_dir: Path) -> None:
    with pytest.raises(EndpointError, match=r"/tpyo/pagemill for ipc sockets: No such file or directory$"):
        IpcClaim(socket_dir / "tpyo" / "pagemill" / "a.sock")
    assert not (socket_dir / "tpyo").exists()


def test_directory_others_may_write_to_is_refused(socket_dir: Path) -> None:
    socket_dir.chmod(0o777)
    with pytest.raises(EndpointError, match="private"):
        IpcClaim(socket_dir / "a.sock")


def test_claim_is_exclusive_until_released(socket_dir: Path) -> None:
    claim = IpcClaim(socket_dir / "a.sock")
    with pytest.raises(EndpointError, match="already listening"):
        IpcClaim(socket_dir / "a.sock")
    claim.release()
    IpcClaim(socket_dir / "a.sock").release()


def test_stale_socket_is_removed_and_a_living_one_is_not(socket_dir: Path) -> None:
    path = socket_dir / "a.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(path))
        listener.listen()
        with pytest.raises(EndpointError, match="already listening"):
            IpcClaim(path)
        assert path.exists()
    IpcClaim(path).release()
    assert not path.exists()


def test_other_files_are_never_removed(socket_dir: Path) -> None:
    path = socket_dir / "a.sock"
    path.write_text("mine")
    with pytest.raises(EndpointError, match="not a socket"):
        IpcClaim(path)
    assert path.read_text() == "mine"
