"""The table of errors is whole, and what a client decodes is what was meant."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from pagemill.errors import HTTP_STATUS_OF, PUSHBACK_KEY, STATUS_OF, PagemillError, Reason, Status, invalid, unsupported
from scheduler_svc.gateway.status import DETAILS_KEY, grpc_code, hide, trailers


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_has_a_status_that_grpc_and_http_know(reason: Reason) -> None:
    assert grpc_code(STATUS_OF[reason]).name == STATUS_OF[reason].name
    assert 400 <= HTTP_STATUS_OF[STATUS_OF[reason]] < 600


def test_status_numbers_are_grpcs() -> None:
    for status in Status:
        assert getattr(grpc.StatusCode, status.name).value[0] == status.value


def details(error: PagemillError) -> status_pb2.Status:
    return status_pb2.Status.FromString(dict(trailers(error))[DETAILS_KEY])


def test_details_carry_reason_violations_and_retry() -> None:
    info, bad, retry = (
        error_details_pb2.ErrorInfo(),
        error_details_pb2.BadRequest(),
        error_details_pb2.RetryInfo(),
    )
    status = details(invalid("a.b", "wrong"))
    assert status.details[0].Unpack(info)
    assert status.details[1].Unpack(bad)
    assert (info.domain, info.reason) == ("pagemill", "INVALID_PARAMETER")
    assert [(v.field, v.description) for v in bad.field_violations] == [("a.b", "wrong")]
    full = PagemillError(Reason.QUEUE_FULL, "full", retry_after_ms=1500)
    assert details(full).details[1].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 1500
    assert dict(trailers(full))[PUSHBACK_KEY] == "1500"
    assert PUSHBACK_KEY not in dict(trailers(unsupported("x")))


def test_s26_a_hidden_exception_tells_nothing() -> None:
    error = hide(ValueError("secret"))
    assert error.reason is Reason.INTERNAL
    assert "secret" not in error.message
    assert "ValueError" not in error.message
