"""How every Pagemill process reads its options: flags over environment over a config file over defaults.

Each option of a settings class is a ``--kebab-case`` flag, a ``PAGEMILL_SNAKE_CASE`` variable and a key of the YAML
or TOML file named by ``--config``. What a class does not know is refused on the command line and ignored in the
environment. One file may serve all processes: a key that another process has is ignored, one that none has is refused.
"""

from __future__ import annotations

import os
import sys
from difflib import get_close_matches
from pathlib import Path
from tomllib import TOMLDecodeError
from typing import Any, ClassVar, TypeVar, get_args

from google.protobuf.internal import api_implementation
from pydantic import Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
    YamlConfigSettingsSource,
)

from pagemill.known_options import KNOWN_OPTIONS

S = TypeVar("S", bound="Settings")


class Settings(BaseSettings):
    """Base of the settings class of each command. Frozen after loading."""

    model_config = SettingsConfigDict(
        env_prefix="PAGEMILL_",
        frozen=True,
        extra="ignore",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )
    prog: ClassVar[str] = "pagemill"
    """Name in --help and messages."""
    _file: ClassVar[Path | None] = None

    config: Path | None = Field(default=None, description="YAML or TOML file with options (keys in snake_case)")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Order of precedence; the command line comes first through `load`."""
        sources: list[PydanticBaseSettingsSource] = [init_settings, env_settings]
        if cls._file is not None:
            kind = TomlConfigSettingsSource if cls._file.suffix == ".toml" else YamlConfigSettingsSource
            sources.append(kind(settings_cls, cls._file))
        return tuple(sources)


class ServiceSettings(Settings):
    """Base of the settings class of each process that runs for long, and so logs."""

    log_level: str = Field(
        default="info", description="debug, info, warning or error", pattern="^(debug|info|warning|error)$"
    )


def load(settings_type: type[S], argv: list[str]) -> S:
    """Settings from `argv`, environment and file; exits with one clear line (status 2) if they do not hold.

    Every process begins here, so what all of them need is checked here too: see `_check_protobuf`.
    """
    _check_protobuf(settings_type)
    settings_type._file = _config_file(settings_type, argv)
    if settings_type._file is not None:
        _check_file(settings_type, settings_type._file)
    try:
        cli: Any = CliSettingsSource(settings_type, cli_parse_args=argv, cli_prog_name=settings_type.prog)
        return settings_type(_cli_settings_source=cli)  # type: ignore[call-arg]
    except ValidationError as error:
        first = error.errors()[0]
        message = first["msg"].removeprefix("Value error, ")
        if not first["loc"]:  # a rule about several options; its message names them
            _refuse(settings_type, message)
        name = "--" + "-".join(str(part).replace("_", "-") for part in first["loc"])
        _refuse(settings_type, f"{name}: {message} (got {first.get('input')!r})")
        raise AssertionError from error


def _check_file(settings_type: type[S], path: Path) -> None:
    """Refuse a file that cannot be read, or that has a key which is no option of any process."""
    if not path.is_file():
        _refuse(settings_type, f"--config: no such file: {path}")
    try:
        _refuse_doubled(path)
        values = file_values(path)
    except Exception as error:  # whatever the parsers raise: the line must say what to mend
        _refuse(settings_type, f"--config {path}: {_what_is_wrong(error)}")
        raise AssertionError from error
    known = KNOWN_OPTIONS.union(settings_type.model_fields)
    for key in sorted(values.keys() - known):
        near = get_close_matches(key.replace("-", "_"), known, 1, 0.75)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        _refuse(settings_type, f"--config {path}: no process has the option {key!r}{hint}")
    for key, value in values.items():
        if isinstance(value, bool) and key in settings_type.model_fields and not _takes_bool(settings_type, key):
            word = str(value).lower()
            _refuse(settings_type, f"--config {path}: {key}: got {word}; yes, no, on and off are words only in quotes")


def _refuse_doubled(path: Path) -> None:
    """Raises MarkedYAMLError where YAML's parser would take the last of several values. TOML's own refuses them."""
    if path.suffix == ".toml":
        return
    import yaml  # noqa: PLC0415 (10 ms that a process without a file need not spend)

    root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    lines: dict[str, int] = {}
    for key, _ in root.value if isinstance(root, yaml.MappingNode) else ():
        line = key.start_mark.line + 1
        if lines.setdefault(key.value, line) != line:
            raise yaml.MarkedYAMLError(
                problem=f"{key.value!r} is in line {lines[key.value]} already", problem_mark=key.start_mark
            )


def _takes_bool(settings_type: type[Settings], key: str) -> bool:
    """Whether an option may be true or false; without this check they would count as the numbers 1 and 0."""
    annotation = settings_type.model_fields[key].annotation
    return bool in (annotation, *get_args(annotation))


def _what_is_wrong(error: Exception) -> str:
    """One line about a file that a parser gave up on, with the line where it did."""
    mark = getattr(error, "problem_mark", None)  # of the YAML parser
    if mark is not None:
        problem = getattr(error, "problem", None) or "cannot be read"
        return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"
    if isinstance(error, OSError):
        return error.strerror or "cannot be read"
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 at byte {error.start}"
    if isinstance(error, TOMLDecodeError):
        return str(error)
    if isinstance(error, TypeError | ValueError | AttributeError):
        return "expected one `option: value` a line"
    return " ".join(str(error).split())[:200]


def file_values(path: Path) -> dict[str, Any]:
    """The top-level keys of a --config file, known or not, and their values."""
    kind = TomlConfigSettingsSource if path.suffix == ".toml" else YamlConfigSettingsSource
    return {str(key): value for key, value in kind(ServiceSettings, path).init_kwargs.items()}


def _check_protobuf(settings_type: type[Settings]) -> None:
    """Refuse a protobuf without its C parser, to which it falls back silently.

    The parser in Python is slower by orders of magnitude, and has had no bound on recursion: bytes from strangers end
    in a RecursionError where the C parser says DecodeError (CVE-2025-4565).
    """
    backend = api_implementation.Type()
    if backend != "upb":
        _refuse(
            settings_type,
            f"protobuf runs its {backend!r} implementation, not 'upb': unset PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"
            " or install a protobuf wheel made for this platform",
        )


def _config_file(settings_type: type[Settings], argv: list[str]) -> Path | None:
    names = [argv[i + 1] for i, arg in enumerate(argv[:-1]) if arg == "--config"]
    names += [arg.removeprefix("--config=") for arg in argv if arg.startswith("--config=")]
    if len(names) > 1:
        _refuse(settings_type, f"--config: one file, not {len(names)} ({', '.join(names)})")
    name = names[0] if names else os.environ.get("PAGEMILL_CONFIG")
    return Path(name) if name else None


def _refuse(settings_type: type[Settings], line: str) -> None:
    sys.stderr.write(f"{settings_type.prog}: {line}\n")
    raise SystemExit(2)
