"""`pagemill chat`: a conversation in the terminal."""

from __future__ import annotations

import sys

from pagemill.settings import load
from pagemill_client.config import ChatSettings
from pagemill_client.errors import PagemillError
from pagemill_client.generate import describe, read_text, sampling_options, stream_answer, with_client
from pagemill_client.sync import Client
from pagemill_client.terminal import err
from pagemill_client.types import Message

HELP = "/exit ends, /clear forgets the conversation, /help shows this; Ctrl-C stops an answer"


def main(argv: list[str]) -> int:
    """Run `pagemill chat`."""
    settings = load(ChatSettings, argv)
    if settings.message:
        return with_client(settings, lambda client: _answer_once(client, settings))
    return with_client(settings, lambda client: _talk(client, settings))


def _opening(settings: ChatSettings) -> list[Message]:
    return [Message("system", settings.system)] if settings.system else []


def _answer_once(client: Client, settings: ChatSettings) -> int:
    messages = [*_opening(settings), Message("user", read_text(settings.message))]
    stream_answer(client.chat(messages, **sampling_options(settings)), stats=settings.stats)
    return 0


def _talk(client: Client, settings: ChatSettings) -> int:
    """Turns until /exit or end of input. A turn that fails is forgotten, so that the next one can succeed."""
    name = client.get_model(settings.model_name).name
    if sys.stdin.isatty():
        err(f"{name} — {HELP}")
    history = _opening(settings)
    while (line := _read_line()) is not None:
        if line == "/exit":
            break
        if line == "/clear":
            history = _opening(settings)
        elif line == "/help":
            err(HELP)
        elif line:
            history = _turn(client, settings, history, line)
    return 0


def _turn(client: Client, settings: ChatSettings, history: list[Message], line: str) -> list[Message]:
    """The history after one more turn; unchanged when there was no answer."""
    asked = [*history, Message("user", line)]
    try:
        stream = client.chat(asked, **sampling_options(settings))
    except UnicodeError as error:  # nothing was sent
        err(f"\n{describe(error, settings.target)}")
        return history
    try:
        answer = stream_answer(stream, stats=settings.stats)
    except KeyboardInterrupt:
        err("\n[stopped]")
        answer = stream.text
    except PagemillError as error:
        err(f"\n{describe(error, settings.target)}")
        return history
    return [*asked, Message("assistant", answer)] if answer else history


def _read_line() -> str | None:
    """One line without blanks around it; None at the end of input or on Ctrl-C at the prompt."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None
