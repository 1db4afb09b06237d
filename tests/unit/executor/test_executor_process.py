"""What only a process of its own can show: signals, the parent's death, sockets, refusals at start."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from executor_svc import service
from executor_svc.config import ExecutorSettings
from executor_svc.startup import WrongOptionError
from pagemill.engine.v1 import executor_pb2 as pb
from pagemill.model_files import read_model_info
from pagemill.settings import load
from pagemill.zmq_links import ZmqHub
from tests.unit.executor.executor_fakes import admit, column, greedy_continuation, ids_of
from tests.unit.executor.executor_scheduler import DEADLINE_S, MiniScheduler

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
Spawn = Callable[..., "subprocess.Popen[str]"]

FIRST_PLAN = pb.StepPlan(step_id=1, admit=[admit(0, [1, 2, 3], [0])], row_lanes=column(0), row_num_tokens=column(3))


@pytest.fixture
def endpoint(socket_dir: Path) -> str:
    return f"ipc://{socket_dir}/x"


@pytest.fixture
def scheduler(endpoint: str) -> Iterator[MiniScheduler]:
    hub = ZmqHub(endpoint, role="executor", bound=64)
    yield MiniScheduler(hub)
    hub.close()


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    processes: list[subprocess.Popen[str]] = []

    def start(*argv: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *argv],
            cwd=ROOT,
            env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate(timeout=DEADLINE_S)


def send_line(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def wait_running(scheduler: MiniScheduler) -> None:
    while scheduler.receive("heartbeat").heartbeat.state != pb.EXECUTOR_STATE_RUNNING:
        pass


def test_sigterm_lets_the_running_step_finish(scheduler: MiniScheduler, endpoint: str, spawn: Spawn) -> None:
    process = spawn(str(HERE / "executor_process.py"), endpoint)
    scheduler.start(epoch=1)
    scheduler.send(plan=FIRST_PLAN)
    wait_running(scheduler)
    process.send_signal(signal.SIGTERM)
    scheduler.heartbeats.clear()
    wait_running(scheduler)  # it waits for the step, and still says so
    send_line(process)
    assert ids_of(scheduler.receive("result").result.token_ids) == greedy_continuation([1, 2, 3], 1)
    assert scheduler.receive("goodbye").goodbye.reason == "stopped"
    assert process.wait(DEADLINE_S) == 0


def test_a_second_sigterm_ends_it_at_once(scheduler: MiniScheduler, endpoint: str, spawn: Spawn) -> None:
    process = spawn(str(HERE / "executor_process.py"), endpoint)
    scheduler.start(epoch=1)
    scheduler.send(plan=FIRST_PLAN)
    wait_running(scheduler)
    process.send_signal(signal.SIGTERM)
    scheduler.heartbeats.clear()
    scheduler.receive("heartbeat")
    scheduler.receive("heartbeat")  # at least one was sent after the signal had been handled
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE_S) == 130


def test_it_ends_with_its_parent(scheduler: MiniScheduler, endpoint: str, spawn: Spawn) -> None:
    child = [sys.executable, str(HERE / "executor_process.py"), endpoint, "die-with-parent"]
    parent = spawn("-c", f"import subprocess, sys; subprocess.Popen({child!r}).wait()")
    scheduler.start(epoch=1)
    scheduler.receive("heartbeat")
    parent.kill()
    assert scheduler.receive("goodbye").goodbye.reason == "stopped"


def test_a_new_scheduler_on_the_same_endpoint_is_found(endpoint: str, spawn: Spawn) -> None:
    process = spawn(str(HERE / "executor_process.py"), endpoint)
    for epoch in (1, 2):
        hub = ZmqHub(endpoint, role="executor", bound=64)
        try:
            scheduler = MiniScheduler(hub)
            scheduler.start(epoch=epoch, lease_ms=500)
            send_line(process)
            assert ids_of(scheduler.step(FIRST_PLAN).token_ids) == greedy_continuation([1, 2, 3], 1)
        finally:
            hub.close()


def test_a_model_that_is_not_there_is_one_line_and_a_failure(spawn: Spawn) -> None:
    process = spawn("-m", "executor_svc", "--model", "/nowhere/model", "--metrics-port", "0")
    _, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    refusals = [line for line in stderr.splitlines() if line.startswith("pagemill executor: cannot start: ")]
    assert len(refusals) == 1
    assert "/nowhere/model" in refusals[0]
    assert "Traceback" not in stderr


def test_a_taken_metrics_port_is_one_line_and_a_failure(spawn: Spawn) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = spawn("-m", "executor_svc", "--model", "/nowhere", "--metrics-port", str(taken.getsockname()[1]))
        _, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 2
    assert stderr.splitlines()[-1].startswith("pagemill executor: --metrics-port: ")
    assert "Traceback" not in stderr


def test_clear_text_tcp_is_refused_as_a_wrong_option(spawn: Spawn) -> None:
    options = ["--model", "/nowhere", "--metrics-port", "0", "--scheduler-endpoint", "tcp://192.0.2.1:5999"]
    process = spawn("-m", "executor_svc", *options)
    _, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 2
    (line,) = [line for line in stderr.splitlines() if line.startswith("pagemill executor: ")]
    assert "--insecure" in line
    assert "Traceback" not in stderr


@pytest.mark.model
def test_more_positions_than_the_model_has_are_refused_before_the_weights(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def weights(*_: object, **__: object) -> None:
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr(service, "load_runner", weights)
    positions = read_model_info(demo_model).max_model_len
    settings = ExecutorSettings(model=demo_model, max_model_len=positions + 1)
    with pytest.raises(WrongOptionError, match=f"^--max-model-len: the model has {positions} positions"):
        service._load(settings)


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ([], "--model"),
        (["--model", "m", "--device", "cuda"], "--device"),
        (["--model", "m", "--kv-dtype", "int4"], "--kv-dtype"),
        (["--model", "m", "--dtype", "float16"], "--dtype"),
        (["--model", "m", "--block-size", "0"], "--block-size"),
        (["--model", "m", "--memory-utilization", "1.5"], "--memory-utilization"),
        (["--model", "m", "--name", "a/b"], "--name"),
    ],
)
def test_wrong_options_name_the_flag(
    argv: list[str], named: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PAGEMILL_MODEL", raising=False)
    with pytest.raises(SystemExit) as caught:
        load(ExecutorSettings, argv)
    assert caught.value.code == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith(f"pagemill executor: {named}: ")
    assert stderr.count("\n") == 1


def test_metrics_beyond_loopback_need_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", "m", "--metrics-host", "0.0.0.0"]
    with pytest.raises(SystemExit) as caught:
        load(ExecutorSettings, options)
    assert caught.value.code == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith("pagemill executor: --metrics-host '0.0.0.0' is not a loopback address")
    assert stderr.endswith("needs --insecure\n")
    assert stderr.count("\n") == 1
    assert load(ExecutorSettings, [*options, "--insecure"]).metrics_host == "0.0.0.0"


def test_defaults_are_valid() -> None:
    settings = load(ExecutorSettings, ["--model", "m"])
    assert settings.model == Path("m")
    assert settings.scheduler_endpoint.startswith("ipc://")
    assert settings.metrics_host == "127.0.0.1"


def test_garbage_is_collected_once_it_serves_and_what_imports_made_is_not() -> None:
    program = (
        "import gc, sys\n"
        "from executor_svc import __main__, service\n"
        "service.serve = lambda settings, started: 7 if gc.isenabled() and gc.get_freeze_count() > 10_000 else 1\n"
        "sys.exit(__main__.main(['--model', 'm']))\n"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=DEADLINE_S, check=False).returncode == 7
