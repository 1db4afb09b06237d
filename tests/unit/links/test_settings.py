"""What every process checks before it does anything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from executor_svc.config import ExecutorSettings
from pagemill.known_options import KNOWN_OPTIONS
from pagemill.settings import ServiceSettings, load
from pagemill_client.config import DemoSettings, ServeSettings
from scheduler_svc.config import SchedulerSettings
from scheduler_svc.gateway.config import GatewaySettings

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("prog", "command"),
    [
        ("pagemill scheduler", ["scheduler_svc"]),
        ("pagemill gateway", ["scheduler_svc.gateway"]),
        ("pagemill executor", ["executor_svc"]),
        ("pagemill generate", ["pagemill_client.cli", "generate"]),
    ],
)
def test_s23_no_process_starts_with_the_parser_in_python(prog: str, command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command, "--config", "/nowhere"],  # read after the check
        cwd=ROOT,
        env={**os.environ, "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{prog}: protobuf runs its 'python' implementation, not 'upb'")


ROLES: tuple[type[ServiceSettings], ...] = (SchedulerSettings, GatewaySettings, ExecutorSettings)


def test_options_of_all_processes_are_known() -> None:
    kinds: tuple[type[ServiceSettings], ...] = (*ROLES, ServeSettings, DemoSettings)
    names = {name for kind in kinds for name in kind.model_fields}
    assert set(KNOWN_OPTIONS) == names


def refused(tmp_path: Path, name: str, content: bytes, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a role ends with."""
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(SystemExit) as caught:
        load(SchedulerSettings, ["--config", str(file)])
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    start = f"pagemill scheduler: --config {file}: "
    assert line.startswith(start)
    return line.removeprefix(start)


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("a.yaml", b"max_num_seqs: 4\nlease_ms: [1\nwatermark: 0.5\n", "line 3, column 10: expected ',' or ']'"),
        ("a.yaml", b"max_num_seqs: 4\n\tlease_ms: 3\n", "line 2, column 1: "),
        ("a.yaml", b"lease_ms: @x\n", "line 1, column 11: found character '@'"),
        ("a.yaml", b"- max_num_seqs\n", "expected one `option: value` a line"),
        ("a.yaml", b"just words\n", "expected one `option: value` a line"),
        ("a.yaml", b"lease_ms: \xff\xfe\n", ""),
        ("a.toml", b"max_num_seqs = 4\nlease_ms = = 3\n", "Invalid value (at line 2, column 12)"),
        ("a.yaml", b"max_seqs_num: 4\n", "no process has the option 'max_seqs_num'"),
        ("a.yaml", b"max-num-seqs: 4\n", "no process has the option 'max-num-seqs'; did you mean 'max_num_seqs'?"),
        ("a.toml", b"max_num_seq = 4\n", "no process has the option 'max_num_seq'; did you mean 'max_num_seqs'?"),
        (
            "a.yaml",
            b"lease_ms: 4\nmax_num_seqs: 1\n'lease_ms': 5\n",
            "line 3, column 1: 'lease_ms' is in line 1 already",
        ),
        ("a.toml", b"lease_ms = 4\nlease_ms = 5\n", "Cannot overwrite a value (at "),
        ("a.yaml", b"max_num_seqs: true\n", "max_num_seqs: got true; "),
        ("a.toml", b"watermark = false\n", "watermark: got false; "),
        ("a.yaml", b"host_cache: off\n", "host_cache: got false; yes, no, on and off are words only in quotes"),
        ("a.yaml", b"1: 4\n", "expected one `option: value` a line"),
    ],
)
def test_file_that_cannot_be_read_or_holds_a_mistake_is_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes, line: str
) -> None:
    assert refused(tmp_path, name, content, capsys).startswith(line)


@pytest.mark.parametrize("kind", ROLES)
def test_file_for_all_processes_serves_each(tmp_path: Path, kind: type[ServiceSettings]) -> None:
    file = tmp_path / "all.yaml"
    file.write_text("max_num_seqs: 4\nlog_level: debug\n" + "metrics_host: 127.0.0.1\n")
    argv = ["--config", str(file)] + (["--model", str(tmp_path)] if "model" in kind.model_fields else [])
    settings = load(kind, argv)
    assert settings.log_level == "debug"
    assert getattr(settings, "max_num_seqs", 4) == 4


def test_options_that_are_yes_or_no_may_be_so_in_a_file(tmp_path: Path) -> None:
    for name, content in (("a.yaml", "prefix_cache: off\nhost_cache: 'off'\n"), ("a.toml", "prefix_cache = false\n")):
        (tmp_path / name).write_text(content)
        assert load(SchedulerSettings, ["--config", str(tmp_path / name)]).prefix_cache is False


@pytest.mark.parametrize("forms", [("--config={}", "--config={}"), ("--config {}", "--config={}")])
def test_a_second_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], forms: tuple[str, str]) -> None:
    files = [tmp_path / name for name in ("a.yaml", "b.yaml")]
    for file in files:
        file.write_text("")
    argv = [word for form, file in zip(forms, files, strict=True) for word in form.format(file).split()]
    with pytest.raises(SystemExit) as caught:
        load(SchedulerSettings, argv)
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"pagemill scheduler: --config: one file, not 2 ({', '.join(sorted(map(str, files)))})"


def test_empty_file_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "e.yaml").write_text("# nothing\n")
    settings = load(SchedulerSettings, ["--config", str(tmp_path / "e.yaml")])
    assert settings.core() == load(SchedulerSettings, []).core()
