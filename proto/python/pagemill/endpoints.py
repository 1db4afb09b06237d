"""Where processes meet: checks an endpoint before a socket sees it, and gives the defaults.

`ipc://PATH` is the default: a socket file in a directory that only its owner may write to. `tcp://HOST:PORT` is
plaintext and unauthenticated until CURVE exists, so it needs an explicit `insecure`, and never binds every interface.
`check_host` holds the addresses of other listeners (gRPC, metrics) to the same word.
Everything wrong raises `EndpointError` with one line for the operator.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

MAX_IPC_PATH_BYTES = 107
"""sun_path holds 108 bytes with its closing zero."""

GATEWAYS_SOCKET = "gateways.sock"
EXECUTORS_SOCKET = "executors.sock"

_PROBE_TIMEOUT_S = 1.0


class EndpointError(ValueError):
    """An endpoint cannot be used; the text is one line for the operator."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A checked endpoint: `path` for ipc, otherwise `host` and `port` ("0" or "*": any free one)."""

    text: str
    path: Path | None = None
    host: str = ""
    port: str = ""


def default_endpoint(socket_name: str) -> str:
    """The ipc endpoint of this user for `GATEWAYS_SOCKET` or `EXECUTORS_SOCKET`.

    In the runtime directory, where there is one: the variable alone outlives it in containers and under sudo.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        directory = Path(runtime) / "pagemill"
    else:
        directory = Path(f"/tmp/pagemill-{os.getuid()}")  # noqa: S108 (0700, owner checked)
    return f"ipc://{directory / socket_name}"


def parse(text: str, *, insecure: bool = False) -> Endpoint:
    """A checked endpoint. Raises EndpointError for what must not or cannot be used."""
    scheme, separator, rest = text.partition("://")
    if not separator or scheme not in ("ipc", "tcp"):
        raise EndpointError(f"endpoint {text!r}: expected ipc://PATH or tcp://HOST:PORT")
    return _parse_ipc(text, rest) if scheme == "ipc" else _parse_tcp(text, rest, insecure)


def _parse_ipc(text: str, path: str) -> Endpoint:
    if not path.startswith("/"):  # "@name" (abstract: no permissions at all), "*" and relative paths
        raise EndpointError(f"endpoint {text!r}: an ipc path must be absolute")
    length = len(os.fsencode(path))
    if length > MAX_IPC_PATH_BYTES:
        raise EndpointError(f"endpoint {text!r}: path has {length} bytes, at most {MAX_IPC_PATH_BYTES} are possible")
    return Endpoint(text, path=Path(path))


def _parse_tcp(text: str, rest: str, insecure: bool) -> Endpoint:
    host, separator, port = rest.rpartition(":")
    if not separator or not host or not (port == "*" or (port.isascii() and port.isdigit() and int(port) < 65536)):
        raise EndpointError(f"endpoint {text!r}: expected tcp://HOST:PORT")
    if host == "*" or _is_every_interface(host):
        raise EndpointError(f"endpoint {text!r}: name one address; every interface is never bound")
    if not insecure:
        raise EndpointError(f"endpoint {text!r}: tcp is neither encrypted nor authenticated; allow it with --insecure")
    return Endpoint(text, host=host, port=port)


def check_host(host: str, option: str, *, insecure: bool) -> None:
    """Raise EndpointError, naming the `option`, if plaintext would be served beyond this machine unasked."""
    if not insecure and not is_loopback(host):
        raise EndpointError(f"{option} {host!r} is not a loopback address: without TLS that needs --insecure")


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine only. Names other than localhost count as public."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _is_every_interface(host: str) -> bool:
    """Whether a number in any spelling is the unspecified address, IPv4 inside IPv6 included."""
    text = host.strip("[]").partition("%")[0]
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        try:
            return not any(socket.inet_aton(text))  # "0", "0x0", "0.0": short forms that resolvers take
        except (OSError, UnicodeError):
            return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return address.is_unspecified or (mapped is not None and mapped.is_unspecified)


def bind_address(endpoint: Endpoint) -> str:
    """What to hand to bind. Host names are resolved here, since libzmq binds numbers and interface names only."""
    if endpoint.path is not None:
        return endpoint.text
    port = "*" if endpoint.port == "0" else endpoint.port
    if endpoint.host in {name for _, name in socket.if_nameindex()}:
        return f"tcp://{endpoint.host}:{port}"
    try:
        found = socket.getaddrinfo(endpoint.host.strip("[]"), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise EndpointError(f"endpoint {endpoint.text!r}: unknown host") from error
    family, address = found[0][0], str(found[0][4][0])
    if _is_every_interface(address):
        raise EndpointError(f"endpoint {endpoint.text!r}: name one address; every interface is never bound")
    return f"tcp://[{address}]:{port}" if family == socket.AF_INET6 else f"tcp://{address}:{port}"


class IpcClaim:
    """Ownership of an ipc path by this process, until `release`.

    libzmq unlinks whatever lies at an ipc path before it binds, so a second process would silently take over the
    endpoint of a living one. A lock beside the socket (freed by the kernel with its process) prevents that, and a
    trial connection finds listeners that do not lock.
    """

    def __init__(self, path: Path) -> None:
        _make_private(path.parent)
        self._path = path
        self._lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise EndpointError(f"endpoint ipc://{path}: another process is already listening there") from None
            _remove_stale(path)
        except BaseException:
            os.close(self._lock)
            raise

    def release(self) -> None:
        """Remove the socket file and let others bind; call it when the socket is closed.

        The lock file stays: unlinking it would let two processes lock two files of one name.
        """
        if self._path.is_socket():
            self._path.unlink()
        os.close(self._lock)


def _make_private(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, exist_ok=True)  # not its parents: a typo must not leave directories behind
        facts = directory.stat()
    except OSError as error:
        raise EndpointError(f"directory {directory} for ipc sockets: {error.strerror}") from error
    if facts.st_uid != os.getuid():
        raise EndpointError(f"directory {directory} for ipc sockets belongs to another user")
    if facts.st_mode & 0o022:
        raise EndpointError(f"directory {directory} for ipc sockets is writable by others; make it private (chmod 700)")


def _remove_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise EndpointError(f"endpoint ipc://{path}: a file that is not a socket is in the way")
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        probe.settimeout(_PROBE_TIMEOUT_S)
        probe.connect(os.fspath(path))
    except (ConnectionRefusedError, FileNotFoundError):
        path.unlink(missing_ok=True)
    except OSError as error:  # a full backlog: somebody is there
        raise EndpointError(f"endpoint ipc://{path}: cannot tell whether it is in use: {error.strerror}") from error
    else:
        raise EndpointError(f"endpoint ipc://{path}: another process is already listening there")
    finally:
        probe.close()
