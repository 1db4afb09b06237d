"""The terminal commands against a scripted gateway, and command lines that are wrong."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagemill.settings import ServiceSettings
from pagemill.v1 import inference_pb2 as pb
from pagemill_client import AsyncClient, cli
from pagemill_client.config import BenchSettings, ChatSettings, DemoSettings, GenerateSettings, ServeSettings
from pagemill_client.terminal import safe
from tests.unit.client.fake_gateway import FakeGateway, accepted, delta, finished, refuse


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PAGEMILL_")]:
        monkeypatch.delenv(name)


async def pagemill(*argv: str) -> int:
    return await asyncio.to_thread(cli.main, list(argv))


async def test_generate_streams_the_text(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--max-tokens", "4", "--temperature", "0", "--seed=-5", "--stop", '["a,b"]', "--stats"]
    assert await pagemill("generate", "once", "--target", gateway.target, *options) == 0
    out, err = capsys.readouterr()
    assert out == "abcd\n"
    assert "3 prompt + 4 new tokens, finished: length" in err
    request = gateway.requests[0]
    assert request.text == "once"
    assert (request.sampling.temperature, request.sampling.seed) == (0.0, -5)
    assert request.sampling.HasField("temperature")
    assert not request.sampling.HasField("top_p")
    assert list(request.stopping.stop) == ["a,b"]


async def test_generate_reads_standard_input(gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    assert await pagemill("generate", "-", "--target", gateway.target, "--ignore-eos") == 0
    assert gateway.requests[0].text == "from a pipe"
    assert gateway.requests[0].stopping.ignore_eos


async def test_options_come_from_environment_and_file(
    gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "c.toml").write_text("top_k = 3\nmax_tokens = 9\n")
    monkeypatch.setenv("PAGEMILL_TARGET", gateway.target)
    monkeypatch.setenv("PAGEMILL_MAX_TOKENS", "2")
    assert await pagemill("generate", "x", "--config", str(tmp_path / "c.toml")) == 0
    assert gateway.requests[0].sampling.top_k == 3
    assert gateway.requests[0].stopping.max_tokens == 2  # the environment is stronger than the file


async def test_cached_tokens_are_the_callers_to_see(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    async def warm(request: pb.GenerateRequest, context: Any, attempt: int) -> None:
        await context.write(accepted(request))
        await context.write(delta(0, [1], "ok"))
        await context.write(finished(completion_tokens=1, cached_tokens=2))

    gateway.script = warm
    assert await pagemill("generate", "x", "--target", gateway.target, "--stats") == 0
    assert "3 prompt (2 cached) + 1 new tokens" in capsys.readouterr().err
    async with AsyncClient(gateway.target) as client:
        generation = await client.generate("x", cache_salt="mine").collect()
    assert generation.finished is not None
    assert generation.finished.usage.cached_tokens == 2
    assert gateway.requests[-1].cache_salt == "mine"


async def test_a_refusal_is_one_line_with_the_reason(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    async def full(request: pb.GenerateRequest, context: Any, attempt: int) -> None:
        await refuse(
            context,
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "QUEUE_FULL",
            "queue is full",
            retry_after_s=0.5,
            pushback_ms=-1,
        )

    gateway.script = full
    assert await pagemill("generate", "x", "--target", gateway.target) == 1
    assert capsys.readouterr().err == "pagemill generate: QUEUE_FULL: queue is full (try again in 0.5 s)\n"


async def test_no_service_is_one_line_that_helps(capsys: pytest.CaptureFixture[str]) -> None:
    assert await pagemill("generate", "x", "--target", "unix:/nonexistent.sock") == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "no service answers at unix:/nonexistent.sock" in err


async def test_chat_answers_one_message(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        await pagemill(
            "chat", "--message", "hi", "--system", "be brief", "--max-tokens", "3", "--target", gateway.target
        )
        == 0
    )
    assert capsys.readouterr().out == "abc\n"
    assert [(m.role, m.content) for m in gateway.requests[0].chat.messages] == [("system", "be brief"), ("user", "hi")]


async def test_an_answer_of_chat_has_a_limit_by_default(gateway: FakeGateway) -> None:
    assert await pagemill("chat", "--message", "hi", "--target", gateway.target) == 0
    assert gateway.requests[0].stopping.max_tokens == 512


async def test_chat_keeps_history_until_cleared(gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\n/help\ntwo\n/clear\nthree\n/exit\nfour\n"))
    assert await pagemill("chat", "--max-tokens", "3", "--target", gateway.target) == 0
    turns = [[m.content for m in request.chat.messages] for request in gateway.requests]
    assert turns == [["one"], ["one", "abc", "two"], ["three"]]


async def test_a_failed_turn_is_forgotten(gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    async def first_fails(request: pb.GenerateRequest, context: Any, attempt: int) -> None:
        if attempt == 1:
            await refuse(context, grpc.StatusCode.INTERNAL, "INTERNAL")
        await context.write(accepted(request))
        await context.write(delta(0, [1], "ok"))
        await context.write(finished(completion_tokens=1))

    gateway.script = first_fails
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    assert await pagemill("chat", "--target", gateway.target) == 0
    assert [[m.content for m in request.chat.messages] for request in gateway.requests] == [["one"], ["two"]]


async def test_b29_a_turn_that_is_no_utf8_is_forgotten(
    gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A terminal's bytes that are not UTF-8 may come as unpaired surrogates."""
    monkeypatch.setattr("sys.stdin", io.StringIO("one\nb\udcff\ntwo\n"))
    assert await pagemill("chat", "--max-tokens", "3", "--target", gateway.target) == 0
    turns = [[m.content for m in request.chat.messages] for request in gateway.requests]
    assert turns == [["one"], ["one", "abc", "two"]]
    assert "the text is not valid UTF-8" in capsys.readouterr().err


