"""Text of token ids, one id at a time: never half a character, and the pieces joined equal the text of the whole.

Two ways, chosen by the tokenizer's decoder:

* `ByteTable`: each id stands for fixed bytes (byte-level BPE; SentencePiece with byte fallback). The bytes run
  through a UTF-8 decoder that holds back an unfinished character. One table look-up per token.
* `PrefixWindow`: anything else. Decodes a short window of ids with and without the newest one and takes the
  difference; holds back while the window ends in U+FFFD.

U+FFFD comes out only where bytes truly are not UTF-8. In that one case a `ByteTable` is kinder than a byte-fallback
decoder, which replaces a whole run of bytes when any of it is wrong.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

_MAX_HELD_TOKENS = 16
"""A character has at most four bytes, so a window that still ends in U+FFFD after this many ids is truly invalid."""


class Detokenizer(Protocol):
    """The text state of one output."""

    def push(self, token_id: int) -> str:
        """Text that became final with this id; empty while a character is unfinished."""
        ...

    def push_literal(self, text: str) -> str:
        """As `push`, for a token whose text is given (a special token that is to be shown)."""
        ...

    def finish(self) -> str:
        """What was held back; an unfinished character becomes U+FFFD."""
        ...


class ByteTable:
    """Bytes of each token id; shared by all streams, never changed."""

    def __init__(self, pieces: Sequence[bytes], *, strip_left: int = 0) -> None:
        self.pieces = pieces
        """Empty for ids without text (special tokens)."""
        self.strip_left = strip_left
        """How many spaces the decoder drops at the start of an output."""

    def new(self) -> ByteDetokenizer:
        """The state of a new output."""
        return ByteDetokenizer(self)


class ByteDetokenizer:
    """`Detokenizer` over a `ByteTable`."""

    __slots__ = ("_decode", "_pending", "_pieces", "_strip_left")

    def __init__(self, table: ByteTable) -> None:
        self._pieces = table.pieces
        self._strip_left = table.strip_left
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._pending = False

    def push(self, token_id: int) -> str:
        """As `Detokenizer.push`."""
        piece = self._pieces[token_id] if token_id < len(self._pieces) else b""
        if piece.isascii() and not self._pending and not self._strip_left:
            return piece.decode("ascii")
        return self._feed(piece)

    def push_literal(self, text: str) -> str:
        """As `Detokenizer.push_literal`."""
        return self._feed(text.encode("utf-8", "replace"))

    def finish(self) -> str:
        """As `Detokenizer.finish`."""
        self._pending = False
        return self._decode(b"", True)

    def _feed(self, piece: bytes) -> str:
        if not piece:
            return ""
        while self._strip_left and piece.startswith(b" "):
            piece = piece[1:]
            self._strip_left -= 1
        if piece:
            self._strip_left = 0
        text = self._decode(piece)
        # Whether bytes wait inside the decoder: its state would tell but costs more than remembering the last byte.
        self._pending = bool(piece) and piece[-1] >= 0x80
        return text


class WindowDetokenizer:
    """`Detokenizer` by the prefix-window method over any decode function."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._prefix = 0
        self._read = 0

    def push(self, token_id: int) -> str:
        """As `Detokenizer.push`."""
        self._ids.append(token_id)
        held = len(self._ids) - self._read
        before = self._decode(self._ids[self._prefix : self._read])
        after = self._decode(self._ids[self._prefix :])
        if held < _MAX_HELD_TOKENS and (len(after) <= len(before) or after.endswith("\ufffd")):
            return ""
        self._forget()
        return after[len(before) :]

    def push_literal(self, text: str) -> str:
        """As `Detokenizer.push_literal`: what was held back, then the text."""
        return self.finish() + text

    def finish(self) -> str:
        """As `Detokenizer.finish`."""
        before = self._decode(self._ids[self._prefix : self._read])
        after = self._decode(self._ids[self._prefix :])
        self._forget()
        return after[len(before) :]

    def _forget(self) -> None:
        """The ids read now become the context of the next ones; older ones are not needed again."""
        del self._ids[: self._read]
        self._prefix = 0
        self._read = len(self._ids)


def decode_all(detokenizer: Detokenizer, token_ids: Sequence[int]) -> str:
    """The whole text of `token_ids`, with a fresh detokenizer."""
    return "".join([*map(detokenizer.push, token_ids), detokenizer.finish()])
