"""The `pagemill` command: finds the subcommand and hands the rest of the line to it.

Nothing is imported before it is needed: `pagemill --help` answers in the time Python takes to start.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Command:
    """One subcommand: `module`'s `main(argv) -> exit status`."""

    module: str
    summary: str


COMMANDS = {
    "serve": Command("pagemill_client.serve", "the whole stack on this machine: pagemill serve --model DIR_OR_GGUF"),
    "demo": Command("pagemill_client.demo", "start the demo model, stream one chat answer, stop"),
    "generate": Command("pagemill_client.generate", "continue a text, streaming to the terminal"),
    "chat": Command("pagemill_client.chat", "talk to the model, with history; /exit ends it"),
    "bench": Command("pagemill_client.bench", "load generator: throughput, latencies, goodput"),
    "tune": Command("pagemill_client.tune", "find the settings that serve a load best on this machine"),
}

ROLES = {
    "gateway": Command("scheduler_svc.gateway", "one role: serves clients over gRPC, owns text"),
    "scheduler": Command("scheduler_svc", "one role: decides what runs next, owns block ids"),
    "executor": Command("executor_svc", "one role: runs the model, owns KV memory"),
}

_CLOSED_PIPE_STATUS = 128 + signal.SIGPIPE


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; returns the exit status. 2: the command line is wrong; 130: interrupted; 141: nobody reads
    the output any more (as `| head` ends), which is no failure to complain about.
    """
    args = sys.argv[1:] if argv is None else argv
    try:
        try:
            return _dispatch(args)
        finally:
            sys.stdout.flush()  # here, where the error of a closed pipe can still be caught
    except BrokenPipeError:
        # The interpreter flushes once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _CLOSED_PIPE_STATUS


def _dispatch(args: list[str]) -> int:
    name = args[0] if args else "--help"
    if name in ROLES:
        os.execv(sys.executable, [sys.executable, "-m", ROLES[name].module, *args[1:]])  # noqa: S606 (our own module)
    if name in COMMANDS:
        try:
            return int(importlib.import_module(COMMANDS[name].module).main(args[1:]))
        except KeyboardInterrupt:
            return 130
    if name in ("-h", "--help", "help"):
        print(_help())
        return 0
    if name == "--version":
        print(f"pagemill {importlib.import_module('importlib.metadata').version('pagemill')}")
        return 0
    print(f"pagemill: unknown command {name!r}; see pagemill --help", file=sys.stderr)
    return 2


def _help() -> str:
    rows = [f"  {name:<10} {command.summary}" for name, command in (*COMMANDS.items(), *ROLES.items())]
    return "\n".join(
        ["usage: pagemill COMMAND [OPTION ...]      (pagemill COMMAND --help lists the options)", "", *rows]
    )


if __name__ == "__main__":
    sys.exit(main())
