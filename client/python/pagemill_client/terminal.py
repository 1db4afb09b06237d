"""Where subcommands write: results to standard output, everything else to standard error."""

from __future__ import annotations

import sys


def out(text: str, end: str = "\n") -> None:
    """Write to standard output now. A reader that went away (`| head`) raises BrokenPipeError."""
    sys.stdout.write(text + end)
    sys.stdout.flush()


def err(text: str) -> None:
    """Write one line to standard error."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def safe(text: str) -> str:
    """The text without control characters but newline and tab: a model must not drive the terminal."""
    return "".join(c for c in text if c in "\n\t" or (c >= " " and not "\x7f" <= c <= "\x9f"))
