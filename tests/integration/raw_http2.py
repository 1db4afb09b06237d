"""An HTTP/2 client of a few frames, for what no well-behaved library would send."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from dataclasses import dataclass
from typing import Self

DATA, HEADERS, RST_STREAM, SETTINGS, PING = 0, 1, 3, 4, 6
END_STREAM, ACK, END_HEADERS = 1, 1, 4
REFUSED_STREAM, CANCEL = 7, 8
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame; `code` is the error code of an RST_STREAM."""

    kind: int
    flags: int
    stream: int
    payload: bytes

    @property
    def code(self) -> int:
        return int(struct.unpack(">I", self.payload)[0])


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def reset(stream: int, code: int = CANCEL) -> bytes:
    return frame(RST_STREAM, 0, stream, struct.pack(">I", code))


def _text(value: str) -> bytes:
    assert len(value) < 127
    return bytes((len(value),)) + value.encode()


def call(stream: int, path: str, message: bytes | None = None) -> bytes:
    """HEADERS of a gRPC call, and its message if there is one; without, the call stays open."""
    # HPACK (RFC 7541): :method POST and :scheme http from the static table, the others as literals never indexed.
    block = b"\x83\x86" + b"\x04" + _text(path) + b"\x01" + _text("localhost")
    block += b"\x0f\x10" + _text("application/grpc") + b"\x00" + _text("te") + _text("trailers")
    opened = frame(HEADERS, END_HEADERS, stream, block)
    if message is None:
        return opened
    return opened + frame(DATA, END_STREAM, stream, b"\0" + struct.pack(">I", len(message)) + message)


class RawConnection:
    """A connection that sends whatever it is told to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, polite: bool) -> None:
        self._reader = reader
        self.writer = writer
        self._polite = polite

    @classmethod
    async def open(cls, port: int, *, preface: bool = True) -> Self:
        """Without its preface it says nothing at all, ever, unless told to."""
        connection = cls(*await asyncio.open_connection("127.0.0.1", port), preface)
        if preface:
            connection.writer.write(_PREFACE + frame(SETTINGS, 0, 0))
        return connection

    async def send(self, data: bytes) -> None:
        """Raises ConnectionError when the server has hung up."""
        self.writer.write(data)
        await self.writer.drain()

    async def next(self) -> Frame | None:
        """The next frame; None at the end of the connection. Answers settings and pings."""
        try:
            head = await self._reader.readexactly(9)
            payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        got = Frame(head[3], head[4], int.from_bytes(head[5:9], "big") & 0x7FFFFFFF, payload)
        if self._polite and got.kind in (SETTINGS, PING) and not got.flags & ACK:
            self.writer.write(frame(got.kind, ACK, 0, payload if got.kind == PING else b""))
        return got

    async def is_served(self, timeout_s: float = 20.0) -> bool:
        """Whether the server answers the preface with its settings, rather than hanging up."""
        async with asyncio.timeout(timeout_s):
            got = await self.next()
        return got is not None and got.kind == SETTINGS

    def kill(self) -> None:
        """As if its process had been killed: the socket is gone without a word of HTTP/2."""
        self.writer.transport.abort()

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()
