"""Client for Pagemill: `Client` (blocking), `AsyncClient` (asyncio), their events and errors.

Names are loaded on first use, so that `pagemill --help` and `import pagemill_client.types` do not pay for gRPC.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagemill_client.aio import AsyncClient, AsyncGenerateStream
    from pagemill_client.channel import TlsCredentials
    from pagemill_client.errors import (
        AbortedError,
        AccessError,
        DeadlineExceededError,
        InvalidRequestError,
        OverloadedError,
        PagemillError,
        ProtocolError,
        RequestCancelledError,
        ServerError,
        UnavailableError,
        Violation,
    )
    from pagemill_client.options import GenerateOptions
    from pagemill_client.sync import Client, GenerateStream
    from pagemill_client.types import (
        Accepted,
        Bill,
        Delta,
        Event,
        Finished,
        FinishReason,
        Generation,
        Message,
        ModelInfo,
        Output,
        TokenLogprobs,
        Usage,
    )

_HOME = {
    "AsyncClient": "aio",
    "AsyncGenerateStream": "aio",
    "TlsCredentials": "channel",
    "GenerateOptions": "options",
    "Client": "sync",
    "GenerateStream": "sync",
    **dict.fromkeys(
        (
            "AbortedError",
            "AccessError",
            "DeadlineExceededError",
            "InvalidRequestError",
            "OverloadedError",
            "PagemillError",
            "ProtocolError",
            "RequestCancelledError",
            "ServerError",
            "UnavailableError",
            "Violation",
        ),
        "errors",
    ),
    **dict.fromkeys(
        (
            "Accepted",
            "Bill",
            "Delta",
            "Event",
            "FinishReason",
            "Finished",
            "Generation",
            "Message",
            "ModelInfo",
            "Output",
            "TokenLogprobs",
            "Usage",
        ),
        "types",
    ),
}

__all__ = [
    "AbortedError",
    "Accepted",
    "AccessError",
    "AsyncClient",
    "AsyncGenerateStream",
    "Bill",
    "Client",
    "DeadlineExceededError",
    "Delta",
    "Event",
    "FinishReason",
    "Finished",
    "GenerateOptions",
    "GenerateStream",
    "Generation",
    "InvalidRequestError",
    "Message",
    "ModelInfo",
    "Output",
    "OverloadedError",
    "PagemillError",
    "ProtocolError",
    "RequestCancelledError",
    "ServerError",
    "TlsCredentials",
    "TokenLogprobs",
    "UnavailableError",
    "Usage",
    "Violation",
]


def __getattr__(name: str) -> Any:
    module = _HOME.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
