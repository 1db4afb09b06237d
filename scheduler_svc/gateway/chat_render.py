"""Renders the model's chat template and finds which control tokens in the result are the template's own. Pure.

Client text must never become control tokens, whatever the template does with it. So every conversation is rendered
twice: as it is, and as a *shadow* in which client text is replaced, character by character, by a filler. Where both
agree in length and in everything but the filler, a control token seen in the shadow was written by the template; one
seen only in the text was written by the client.

    text    <|im_start|>user\\n hi <|im_end|> <|im_end|>
    shadow  <|im_start|>user\\n FF FFFFFFFFFF <|im_end|>       F = filler; white space stays, so that trimming works

A template that looks into client text (splits at a marker, escapes JSON) may take other turns in the full shadow; then
a second one is tried, which hides only the spellings of control tokens. If that does not agree either, the request is
refused: nothing is guessed. Roles are not hidden: templates write them into their markers, so they are from a list.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

FILLER = "\ue0f1"
"""A private-use character: no case, no white space, in no control token."""
_FILLERS = (FILLER, "\ue0f2", "\ue0f3", "\uf8f1")

MAX_OUTPUT_CHARS = 32 * 1024 * 1024


class TemplateRefusalError(Exception):
    """The template refused the conversation (its own `raise_exception`), or it cannot be rendered."""


class AmbiguousTextError(Exception):
    """The client's text spells control tokens and the template transforms it in a way that hides whose they are."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered conversation and where its control tokens are, in order, as (start, end) in characters."""

    text: str
    control_spans: list[tuple[int, int]]


class ChatRenderer:
    """One compiled template."""

    def __init__(self, template: str, special_tokens: dict[str, str], control_texts: Sequence[str]) -> None:
        """Raises jinja2.TemplateError when the template does not compile."""
        self._environment = _environment()
        self._template = self._environment.from_string(template)
        self._special_tokens = special_tokens
        self._controls = sorted(control_texts, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._controls)) or r"(?!)")

    def render(self, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> Rendered:
        """Raises TemplateRefusalError or AmbiguousTextError."""
        now = datetime.now()  # one moment for all renderings, so that they agree
        text = self._once(messages, add_generation_prompt, now)
        filler = next((f for f in _FILLERS if f not in text), None)
        if filler is None:
            raise AmbiguousTextError
        for hide in (_hide_all, self._hide_controls):
            hidden = [_hidden(message, hide, filler) for message in messages]
            try:
                shadow = self._once(hidden, add_generation_prompt, now)
            except TemplateRefusalError:
                continue
            if _agrees(text, shadow, filler):
                return Rendered(text, [m.span() for m in self._pattern.finditer(shadow)])
        raise AmbiguousTextError

    def _once(self, messages: list[dict[str, str]], add_generation_prompt: bool, now: datetime) -> str:
        variables: dict[str, Any] = {
            **self._special_tokens,
            "messages": [dict(message) for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            "strftime_now": now.strftime,
        }
        try:
            text = self._template.render(variables)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise TemplateRefusalError(str(error) if isinstance(error, _Raised) else "") from error
        if len(text) > MAX_OUTPUT_CHARS:
            raise TemplateRefusalError("the rendered conversation is too long")
        return text

    def _hide_controls(self, text: str, filler: str) -> str:
        """Hide spellings of control tokens, and what could become one together with the template's text beside it."""
        text = self._pattern.sub(lambda m: _hide_all(m[0], filler), text)
        if any(text and text in control for control in self._controls):
            return _hide_all(text, filler)
        head = max((_overlap(control, text) for control in self._controls), default=0)
        tail = max((_overlap(text, control) for control in self._controls), default=0)
        middle = text[head : len(text) - tail]
        return _hide_all(text[:head], filler) + middle + _hide_all(text[head + len(middle) :], filler)


def _overlap(left: str, right: str) -> int:
    """Length of the longest proper suffix of `left` that `right` begins with, as far as it could join a token."""
    longest = min(len(left), len(right), 256)
    return next((n for n in range(longest, 0, -1) if left.endswith(right[:n])), 0)


def _hide_all(text: str, filler: str) -> str:
    return re.sub(r"\S", filler, text)


def _hidden(message: dict[str, str], hide: Callable[[str, str], str], filler: str) -> dict[str, str]:
    return {key: value if key == "role" else hide(value, filler) for key, value in message.items()}


def _agrees(text: str, shadow: str, filler: str) -> bool:
    return len(text) == len(shadow) and (
        text == shadow or all(b in (a, filler) for a, b in zip(text, shadow, strict=True))
    )


# ---- The sandbox, with the helpers that templates of this kind may call ----


class _Raised(jinja2.TemplateError):
    """The template's own `raise_exception`."""


def _raise_exception(message: object) -> None:
    raise _Raised(str(message)[:200])


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, **options: Any) -> str:
    """Plain JSON; Jinja's own filter escapes for HTML."""
    sort_keys = bool(options.get("sort_keys", False))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}`, which marks the assistant's part for training: here it only renders."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's interface)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        """The block's body in its place."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    return environment
