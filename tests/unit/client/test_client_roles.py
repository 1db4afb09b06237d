"""One command line, shared out among serve and the roles."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagemill_client import serve
from pagemill_client.roles import OptionError, share_out

OWN = {"model": None, "config": None, "log-level": "info"}
ROLES = {
    "gateway": {"port": 1, "insecure": False, "metrics-port": 9100, "log-level": "info", "config": None},
    "scheduler": {"insecure": False, "metrics-port": 9101, "watermark": 0.1, "log-level": "info", "config": None},
    "executor": {"dtype": "auto", "metrics-port": 9102, "log-level": "info", "config": None},
}


def test_each_option_goes_to_those_that_have_it() -> None:
    shared = share_out(["--model", "m", "--port=5", "--insecure", "--watermark", "0.2"], OWN, ROLES)
    assert shared.serve == ["--model", "m"]
    assert shared.by_role["gateway"] == ["--port=5", "--insecure"]
    assert shared.by_role["scheduler"] == ["--insecure", "--watermark", "0.2"]
    assert shared.by_role["executor"] == []


def test_log_level_and_config_go_to_everybody() -> None:
    shared = share_out(["--log-level", "debug"], OWN, ROLES)
    assert [shared.serve, *shared.by_role.values()] == [["--log-level", "debug"]] * 4


def test_a_role_can_be_named() -> None:
    shared = share_out(["--executor.metrics-port", "0", "--gateway.no-insecure"], OWN, ROLES)
    assert shared.by_role == {"gateway": ["--no-insecure"], "scheduler": [], "executor": ["--metrics-port", "0"]}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--nonsense"], "--nonsense: neither serve nor a role"),
        (["--executor.port", "1"], "the executor has no option --port"),
        (["--planner.port", "1"], "neither serve nor a role"),
        (["--metrics-port", "1"], "use --gateway.metrics-port or --scheduler.metrics-port or --executor.metrics-port"),
        (["stray"], "'stray' belongs to no option"),
        (["--port=1", "stray"], "'stray' belongs to no option"),
    ],
)
def test_what_nobody_can_take_is_refused(argv: list[str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        share_out(argv, OWN, ROLES)


def test_the_stack_is_planned_with_private_sockets(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.touch()
    stack = serve.plan(["--model", str(model), "--port", "0", "--executor.metrics-port", "0"], tmp_path)
    gateway, scheduler, executor = (list(child.arguments) for child in stack.children)
    assert [child.role for child in stack.children] == ["gateway", "scheduler", "executor"]
    assert gateway[:2] == ["-m", "scheduler_svc.gateway"]
    assert f"ipc://{tmp_path}/gateways.sock" in gateway
    assert f"ipc://{tmp_path}/executors.sock" in executor
    assert {f"ipc://{tmp_path}/gateways.sock", f"ipc://{tmp_path}/executors.sock"} <= set(scheduler)
    assert str(model) in gateway
    assert str(model) in executor
    port = stack.target.rpartition(":")[2]
    assert gateway[-2:] == ["--port", port]  # a number: a restarted gateway is found at the same place
    assert port != "0"
    assert [line.split(" on ")[0] for line in stack.listeners] == [
        "gRPC", "admin gRPC", "metrics of the gateway", "metrics of the scheduler",
    ]  # fmt: skip


def test_endpoints_of_the_user_are_kept(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.touch()
    options = ["--executor-endpoint", "tcp://127.0.0.1:5999", "--insecure"]
    options += ["--executor.scheduler-endpoint", f"ipc://{tmp_path}/other.sock"]
    stack = serve.plan(["--model", str(model), *options], tmp_path)
    _, scheduler, executor = (" ".join(child.arguments) for child in stack.children)
    assert "--executor-endpoint tcp://127.0.0.1:5999" in scheduler
    assert "executors.sock" not in scheduler + executor
    assert f"--scheduler-endpoint ipc://{tmp_path}/other.sock" in executor


def test_an_executor_follows_a_tcp_endpoint_of_the_scheduler(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.touch()
    argv = ["--model", str(model), "--executor-endpoint", "tcp://127.0.0.1:5999", "--insecure"]
    executor = serve.plan(argv, tmp_path).children[2].arguments
    assert executor[-2:] == ("--scheduler-endpoint", "tcp://127.0.0.1:5999")


@pytest.mark.parametrize(
    ("name", "text"), [("c.toml", "watermark = 0.2\nwater_mark = 0.1\n"), ("c.yaml", "watermark: 0.2\nwater_mark: 1\n")]
)
def test_a_key_of_the_file_that_nobody_knows_is_refused(
    name: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m.gguf").touch()
    (tmp_path / name).write_text(text)
    argv = ["--model", str(tmp_path / "m.gguf"), "--port=0", "--config", str(tmp_path / name)]
    with pytest.raises(SystemExit) as caught:
        serve.main(argv)
    assert caught.value.code == 2
    line = f"--config {tmp_path / name}: no process has the option 'water_mark'; did you mean 'watermark'?"
    assert capsys.readouterr().err == f"pagemill serve: {line}\n"
    (tmp_path / name).write_text(text.splitlines()[0])
    assert serve.plan(argv, tmp_path).settings.config == tmp_path / name


def test_what_a_role_would_refuse_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m.gguf").touch()
    with pytest.raises(SystemExit) as caught:
        serve.plan(["--model", str(tmp_path / "m.gguf"), "--watermark", "7"], tmp_path)
    assert caught.value.code == 2
    assert "--watermark" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model", "/nonexistent"], "no such file or directory: /nonexistent"),
        (["--model", "/", "--stop-timeout-s", "20"], "must be above the gateway's --drain-timeout-s 30"),
    ],
)
def test_a_stack_that_cannot_be_is_status_2(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main(argv) == 2
    assert message in capsys.readouterr().err
