"""What a call can end with, and the one function that maps a gRPC status to it.

::

    PagemillError
    ├── InvalidRequestError     the request can never work as it is (see `violations`)
    ├── AccessError             UNAUTHENTICATED, PERMISSION_DENIED
    ├── OverloadedError         queue or quota is full: try again after `retry_after_s`
    ├── UnavailableError        this server cannot serve now (not reachable, not ready, draining)
    ├── DeadlineExceededError   `timeout_s` passed
    ├── RequestCancelledError   this call was cancelled by its own side
    ├── AbortedError            the server gave the stream up (SLOW_CONSUMER, POISON_REQUEST)
    └── ServerError             a fault of the server
        └── ProtocolError       the stream broke the contract (a gap, no end, an event after the end)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import grpc

DETAILS_KEY = "grpc-status-details-bin"
PUSHBACK_KEY = "grpc-retry-pushback-ms"


@dataclass(frozen=True, slots=True)
class Violation:
    """One field of the request and what is wrong with it."""

    field: str
    description: str


class PagemillError(Exception):
    """Base of all errors of this package.

    `reason` is the server's ErrorInfo reason ("" when the status came from the transport), `status` the gRPC status
    name, `retry_after_s` the server's advice (None: none given). With `no_retry` the server asks that no library
    repeats the call by itself; its user may.
    """

    def __init__(
        self,
        message: str,
        *,
        status: str = "UNKNOWN",
        reason: str = "",
        violations: tuple[Violation, ...] = (),
        retry_after_s: float | None = None,
        no_retry: bool = False,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.reason = reason
        self.violations = violations
        self.retry_after_s = retry_after_s
        self.no_retry = no_retry

    def __str__(self) -> str:
        name = self.reason or self.status
        fields = "".join(f"; {v.field}: {v.description}" for v in self.violations if v.description not in self.message)
        return f"{name}: {self.message}{fields}"


class InvalidRequestError(PagemillError):
    """The request can never work as it is."""


class AccessError(PagemillError):
    """The caller is not known or not allowed."""


class OverloadedError(PagemillError):
    """Queue or quota is full; the server is healthy."""


class UnavailableError(PagemillError):
    """This server cannot serve now."""


class DeadlineExceededError(PagemillError):
    """The call's own deadline passed."""


class RequestCancelledError(PagemillError):
    """The call was cancelled by its own side."""


class AbortedError(PagemillError):
    """The server gave the stream up."""


class ServerError(PagemillError):
    """A fault of the server."""


class ProtocolError(ServerError):
    """The stream broke the contract."""


_CLASS_OF_STATUS: dict[str, type[PagemillError]] = {
    "INVALID_ARGUMENT": InvalidRequestError,
    "NOT_FOUND": InvalidRequestError,
    "FAILED_PRECONDITION": InvalidRequestError,
    "ALREADY_EXISTS": InvalidRequestError,
    "OUT_OF_RANGE": InvalidRequestError,
    "UNIMPLEMENTED": InvalidRequestError,
    "UNAUTHENTICATED": AccessError,
    "PERMISSION_DENIED": AccessError,
    "RESOURCE_EXHAUSTED": OverloadedError,
    "UNAVAILABLE": UnavailableError,
    "DEADLINE_EXCEEDED": DeadlineExceededError,
    "CANCELLED": RequestCancelledError,
    "ABORTED": AbortedError,
}


class FailedCall(Protocol):
    """What blocking and asyncio RPC errors have in common."""

    def code(self) -> grpc.StatusCode:
        """The status."""
        ...

    def details(self) -> str | None:
        """The status message."""
        ...

    def trailing_metadata(self) -> Any:
        """Pairs of name and value (str, or bytes for names in -bin); None counts as empty."""
        ...


def from_rpc(call: FailedCall) -> PagemillError:
    """The exception for a failed call. Trailers that do not parse count as absent."""
    trailers = dict(call.trailing_metadata() or ())
    reason, violations, retry_after_s = _read_details(trailers.get(DETAILS_KEY))
    pushback = trailers.get(PUSHBACK_KEY)
    if retry_after_s is None:
        retry_after_s = _read_pushback(pushback)
    status = call.code().name
    return _CLASS_OF_STATUS.get(status, ServerError)(
        call.details() or "no message",
        status=status,
        reason=reason,
        violations=violations,
        retry_after_s=retry_after_s,
        no_retry=isinstance(pushback, str) and pushback.startswith("-"),
    )


def _read_details(raw: str | bytes | None) -> tuple[str, tuple[Violation, ...], float | None]:
    """Reason, violations and retry delay of a serialised google.rpc.Status."""
    if not isinstance(raw, bytes):
        return "", (), None
    from google.protobuf.message import DecodeError  # noqa: PLC0415  (only failed calls pay for these)
    from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]  # noqa: PLC0415

    info = error_details_pb2.ErrorInfo()
    bad = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    retry_after_s = None
    try:
        for detail in status_pb2.Status.FromString(raw).details:
            for kind in (info, bad, retry):
                detail.Unpack(kind)
            if detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
                retry_after_s = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
    except DecodeError:
        return "", (), None
    violations = tuple(Violation(v.field, v.description) for v in bad.field_violations)
    return info.reason, violations, retry_after_s


def _read_pushback(raw: str | bytes | None) -> float | None:
    """Seconds; a negative pushback means "do not retry" and is None here."""
    if isinstance(raw, str) and raw.isascii() and raw.isdigit():
        return int(raw) / 1000
    return None
