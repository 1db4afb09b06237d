from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from pagemill.settings import load
from scheduler_svc.config import EngineConfig, SchedulerSettings
from scheduler_svc.core.params import HostCache, PreemptionMode, QueuePolicy, SchedulerConfig


def test_every_number_of_the_core_is_an_option_with_the_same_default() -> None:
    settings = load(SchedulerSettings, [])
    assert settings.core() == SchedulerConfig()
    for field in fields(SchedulerConfig):
        option = SchedulerSettings.model_fields[field.name]
        assert option.description, field.name


def test_engine_defaults_equal_the_options() -> None:
    assert load(SchedulerSettings, []).engine() == EngineConfig()


def test_flags_environment_and_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "scheduler.yaml"
    file.write_text("max_num_seqs: 7\nlease_ms: 4000\nwatermark: 0.5\n")
    monkeypatch.setenv("PAGEMILL_LEASE_MS", "3000")
    monkeypatch.setenv("PAGEMILL_WATERMARK", "0.25")
    settings = load(SchedulerSettings, ["--config", str(file), "--watermark", "0.125", "--queue-policy", "priority"])
    assert (settings.max_num_seqs, settings.lease_ms, settings.watermark) == (7, 3000, 0.125)
    assert settings.core().queue_policy is QueuePolicy.PRIORITY


def test_memory_options_reach_the_core() -> None:
    argv = ["--preemption-mode", "recompute", "--no-prefix-cache", "--host-cache", "write-through"]
    core = load(SchedulerSettings, argv).core()
    assert (core.preemption_mode, core.prefix_cache) == (PreemptionMode.RECOMPUTE, False)
    assert core.host_cache is HostCache.WRITE_THROUGH
    assert load(SchedulerSettings, ["--prefix-cache", "--host-cache", "off"]).core().host_cache is HostCache.OFF


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--gateway-endpoint", "tcp://127.0.0.1:5560"], "--insecure"),
        (["--executor-endpoint", "tcp://0.0.0.0:5561", "--insecure"], "one address"),
        (["--metrics-host", "0.0.0.0"], "--metrics-host '0.0.0.0' is not a loopback address"),
        (["--lease-ms", "100"], "heartbeat_ms"),
        (["--max-num-seqs", "0"], "--max-num-seqs"),
        (["--queue-policy", "lifo"], "--queue-policy"),
        (["--preemption-mode", "none"], "--preemption-mode"),
        (["--host-cache", "on"], "--host-cache"),
        (["--config", "/no/such/file.yaml"], "no such file"),
    ],
)
def test_what_cannot_be_is_one_clear_line(argv: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load(SchedulerSettings, argv)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("pagemill scheduler: ")
    assert line in error
    assert error.count("\n") == 1


def test_metrics_beyond_loopback_are_served_when_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(SchedulerSettings, ["--metrics-host", "10.0.0.1", "--insecure"]).metrics_host == "10.0.0.1"
    monkeypatch.setenv("PAGEMILL_INSECURE", "true")
    monkeypatch.setenv("PAGEMILL_METRICS_HOST", "0.0.0.0")
    assert load(SchedulerSettings, []).metrics_host == "0.0.0.0"


def test_what_waits_for_a_slow_gateway_is_the_operators_to_bound() -> None:
    assert load(SchedulerSettings, ["--max-pending-tokens", "60"]).engine().max_pending_tokens == 60
