"""Where a step's time goes, in the whole running service: a table and a flame graph per load.

    python -m bench.step_profile                                    # 1 and 64 decode rows, and prompts of 2,048
    python -m bench.step_profile --load decode:16 --load prefill:512 --out profile.json --flame-dir flames

Gateway, scheduler and executor run as `pagemill serve` starts them, but for timers around the executor's kernels
(`bench.profiling`). A load is kept up by clients over gRPC: `decode:N`, N streams that generate; `prefill:N`, two
clients that send prompts of N tokens in turn. Steps are counted from when the load has settled.

Rows of the table, milliseconds of a mean step from its beginning to that of the next:
GEMM, attention, other kernels (norms, SiLU, rotation and store), sampling; Python: what the compute thread does
besides, small tensor operations and the conversion of kernels' arguments included; idle: it waits for a plan. Beside
it, while steps run: what scheduling took, the way of a plan and a result (both by the scheduler's metrics), and the CPU
time of the executor's link thread, scheduler, gateway and of the clients here.

Flame graphs are sampled by py-spy in a second window, so that stopping the process does not count in the table.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import random
import shutil
import sys
import sysconfig
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from bench import machine
from bench.link_delay import free_port
from bench.profiling.breakdown import Breakdown, breakdown, table, within
from bench.profiling.clock import CallCost
from bench.stack import serving
from pagemill.model_files import find_demo_model
from pagemill_client.aio import AsyncClient
from pagemill_client.processes import ChildSpec
from pagemill_client.types import Delta

LOADS = ("decode:1", "decode:64", "prefill:2048")
PROMPT_TOKENS = 128
"""Of each stream of a decode load."""
KV_BYTES = 2 << 30
SETTLE_TOKENS = 4
"""Each stream of a decode load has these before the window begins."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclasses.dataclass(slots=True)
class Window:
    """What was seen from outside while the steps of one load were counted; times on `time.monotonic`."""

    load: str
    begin: float = 0.0
    end: float = 0.0
    spent: dict[str, float] = dataclasses.field(default_factory=dict)
    """Seconds by name: sums of the scheduler's metrics, CPU times."""
    num_planned: float = 0.0
    other_cpus: float = 0.0


async def main() -> None:
    args = _arguments()
    model = args.model or find_demo_model()
    with tempfile.TemporaryDirectory(prefix="pagemill-profile-") as folder:
        records = Path(folder) / "steps.json"
        windows = [
            await _profile(args, str(model), load, records.with_name(f"{n}.json")) for n, load in enumerate(args.load)
        ]
        results = [_result(window, records.with_name(f"{n}.json")) for n, window in enumerate(windows)]
    for window, (found, beside, shares) in zip(windows, results, strict=True):
        print(table(window.load, found, beside))
        print(f"  not kernels: {shares['in_the_way']:.2%} of the time from step to step (Python, idle)")
        print(f"               {shares['all']:.2%} if scheduling and the wire, which run beside it, stood in its way")
        if window.other_cpus > 0.1:
            print(f"  others used {window.other_cpus:.1f} CPUs meanwhile: repeat on a quiet machine")
        print()
    if args.out:
        args.out.write_text(json.dumps(_document(args, windows, results), indent=1) + "\n")


async def _profile(args: argparse.Namespace, model: str, load: str, records: Path) -> Window:
    """One service, one load, one window; the executor's records are in `records` when this returns."""
    port = free_port()
    options = [f"--kv-memory-bytes={KV_BYTES}", *args.serve_option, f"--scheduler.metrics-port={port}"]
    window = Window(load)

    def with_timers(child: ChildSpec) -> ChildSpec:
        if child.role != "executor":
            return child
        options = child.arguments[2:]  # after -m and the module
        return dataclasses.replace(child, arguments=("-m", "bench.profiling.executor", str(records), *options))

    async with serving(model, options, adapt=with_timers) as target, AsyncClient(target) as client, _load(client, load):
        pids = _pids()
        before, meter, window.begin = _readings(pids, port), machine.CpuMeter(), time.monotonic()
        await asyncio.sleep(args.seconds)
        after, window.end = _readings(pids, port), time.monotonic()
        window.other_cpus = round(meter.others_cpus(), 3)
        window.spent = {name: after[name] - before[name] for name in after}
        window.num_planned = window.spent.pop("plans")
        if args.flame_dir:
            await _flame(pids["executor"], args.flame_dir / f"{load.replace(':', '-')}.svg", args.flame_seconds)
    return window


