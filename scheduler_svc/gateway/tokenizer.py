"""The model's tokenizer: text to ids, ids to text, and where control tokens stand in a rendered chat.

Client text is encoded with special-token matching off, so that text which spells a control token stays text. Encoding
runs in threads (the library works outside the interpreter lock) and after a cap on bytes: it is linear, but a megabyte
still takes a second. Whatever it raises, panics of its native code included, ends one request and nothing else.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from tokenizers import Tokenizer

from pagemill.errors import PagemillError, Reason, invalid
from pagemill.logs import kv
from pagemill.model_files import ModelInfo
from scheduler_svc.gateway import gguf_tokenizer
from scheduler_svc.gateway.detokenizer import ByteTable, Detokenizer, WindowDetokenizer, decode_all

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_NUM_THREADS = 2
"""Tokenising is a burst at a request's start; more threads would only compete with the executor for cores."""
_MAX_WAITING_BYTES = 64 * 1024 * 1024
"""Text waiting for a thread; beyond it requests are refused rather than kept."""


@dataclass(frozen=True, slots=True)
class ControlToken:
    """A special token of the vocabulary. `lstrip` and `rstrip`: it takes the white space beside it along."""

    token_id: int
    text: str
    lstrip: bool
    rstrip: bool


class TextTokenizer:
    """Pure part: everything that needs no event loop. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        # Two views of one vocabulary: the flag is a property of the whole object and must not flip under a thread.
        source = tokenizer.to_str()
        self._matching = tokenizer
        self._plain = Tokenizer.from_str(source)
        self._plain.encode_special_tokens = True
        for one in (self._matching, self._plain):
            one.no_padding()
            one.no_truncation()
        self._parts: dict[str, Any] = json.loads(source)
        self._later = _without_first_prefix(self._parts) or self._plain
        self.controls = _control_tokens(tokenizer)
        self._control_by_text = {control.text: control for control in self.controls}
        longest_first = sorted(self._control_by_text, key=len, reverse=True)
        self.control_pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        self._table = _byte_table(tokenizer, self._parts)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of client text; with the tokenizer's own special tokens (BOS …) around it if wanted."""
        ids: list[int] = self._plain.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_chat(self, text: str, control_spans: Sequence[tuple[int, int]]) -> list[int]:
        """Ids of a rendered chat in which exactly the spans of `control_spans` are control tokens.

        When the text has no other place that spells one, the library's own matching gives the same and is used.
        """
        if [m.span() for m in self.control_pattern.finditer(text)] == list(control_spans):
            matched: list[int] = self._matching.encode(text, add_special_tokens=False).ids
            return matched
        return self._encode_between(text, control_spans)

    def _encode_between(self, text: str, control_spans: Sequence[tuple[int, int]]) -> list[int]:
        ids: list[int] = []
        position, strip_next = 0, False
        for start, end in [*control_spans, (len(text), len(text))]:
            control = self._control_by_text.get(text[start:end])
            stretch = text[position:start]
            stretch = stretch.lstrip() if strip_next else stretch
            stretch = stretch.rstrip() if control is not None and control.lstrip else stretch
            if stretch:
                tokenizer = self._plain if position == 0 else self._later
                ids.extend(tokenizer.encode(stretch, add_special_tokens=False).ids)
            if control is not None:
                ids.append(control.token_id)
                strip_next = control.rstrip
            position = end
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids that are below the vocabulary size."""
        if skip_special_tokens:
            return decode_all(self.new_detokenizer(), token_ids)
        text: str = self._matching.decode(list(token_ids), skip_special_tokens=False)
        return text

    def new_detokenizer(self) -> Detokenizer:
        """For a new output; special tokens have no text."""
        if self._table is not None:
            return self._table.new()
        return WindowDetokenizer(lambda ids: self._matching.decode(ids, skip_special_tokens=True))

    def literal(self, token_id: int) -> str | None:
        """Text of a special token; None for any other id."""
        return next((c.text for c in self.controls if c.token_id == token_id), None)


class TokenizerPool:
    """Runs a `TextTokenizer` off the event loop, with bounds."""

    def __init__(self, tokenizer: TextTokenizer, max_prompt_bytes: int) -> None:
        self.tokenizer = tokenizer
        self.max_prompt_bytes = max_prompt_bytes
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tokenize")
        self._waiting_bytes = 0

    async def encode(self, text: str, *, field: str, add_special_tokens: bool = True) -> list[int]:
        """As `TextTokenizer.encode`. Raises PagemillError; `field` names the text in its message."""
        size = check_size(text, field, self.max_prompt_bytes)
        return await self._run(size, lambda: self.tokenizer.encode(text, add_special_tokens=add_special_tokens))

    async def encode_chat(self, text: str, control_spans: Sequence[tuple[int, int]]) -> list[int]:
        """As `TextTokenizer.encode_chat`."""
        return await self._run(len(text), lambda: self.tokenizer.encode_chat(text, control_spans))

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """As `TextTokenizer.decode`."""
        ids = list(token_ids)
        return await self._run(
            8 * len(ids), lambda: self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        )

    def close(self) -> None:
        """Let go of the threads without waiting for them."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, size: int, work: Callable[[], _T]) -> _T:
        if self._waiting_bytes + size > _MAX_WAITING_BYTES:
            raise PagemillError(Reason.QUEUE_FULL, "too much text is waiting to be tokenised", retry_after_ms=1000)
        self._waiting_bytes += size
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, _barrier, work)
        finally:
            self._waiting_bytes -= size


