"""`pagemill generate`, and what it shares with `chat`: stream one answer to the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from pagemill.settings import load
from pagemill_client.config import ConnectionSettings, GenerateSettings, SamplingSettings
from pagemill_client.errors import PagemillError
from pagemill_client.options import GenerateOptions
from pagemill_client.sync import Client, GenerateStream
from pagemill_client.terminal import err, out, safe


def main(argv: list[str]) -> int:
    """Run `pagemill generate`."""
    settings = load(GenerateSettings, argv)
    prompt = read_text(settings.prompt)

    def run(client: Client) -> int:
        options = sampling_options(settings)
        if settings.ignore_eos:
            options["ignore_eos"] = True
        stream_answer(client.generate(prompt, **options), stats=settings.stats)
        return 0

    return with_client(settings, run)


def with_client(settings: ConnectionSettings, run: Callable[[Client], int]) -> int:
    """`run` with a connected client. Errors become one line and exit status 1, a broken pipe ends quietly."""
    try:
        with Client(
            settings.target, tls=settings.tls, insecure=settings.insecure, timeout_s=settings.timeout_s
        ) as client:
            return run(client)
    except BrokenPipeError:
        sys.stdout = None  # nothing more can be written, at exit neither
        return 0
    except (PagemillError, OSError, ValueError) as error:
        err(f"{settings.prog}: {describe(error, settings.target)}")
        return 1


def describe(error: Exception, target: str) -> str:
    """One line for the terminal."""
    if isinstance(error, PagemillError) and error.status == "UNAVAILABLE" and not error.reason:
        return f"no service answers at {target} (start one with: pagemill serve --model DIR_OR_GGUF)"
    if isinstance(error, PagemillError) and error.retry_after_s is not None:
        return f"{error} (try again in {error.retry_after_s:.1f} s)"
    if isinstance(error, UnicodeError):
        return "the text is not valid UTF-8"
    return str(error)


def sampling_options(settings: SamplingSettings) -> GenerateOptions:
    """What the user gave, and only that."""
    options: GenerateOptions = {"model": settings.model_name}
    for name in ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "priority"):
        value = getattr(settings, name)
        if value is not None:
            options[name] = value
    if settings.stop:
        options["stop"] = settings.stop
    return options


def stream_answer(stream: GenerateStream, *, stats: bool) -> str:
    """Print the answer as it comes; returns it. An interrupted answer is cancelled and its beginning kept."""
    start = time.perf_counter()
    first: float | None = None
    with stream:
        for text in stream.texts():
            first = first or time.perf_counter()
            out(safe(text), end="")
        generation = stream.collect()
    out("")
    if stats and generation.finished is not None:
        usage, end = generation.finished.usage, time.perf_counter()
        cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
        err(
            f"[{usage.prompt_tokens} prompt{cached} + {usage.completion_tokens} new tokens, finished: "
            f"{generation.finished.reason.value}, first text {((first or end) - start) * 1e3:.0f} ms, "
            f"total {end - start:.2f} s]"
        )
    return generation.text


def read_text(argument: str) -> str:
    """The argument itself, or all of standard input for "-"."""
    return sys.stdin.read() if argument == "-" else argument
