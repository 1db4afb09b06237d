"""`pagemill tune` on a tiny random model: real services, one after another, and nothing left of them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import transformers

from pagemill_client.serve import plan
from tests.unit.gateway.tiny_tokenizer import byte_level_tokenizer

pytestmark = pytest.mark.timeout(240)

SMALL = [
    "--num-requests", "6", "--prompt-tokens", "4-30", "--output-tokens", "4-8", "--concurrency", "4",
    "--connections", "1", "--kv-memory-bytes", "4194304", "--host-kv-memory-bytes", "0",
]  # fmt: skip


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of the Llama shape whose ids are bytes."""
    directory = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=259, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    byte_level_tokenizer().save(str(directory / "tokenizer.json"))
    return directory


def start(model: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "pagemill_client.cli", "tune", "--model", str(model), *SMALL, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_it_measures_chooses_and_writes_a_file_that_serve_takes(tiny_model: Path, tmp_path: Path) -> None:
    base, file, report = tmp_path / "base.yaml", tmp_path / "tuned.yaml", tmp_path / "report.json"
    base.write_text("max_num_seqs: 2\nmax_prefill_chunk: 16\nmax_step_ms: 0\nwatermark: 0.05\n")
    with start(tiny_model, "--config", str(base), "--output", str(file), "--report", str(report),
               "--budget-s", "3600", "--max-runs", "4", "--confirm", "1") as process:  # fmt: skip
        out, err = process.communicate(timeout=220)
    assert process.returncode == 0, err
    written = json.loads(report.read_text())
    assert written["start"]["max_num_seqs"] == 2
    assert 2 <= len(written["runs"]) <= 4
    assert all(run["error"] is None and run["tokens_per_s"] > 0 for run in written["runs"]), written["runs"]
    assert len({json.dumps(run["candidate"]) for run in written["runs"]}) >= 2
    assert "ITL p99 ms" in out
    stack = plan(["--model", str(tiny_model), "--port=0", "--config", str(file)], tmp_path)
    chosen = written["chosen"]["candidate"]
    for role in ("scheduler", "executor"):
        taken = {name: getattr(stack.loaded[role], name, value) for name, value in chosen.items()}
        assert taken == chosen
    assert stack.loaded["scheduler"].watermark == 0.05


def test_an_interrupt_keeps_what_was_measured_and_leaves_no_process(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "tuned.yaml"
    with start(tiny_model, "--output", str(file)) as process:
        assert process.stderr is not None
        lines: list[str] = []
        second = threading.Event()

        def read() -> None:
            assert process.stderr is not None
            for line in process.stderr:
                lines.append(line)
                if ": run 2: " in line:
                    second.set()

        reader = threading.Thread(target=read)
        reader.start()
        assert second.wait(150), lines
        children = wait_for_children(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130, lines
        reader.join()
        assert process.stdout is not None
        assert "ITL p99 ms" in process.stdout.read()
    assert "interrupted" in file.read_text().splitlines()[0]
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() for pid in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]


def wait_for_children(pid: int) -> list[int]:
    """The processes of the service that is being measured."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        if len(found) == 3:
            return found
        time.sleep(0.05)
    raise AssertionError("no service was started")


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with start(tmp_path / "none", "--output", str(tmp_path / "o.yaml")) as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert err.splitlines() == [f"pagemill tune: --model: no such file or directory: {tmp_path / 'none'}"]