def check_size(text: str, field: str, max_bytes: int) -> int:
    """Bytes of `text`; raises the error of a text that is too long. Looks at the characters first: they are free."""
    size = len(text)
    if size <= max_bytes:
        size = len(text.encode("utf-8", "replace"))
    if size > max_bytes:
        raise invalid(field, f"longer than {max_bytes} bytes of UTF-8")
    return size


def _barrier(work: Callable[[], _T]) -> _T:
    """Run `work`; a panic of the native library derives from BaseException and would pass `except Exception`."""
    try:
        return work()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        _log.error("tokenizer failed", extra=kv(kind=type(error).__name__))
        raise PagemillError(Reason.INTERNAL, "the text could not be tokenised") from None


def load(info: ModelInfo) -> TextTokenizer:
    """The tokenizer of a model. Raises UnsupportedTokenizerError with one line for the operator."""
    tokenizer = TextTokenizer(_read(info))
    if tokenizer.vocab_size > info.vocab_size:
        raise gguf_tokenizer.UnsupportedTokenizerError(
            f"{info.path}: the tokenizer has {tokenizer.vocab_size} ids, the model only {info.vocab_size}"
        )
    return tokenizer


def _read(info: ModelInfo) -> Tokenizer:
    if info.tokenizer_json is None:
        assert info.gguf is not None
        return gguf_tokenizer.build(info.gguf.metadata, add_bos=info.add_bos_token)
    try:
        return Tokenizer.from_file(str(info.tokenizer_json))
    except Exception as error:  # the library raises bare Exception
        raise gguf_tokenizer.UnsupportedTokenizerError(f"{info.tokenizer_json}: cannot be read") from error


def _control_tokens(tokenizer: Tokenizer) -> tuple[ControlToken, ...]:
    return tuple(
        ControlToken(token_id, added.content, added.lstrip, added.rstrip)
        for token_id, added in tokenizer.get_added_tokens_decoder().items()
        if added.special and added.content
    )


def _without_first_prefix(parts: dict[str, Any]) -> Tokenizer | None:
    """A tokenizer for text behind a control token, where `Metaspace` puts a space only at the very start.

    None when text is encoded the same everywhere.
    """
    pre = parts.get("pre_tokenizer") or {}
    steps = pre.get("pretokenizers", [pre])
    if not any(s.get("type") == "Metaspace" and s.get("prepend_scheme") == "first" for s in steps):
        return None
    changed = json.loads(json.dumps(parts))
    pre = changed["pre_tokenizer"]
    for step in pre.get("pretokenizers", [pre]):
        if step.get("type") == "Metaspace":
            step["prepend_scheme"] = "never"
    later = Tokenizer.from_str(json.dumps(changed))
    later.encode_special_tokens = True
    return later


# ---- Bytes of each id ----


def _byte_table(tokenizer: Tokenizer, parts: dict[str, Any]) -> ByteTable | None:
    """The bytes that each id stands for, if the decoder is of a kind in which ids stand for bytes."""
    decoder = parts.get("decoder") or {}
    steps = decoder.get("decoders", [decoder])
    kinds = [step.get("type") for step in steps]
    special = {control.token_id for control in _control_tokens(tokenizer)}
    # Not convert_ids: one call for the whole vocabulary costs a tenth.
    tokens = [""] * tokenizer.get_vocab_size(with_added_tokens=True)
    for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        if token_id < len(tokens) and token_id not in special:
            tokens[token_id] = token
    if kinds == ["ByteLevel"]:
        return ByteTable([_byte_level_piece(token) for token in tokens])
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and _is_space_mark(steps[0]) and _strips_left(steps[3:]):
        return ByteTable([_fallback_piece(token) for token in tokens], strip_left=sum(s["start"] for s in steps[3:]))
    return None


def _is_space_mark(step: dict[str, Any]) -> bool:
    return step.get("pattern") == {"String": "▁"} and step.get("content") == " "


def _strips_left(steps: list[dict[str, Any]]) -> bool:
    return len(steps) <= 1 and all(
        s.get("type") == "Strip" and s.get("content") == " " and s.get("stop") == 0 for s in steps
    )


def _char_bytes() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character; this is the way back (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return table


_CHAR_BYTES = _char_bytes()
_ASCII_WORD = re.compile(r"Ġ?[!-~]+")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_level_piece(token: str) -> bytes:
    """Bytes of one token. A token with a character outside the table is an added one and stands for its own text."""
    if _ASCII_WORD.fullmatch(token):  # most of a vocabulary, ten times faster
        return token.replace("Ġ", " ").encode("ascii")
    try:
        return bytes([_CHAR_BYTES[char] for char in token])
    except KeyError:
        return token.encode("utf-8")


def _fallback_piece(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode("utf-8")
