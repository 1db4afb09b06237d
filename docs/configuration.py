"""Writes docs/configuration.md from the settings classes (`make docs`); a test compares the two.

Every option is a flag, an environment variable and a key of the file named by --config, made from the same field, so
one table per process says all three.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from executor_svc.config import ExecutorSettings
from pagemill.settings import ServiceSettings
from pagemill_client.config import ServeSettings
from scheduler_svc.config import SchedulerSettings
from scheduler_svc.gateway.config import GatewaySettings

OUT = Path(__file__).with_name("configuration.md")

HEAD = """<!-- Written by docs/configuration.py; change the settings classes and run `make docs`. -->
# Configuration

Every option can be given in three ways, and the earlier one wins:

1. on the command line: `--max-num-seqs 32`
2. in the environment: `PAGEMILL_MAX_NUM_SEQS=32`
3. in the YAML or TOML file named by `--config` or `PAGEMILL_CONFIG`: `max_num_seqs: 32`

A switch is `--prefix-cache` or `--no-prefix-cache`, `PAGEMILL_PREFIX_CACHE=false`, `prefix_cache: false`.

One environment or file may serve several processes: each reads the options it has. An unknown flag, a value out of
range, a file that cannot be read (with line and column) or has a key that no process knows (with the nearest name) ends
the process at once with status 2 and one line (below the usage, for an unknown flag); an unknown variable is ignored.
`pagemill serve` passes options on: `--max-num-seqs 32` to every process that has it, `--executor.metrics-port 9200` to
one.

What the options about memory do together is in [kv-memory.md](kv-memory.md).
"""

SECTIONS: tuple[tuple[str, str, type[ServiceSettings]], ...] = (
    ("Scheduler", "`pagemill scheduler`, or `python -m scheduler_svc`.", SchedulerSettings),
    ("Executor", "`pagemill executor`, or `python -m executor_svc`.", ExecutorSettings),
    ("Gateway", "`pagemill gateway`, or `python -m scheduler_svc.gateway`.", GatewaySettings),
    (
        "Serve",
        "`pagemill serve`: all three, supervised. Options it does not have itself go to the roles.",
        ServeSettings,
    ),
)

COMPUTED = {
    "scheduler_endpoint": "a socket in the user's runtime directory",
    "gateway_endpoint": "a socket in the user's runtime directory",
    "executor_endpoint": "a socket in the user's runtime directory",
    "name": "host name and process id",
}
"""Defaults that differ from machine to machine, in words."""


def default_of(name: str, field: FieldInfo) -> str:
    """The default as a cell of the table."""
    if name in COMPUTED:
        return COMPUTED[name]
    value: Any = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    if value is None or value == "":
        return "none"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def meaning_of(field: FieldInfo) -> str:
    """The description, with the choices or the range that are checked."""
    text = " ".join((field.description or "").split()).rstrip(".")
    if get_origin(field.annotation) is Literal and len(get_args(field.annotation)) > 1:
        text += f" (one of {', '.join(f'`{choice}`' for choice in get_args(field.annotation))})"
    bounds = [
        f"{sign} {getattr(part, name):,}".replace(",", " ")
        for part in field.metadata
        for name, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
        if hasattr(part, name)
    ]
    return f"{text} ({', '.join(bounds)})" if bounds else text


def table(settings: type[ServiceSettings]) -> str:
    """One row per option, in the order of the class."""
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for name, field in settings.model_fields.items():
        cells = (f"`--{name.replace('_', '-')}`", default_of(name, field), meaning_of(field))
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(rows)


def render() -> str:
    """The whole document."""
    parts = [f"## {title}\n\n{text}\n\n{table(settings)}\n" for title, text, settings in SECTIONS]
    return "\n".join([HEAD, *parts])


if __name__ == "__main__":
    OUT.write_text(render())
    sys.stderr.write(f"wrote {OUT.name}\n")
