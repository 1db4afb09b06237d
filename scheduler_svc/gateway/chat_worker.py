"""The process in which chat templates run, so that one that never ends can be killed. Started by `chat.ChatTemplate`.

Reads one request per frame from standard input, answers on standard output; a frame is a length (4 bytes, little
endian) and that many bytes of JSON. The first frame is the template. Ends when its input does.
"""

from __future__ import annotations

import json
import os
import resource
import struct
import sys
from typing import Any, BinaryIO

import jinja2

from pagemill.processes import die_with_parent
from scheduler_svc.gateway.chat_render import AmbiguousTextError, ChatRenderer, TemplateRefusalError

_MAX_MEMORY_BYTES = 1024 * 1024 * 1024
_MAX_FRAME_BYTES = 256 * 1024 * 1024


def main() -> int:
    """Serve until end of input."""
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        return _serve(sys.stdin.buffer, sys.stdout.buffer)
    except BrokenPipeError:  # the gateway is gone, and so is everybody who would read an answer or a trace
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left in the buffer goes there
        return 0


def _serve(source: BinaryIO, sink: BinaryIO) -> int:
    setup = _read(source)
    if setup is None:
        return 0
    try:
        renderer = ChatRenderer(setup["template"], setup["special_tokens"], setup["controls"])
    except (jinja2.TemplateError, RecursionError) as error:
        _write(sink, {"error": "compile", "message": str(error)})
        return 1
    _write(sink, {"ready": True})
    while (request := _read(source)) is not None:
        _write(sink, _answer(renderer, request))
    return 0


def _answer(renderer: ChatRenderer, request: dict[str, Any]) -> dict[str, Any]:
    try:
        rendered = renderer.render(request["messages"], add_generation_prompt=request["add_generation_prompt"])
    except TemplateRefusalError as refusal:
        return {"error": "refused", "message": str(refusal)}
    except AmbiguousTextError:
        return {"error": "ambiguous"}
    except (MemoryError, RecursionError):
        return {"error": "limits"}
    return {"text": rendered.text, "spans": rendered.control_spans}


def _read(source: BinaryIO) -> dict[str, Any] | None:
    head = source.read(4)
    if len(head) < 4:
        return None
    length = struct.unpack("<I", head)[0]
    if length > _MAX_FRAME_BYTES:
        return None
    body = source.read(length)
    if len(body) < length:  # its writer died over it
        return None
    request: dict[str, Any] = json.loads(body)
    return request


def _write(sink: BinaryIO, answer: dict[str, Any]) -> None:
    body = json.dumps(answer).encode()
    sink.write(struct.pack("<I", len(body)) + body)
    sink.flush()


if __name__ == "__main__":
    sys.exit(main())