@contextlib.asynccontextmanager
async def _load(client: AsyncClient, load: str) -> AsyncIterator[None]:
    """Keeps the load up; entered once it has settled."""
    kind, _, size = load.partition(":")
    rng, vocab = random.Random(7), (await client.get_model("")).vocab_size
    settled = asyncio.Semaphore(0)
    if kind == "decode":
        tokens = min(3000, 64_000 // int(size))
        work = [_stream(client, _prompt(rng, PROMPT_TOKENS, vocab), tokens, settled) for _ in range(int(size))]
    else:
        work = [_prompts(client, random.Random(seed), int(size), vocab, settled) for seed in range(2)]
    tasks = [asyncio.create_task(one) for one in work]
    try:
        for _ in tasks:
            waiting = asyncio.create_task(settled.acquire())
            await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
            _raise_if_ended(tasks)
        yield
        _raise_if_ended(tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _raise_if_ended(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        if task.done():
            task.result()
            raise RuntimeError("the load ended inside the window: fewer --seconds, or rows than --max-num-seqs")


async def _stream(client: AsyncClient, ids: list[int], max_tokens: int, settled: asyncio.Semaphore) -> None:
    num_tokens = 0
    async with client.generate(ids, max_tokens=max_tokens, temperature=0.0, ignore_eos=True) as stream:
        async for event in stream:
            if isinstance(event, Delta):
                before, num_tokens = num_tokens, num_tokens + len(event.token_ids)
                if before < SETTLE_TOKENS <= num_tokens:
                    settled.release()


async def _prompts(
    client: AsyncClient, rng: random.Random, length: int, vocab: int, settled: asyncio.Semaphore
) -> None:
    while True:
        await client.generate(_prompt(rng, length, vocab), max_tokens=1, temperature=0.0, ignore_eos=True).collect()
        settled.release()


def _prompt(rng: random.Random, length: int, vocab: int) -> list[int]:
    return [rng.randrange(vocab) for _ in range(length)]


def _pids() -> dict[str, int]:
    """The service's processes by role: children of this one."""
    modules = {"scheduler_svc.gateway": "gateway", "scheduler_svc": "scheduler", "bench.profiling.executor": "executor"}
    found = {}
    for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        if words[1:2] == ["-m"] and words[2] in modules:
            found[modules[words[2]]] = int(pid)
    return found


def _readings(pids: dict[str, int], port: int) -> dict[str, float]:
    """Running totals in seconds, and "plans"."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        lines = dict(line.rsplit(" ", 1) for line in page.read().decode().splitlines() if line[:1] != "#")
    executor = pids["executor"]
    return {
        "schedule": float(lines['pagemill_step_seconds_sum{phase="schedule"}']),
        "wire": float(lines['pagemill_step_seconds_sum{phase="wire"}']),
        "plans": float(lines['pagemill_step_seconds_count{phase="schedule"}']),
        "executor's link thread, CPU": _cpu_s(Path(f"/proc/{executor}/task/{executor}/stat")),
        "scheduler, CPU": _cpu_s(Path(f"/proc/{pids['scheduler']}/stat")),
        "gateway, CPU": _cpu_s(Path(f"/proc/{pids['gateway']}/stat")),
        "clients here, CPU": time.process_time(),
    }


def _cpu_s(stat: Path) -> float:
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


async def _flame(pid: int, out: Path, seconds: float) -> None:
    """A flame graph of the executor's threads that are not asleep."""
    program = Path(sysconfig.get_path("scripts")) / "py-spy"
    found = str(program) if program.exists() else shutil.which("py-spy")
    if found is None:
        print("no flame graph: py-spy is not installed (it comes with the extra `dev`)", file=sys.stderr)
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    sampler = await asyncio.create_subprocess_exec(
        *(found, "record", "--pid", str(pid), "--duration", str(max(1, round(seconds))), "--rate", "250"),
        *("--threads", "--format", "flamegraph", "--output", str(out)),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await sampler.communicate()
    if sampler.returncode:
        print(f"no flame graph: {said.decode().strip()}", file=sys.stderr)
    else:
        print(f"flame graph in {out}", file=sys.stderr)


def _result(window: Window, records: Path) -> tuple[Breakdown, dict[str, float], dict[str, float]]:
    """The mean step, what ran beside it in milliseconds a step, and the shares that are no kernels'."""
    written = json.loads(records.read_text())
    kind, _, size = window.load.partition(":")
    steps = within(written["steps"], window.begin, window.end)
    if kind == "decode":
        steps = [step for step in steps if step["rows"] == step["tokens"] == int(size)]
    costs = {label: CallCost(**cost) for label, cost in written["costs"].items()}
    found = breakdown(steps, costs, CallCost(**written["timer"]))
    beside = {name: seconds * 1e3 / max(1.0, window.num_planned) for name, seconds in window.spent.items()}
    shares = {"in_the_way": found.not_kernels(), "all": found.not_kernels(beside["schedule"] + beside["wire"])}
    return found, beside, shares


def _document(args: argparse.Namespace, windows: list[Window], results: list[Any]) -> dict[str, Any]:
    return {
        "machine": machine.describe(),
        "options": {key: str(value) for key, value in vars(args).items() if key not in ("model", "out", "flame_dir")},
        "loads": {
            window.load: {
                "steps": found.num_steps,
                "mean_rows": found.mean_rows,
                "mean_tokens": found.mean_tokens,
                "period_ms": found.period_ms,
                "milliseconds": dict(found.milliseconds),
                "labels_ms": dict(found.labels),
                "timers_ms": found.timers_ms,
                "beside_ms": beside,
                "not_kernels": shares,
                "other_cpus": window.other_cpus,
            }
            for window, (found, beside, shares) in zip(windows, results, strict=True)
        },
    }


def _a_load(text: str) -> str:
    kind, _, size = text.partition(":")
    if kind not in ("decode", "prefill") or not size.isdigit() or int(size) < 1:
        raise argparse.ArgumentTypeError("expected decode:N or prefill:N")
    return text


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="directory or GGUF file; default: the demo model")
    parser.add_argument("--load", type=_a_load, action="append", help=f"default: {', '.join(LOADS)}")
    parser.add_argument("--seconds", type=float, default=8.0, help="length of the window of each load")
    parser.add_argument("--flame-dir", type=Path, help="folder for flame graphs; default: none are made")
    parser.add_argument("--flame-seconds", type=float, default=5.0, help="length of their window")
    parser.add_argument("--serve-option", action="append", default=[], help="for pagemill serve: --NAME=VALUE")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    args = parser.parse_args()
    args.load = args.load or list(LOADS)
    return args


if __name__ == "__main__":
    asyncio.run(main())
