"""Every error a caller of Pagemill can meet: its reason, its gRPC status, its HTTP status. Plain data, no grpc.

    PagemillError             a request ends with this reason; the text is from our catalogue, never an exception's
    └── InvalidParameterError    one or more fields of the request are wrong; names each

A reason, once released, is kept. On the wire it is `google.rpc.ErrorInfo{domain "pagemill", reason}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

DOMAIN = "pagemill"
"""`domain` of ErrorInfo in every error of ours."""

PUSHBACK_KEY = "grpc-retry-pushback-ms"
"""Trailing metadata that tells a gRPC client library when to retry."""


class Status(Enum):
    """The gRPC status codes in use, by their numbers."""

    CANCELLED = 1
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


class Reason(Enum):
    """Why a request failed; the value is `ErrorInfo.reason` and the HTTP error's `code`."""

    INVALID_PARAMETER = "INVALID_PARAMETER"
    UNSUPPORTED_FEATURE = "UNSUPPORTED_FEATURE"
    CONTEXT_LENGTH_EXCEEDED = "CONTEXT_LENGTH_EXCEEDED"
    MODEL_NOT_FOUND = "MODEL_NOT_FOUND"
    PROMPT_EXCEEDS_KV_CAPACITY = "PROMPT_EXCEEDS_KV_CAPACITY"
    DUPLICATE_REQUEST_ID = "DUPLICATE_REQUEST_ID"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    QUEUE_FULL = "QUEUE_FULL"
    QUEUE_TIMEOUT = "QUEUE_TIMEOUT"
    TENANT_QUOTA = "TENANT_QUOTA"
    NOT_READY = "NOT_READY"
    DRAINING = "DRAINING"
    NO_EXECUTOR = "NO_EXECUTOR"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    CANCELLED = "CANCELLED"
    SLOW_CONSUMER = "SLOW_CONSUMER"
    POISON_REQUEST = "POISON_REQUEST"
    NUMERICAL_ERROR = "NUMERICAL_ERROR"
    INTERNAL = "INTERNAL"


STATUS_OF: Mapping[Reason, Status] = {
    Reason.INVALID_PARAMETER: Status.INVALID_ARGUMENT,
    Reason.UNSUPPORTED_FEATURE: Status.INVALID_ARGUMENT,
    Reason.CONTEXT_LENGTH_EXCEEDED: Status.INVALID_ARGUMENT,
    Reason.MODEL_NOT_FOUND: Status.NOT_FOUND,
    Reason.PROMPT_EXCEEDS_KV_CAPACITY: Status.FAILED_PRECONDITION,
    Reason.DUPLICATE_REQUEST_ID: Status.ALREADY_EXISTS,
    Reason.UNAUTHENTICATED: Status.UNAUTHENTICATED,
    Reason.PERMISSION_DENIED: Status.PERMISSION_DENIED,
    Reason.QUEUE_FULL: Status.RESOURCE_EXHAUSTED,
    Reason.QUEUE_TIMEOUT: Status.RESOURCE_EXHAUSTED,
    Reason.TENANT_QUOTA: Status.RESOURCE_EXHAUSTED,
    Reason.NOT_READY: Status.UNAVAILABLE,
    Reason.DRAINING: Status.UNAVAILABLE,
    Reason.NO_EXECUTOR: Status.UNAVAILABLE,
    Reason.DEADLINE_EXCEEDED: Status.DEADLINE_EXCEEDED,
    Reason.CANCELLED: Status.CANCELLED,
    Reason.SLOW_CONSUMER: Status.ABORTED,
    Reason.POISON_REQUEST: Status.ABORTED,
    Reason.NUMERICAL_ERROR: Status.INTERNAL,
    Reason.INTERNAL: Status.INTERNAL,
}
"""One gRPC status per reason. RESOURCE_EXHAUSTED: this server is healthy, come back later. UNAVAILABLE: it cannot
serve now, try another."""

HTTP_STATUS_OF: Mapping[Status, int] = {
    Status.CANCELLED: 499,
    Status.INVALID_ARGUMENT: 400,
    Status.DEADLINE_EXCEEDED: 504,
    Status.NOT_FOUND: 404,
    Status.ALREADY_EXISTS: 409,
    Status.PERMISSION_DENIED: 403,
    Status.RESOURCE_EXHAUSTED: 429,
    Status.FAILED_PRECONDITION: 400,
    Status.ABORTED: 409,
    Status.INTERNAL: 500,
    Status.UNAVAILABLE: 503,
    Status.UNAUTHENTICATED: 401,
}


@dataclass(frozen=True, slots=True)
class Violation:
    """One wrong field: its path in the request, and what was expected."""

    field: str
    description: str


class PagemillError(Exception):
    """A request ends with `reason`; `message` is one line for the caller, with the numbers."""

    def __init__(self, reason: Reason, message: str, *, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.retry_after_ms = retry_after_ms
        """When a retry may succeed. None: unknown."""
        self.violations: tuple[Violation, ...] = ()

    @property
    def status(self) -> Status:
        """gRPC status of the reason."""
        return STATUS_OF[self.reason]


class InvalidParameterError(PagemillError):
    """Fields of the request are wrong (INVALID_PARAMETER) or not supported by this version (UNSUPPORTED_FEATURE)."""

    def __init__(self, *violations: Violation, reason: Reason = Reason.INVALID_PARAMETER) -> None:
        super().__init__(reason, "; ".join(f"{v.field}: {v.description}" for v in violations))
        self.violations = violations


def invalid(field: str, description: str) -> InvalidParameterError:
    """The error of one wrong field."""
    return InvalidParameterError(Violation(field, description))


def unsupported(field: str, description: str = "not supported by this server version") -> InvalidParameterError:
    """The error of one field that this version refuses rather than ignores."""
    return InvalidParameterError(Violation(field, description), reason=Reason.UNSUPPORTED_FEATURE)