async def test_b29_a_prompt_that_is_no_utf8_ends_with_one_clear_line(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await pagemill("generate", "a\udcff", "--target", gateway.target) == 1
    assert capsys.readouterr().err == "pagemill generate: the text is not valid UTF-8\n"
    assert gateway.requests == []


async def test_control_characters_of_an_answer_do_not_reach_the_terminal(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    async def hostile(request: pb.GenerateRequest, context: Any, attempt: int) -> None:
        await context.write(accepted(request))
        await context.write(delta(0, [1], "a\x1b]0;title\x07b\x9b2Jc\r\n\td"))
        await context.write(finished(completion_tokens=1))

    gateway.script = hostile
    assert await pagemill("generate", "x", "--target", gateway.target) == 0
    assert capsys.readouterr().out == "a]0;titleb2Jc\n\td\n"
    assert safe("äöü 日本 🙂") == "äöü 日本 🙂"


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["generate"], "required"),
        (["generate", "x", "--nonsense", "1"], "unrecognized arguments: --nonsense 1"),
        (["generate", "x", "--top-p", "2"], "--top-p"),
        (["generate", "x", "--timeout-s", "0"], "--timeout-s"),
        (["chat", "--max-tokens", "many"], "--max-tokens"),
        (["bench", "--prompt-tokens", "9-3"], "--prompt-tokens"),
        (["generate", "x", "--config", "/nonexistent.toml"], "--config: no such file"),
    ],
)
def test_a_wrong_command_line_ends_with_status_2(
    argv: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    assert line in capsys.readouterr().err


def test_an_unknown_command_ends_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["frobnicate"]) == 2
    assert "unknown command 'frobnicate'" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["generate", "x"], ["chat", "--message", "x"], ["bench"]])
