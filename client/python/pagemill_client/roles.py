"""Which options belong to which role, and how one command line is shared out among them. Pure but for imports."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagemill.settings import ServiceSettings, Settings


class OptionError(ValueError):
    """The command line cannot be shared out; the text is one line for the user."""


@dataclass(frozen=True, slots=True)
class Role:
    """A process of the stack. The client imports no service; the module names are followed only at run time."""

    name: str
    module: str
    config_module: str
    settings_class: str

    def settings_type(self) -> type[ServiceSettings]:
        """The role's settings class. Raises OptionError if the role is not installed."""
        try:
            found: type[ServiceSettings] = getattr(importlib.import_module(self.config_module), self.settings_class)
        except ImportError as error:
            raise OptionError(f"the {self.name} is not installed: {error}") from error
        return found


GATEWAY = Role("gateway", "scheduler_svc.gateway", "scheduler_svc.gateway.config", "GatewaySettings")
SCHEDULER = Role("scheduler", "scheduler_svc", "scheduler_svc.config", "SchedulerSettings")
EXECUTOR = Role("executor", "executor_svc", "executor_svc.config", "ExecutorSettings")
STOP_ORDER = (GATEWAY, SCHEDULER, EXECUTOR)
"""Gateways first: they finish their streams, for which the other two must still run."""


def defaults(settings_type: type[Settings]) -> dict[str, Any]:
    """Flag (without dashes) → default, of every option."""
    fields = settings_type.model_fields.items()
    return {name.replace("_", "-"): field.get_default(call_default_factory=True) for name, field in fields}


@dataclass(frozen=True, slots=True)
class SharedOut:
    """`serve`: tokens for the command itself; `by_role`: tokens for each role."""

    serve: list[str]
    by_role: dict[str, list[str]]


def split(argv: Sequence[str], own: Iterable[str]) -> tuple[list[str], list[str]]:
    """Tokens of a command's own options, and all others. Raises OptionError for a word that belongs to none."""
    own = {*own, "help"}
    mine: list[str] = []
    others: list[str] = []
    for group in _groups(argv):
        flag = group[0].removeprefix("--").partition("=")[0]
        (mine if _has(own, flag) or group[0] == "-h" else others).extend(group)
    return mine, others


EVERYBODYS = ("config", "log-level")
"""Options that the command and every role take."""


def share_out(argv: Sequence[str], own: Iterable[str], roles: Mapping[str, Mapping[str, Any]]) -> SharedOut:
    """Tokens of `argv` by their reader. `own` and `roles`: the options that the command and each role have.

    `--NAME` goes to the command if it has it, otherwise to every role that has it. If roles give it different
    defaults it means different things to them, and the role must be named: `--ROLE.NAME`. Raises OptionError for
    an unknown or ambiguous option and for a word that belongs to none.
    """
    shared = SharedOut([], {role: [] for role in roles})
    own = {*own, "help"}
    for group in _groups(argv):
        flag, separator, value = group[0].removeprefix("--").partition("=")
        role, dot, name = flag.partition(".")
        if dot and role in roles:
            if not _has(roles[role], name):
                raise OptionError(f"--{flag}: the {role} has no option --{name}")
            shared.by_role[role] += [f"--{name}{separator}{value}", *group[1:]]
        elif _has(own, flag) or group[0] == "-h":
            shared.serve.extend(group)
            if flag in EVERYBODYS:
                for everybodys in shared.by_role.values():
                    everybodys.extend(group)
        else:
            for reader in _readers(flag, roles):
                shared.by_role[reader] += group
    return shared


def _groups(argv: Sequence[str]) -> list[list[str]]:
    """Each option with the words after it. A value that begins with two dashes must be given with `=`."""
    groups: list[list[str]] = []
    for word in argv:
        if word.startswith("--") or word == "-h":
            groups.append([word])
        elif groups and "=" not in groups[-1][0]:
            groups[-1].append(word)
        else:
            raise OptionError(f"{word!r} belongs to no option")
    return groups


def _has(options: Iterable[str], flag: str) -> bool:
    return flag in options or (flag.startswith("no-") and flag.removeprefix("no-") in options)


def _readers(flag: str, roles: Mapping[str, Mapping[str, Any]]) -> list[str]:
    readers = [role for role, options in roles.items() if _has(options, flag)]
    if not readers:
        raise OptionError(f"--{flag}: neither serve nor a role has this option (see pagemill serve --help)")
    name = flag if flag in roles[readers[0]] else flag.removeprefix("no-")
    if len({repr(roles[role][name]) for role in readers}) > 1:
        choices = " or ".join(f"--{role}.{flag}" for role in readers)
        raise OptionError(f"--{flag} means different things to {' and '.join(readers)}: use {choices}")
    return readers
