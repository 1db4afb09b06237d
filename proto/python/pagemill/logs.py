"""Structured logs: a constant event name and keys, one line each, the same keys in every process.

``log.info("ready", extra=kv(port=50051))`` prints ``2026-11-29T15:44:00.123Z info gateway ready port=50051``.
Prompts and outputs are never logged; nothing per token above debug.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import sys
import time
from logging.handlers import QueueHandler, QueueListener
from typing import Any

REQUEST_ID = "request_id"
SEQ_ID = "seq_id"
STEP_ID = "step_id"


def kv(**keys: Any) -> dict[str, Any]:
    """Keys of one event, for the `extra` argument of a logging call."""
    return {"kv": keys}


class _Formatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        keys = " ".join(f"{k}={_plain(v)}" for k, v in getattr(record, "kv", {}).items())
        line = f"{stamp}.{int(record.msecs):03d}Z {record.levelname.lower()} {self._process} {record.getMessage()}"
        line = f"{line} {keys}" if keys else line
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _plain(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    text = text.replace("\n", "\\n").replace("\r", "\\r")
    return repr(text) if " " in text or not text else text


class _DroppingHandler(QueueHandler):
    """Never blocks the caller: a full queue (a full disk, a stuck terminal) drops the line."""

    def enqueue(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(queue.Full):
            self.queue.put_nowait(record)

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        return record


def setup(process: str, level: str = "info") -> QueueListener:
    """Send this process's logs to stderr from a thread of their own; returns the listener (stop it to flush)."""
    lines: queue.Queue[Any] = queue.Queue(10_000)
    out = logging.StreamHandler(sys.stderr)
    out.setFormatter(_Formatter(process))
    listener = QueueListener(lines, out)
    listener.start()
    root = logging.getLogger()
    root.handlers[:] = [_DroppingHandler(lines)]
    root.setLevel(level.upper())
    return listener