def test_a_command_that_logs_nothing_has_no_log_level(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([*argv, "--log-level", "debug"])
    assert caught.value.code == 2
    assert "--log-level" in capsys.readouterr().err


def test_help_lists_every_command_and_loads_nothing() -> None:
    code = (
        "import sys; from pagemill_client import cli; cli.main(['--help']);"
        "sys.exit(any(m in sys.modules for m in ('grpc', 'pydantic', 'asyncio', 'google.protobuf')))"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=30, check=False, capture_output=True, text=True)
    assert done.returncode == 0
    for name in (*cli.COMMANDS, *cli.ROLES):
        assert f"  {name} " in done.stdout


@pytest.mark.parametrize("kind", [GenerateSettings, ChatSettings, BenchSettings, DemoSettings, ServeSettings])
def test_help_shows_every_option_with_its_meaning(
    kind: type[ServiceSettings], capsys: pytest.CaptureFixture[str]
) -> None:
    command = kind.prog.removeprefix("pagemill ")
    with contextlib.suppress(SystemExit):  # argparse ends after its help, serve adds the options of the roles
        cli.main([command, "--help"])
    shown = "".join(capsys.readouterr().out.split())
    for name, field in kind.model_fields.items():
        flag = name.upper() if name == "prompt" else f"--{name.replace('_', '-')}"
        assert flag in shown
        assert "".join((field.description or "nothing was said").split()) in shown


async def test_bench_writes_its_report(
    gateway: FakeGateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "r.json"
    load = [
        "--num-requests",
        "5",
        "--concurrency",
        "2",
        "--output-tokens",
        "3",
        "--prompt-tokens",
        "2-4",
        "--repeat",
        "2",
    ]
    assert await pagemill("bench", "--target", gateway.target, *load, "--output", str(report)) == 0
    runs = json.loads(report.read_text())["runs"]
    assert list(runs) == ["2 at once #1", "2 at once #2"]
    for run in runs.values():
        assert (run["num_finished"], run["generated_tokens"], run["errors"]) == (5, 15, {})
        assert run["ttft_s"]["p50"] > 0
    assert capsys.readouterr().out.count("2 at once") == 2
    measured = gateway.requests[2:7]  # after two of warm-up
    assert all(2 <= len(request.token_ids.ids) <= 4 for request in measured)
    assert all(max(request.token_ids.ids) < 100 for request in measured)


async def test_bench_runs_a_file_at_its_arrivals_and_at_rates(gateway: FakeGateway, tmp_path: Path) -> None:
    workload = tmp_path / "w.json"
    workload.write_text(json.dumps([{"ids": [1, 2], "n_out": 2, "at": 0.01 * i} for i in range(3)]))
    report = tmp_path / "r.json"
    base = ["bench", "--target", gateway.target, "--workload", str(workload), "--warmup", "0", "--output", str(report)]
    assert await pagemill(*base, "--use-arrivals") == 0
    assert list(json.loads(report.read_text())["runs"]) == ["arrivals of the file"]
    assert await pagemill(*base, "--rate", "50", "--rate", "100", "--format", "json") == 0
    assert list(json.loads(report.read_text())["runs"]) == ["50/s", "100/s"]
    assert len(gateway.requests) == 9


async def test_bench_counts_errors_by_reason(gateway: FakeGateway, tmp_path: Path) -> None:
    async def every_other(request: pb.GenerateRequest, context: Any, attempt: int) -> None:
        if attempt % 2:
            await refuse(context, grpc.StatusCode.FAILED_PRECONDITION, "PROMPT_EXCEEDS_KV_CAPACITY")
        await context.write(accepted(request))
        await context.write(delta(0, [1]))
        await context.write(finished(pb.FINISH_REASON_STOP, completion_tokens=1))  # one, though two were asked for

    gateway.script = every_other
    report = tmp_path / "r.json"
    load = ["--num-requests", "4", "--concurrency", "1", "--output-tokens", "2", "--warmup", "0"]
    assert await pagemill("bench", "--target", gateway.target, *load, "--output", str(report)) == 1
    (run,) = json.loads(report.read_text())["runs"].values()
    assert run["errors"] == {"PROMPT_EXCEEDS_KV_CAPACITY": 2, "ENDED_EARLY_STOP": 2}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "no requests"),
        ("{", "expected a list"),
        ('[{"ids": 3, "n_out": 1}]', "expected a list"),
        ('["x"]', "expected"),
    ],
)
async def test_bench_refuses_a_broken_workload(
    gateway: FakeGateway, tmp_path: Path, content: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "w.json"
    path.write_text(content)
    assert await pagemill("bench", "--target", gateway.target, "--workload", str(path)) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["serve", "--help"], ["--help"]])
def test_a_reader_that_goes_away_is_no_traceback(argv: list[str]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pagemill_client.cli", *argv],
            stdout=write_end,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        os.close(write_end)
    assert done.stderr == ""
    assert done.returncode == 141
