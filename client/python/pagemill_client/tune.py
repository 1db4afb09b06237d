"""`pagemill tune`: finds settings for this machine, this model and a load, by measuring services that have them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import random
import shlex
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pagemill.model_files import ModelFileError
from pagemill.settings import file_values, load
from pagemill_client import roles
from pagemill_client.bench import requests_of, warmup_of
from pagemill_client.config import TuneSettings
from pagemill_client.errors import PagemillError
from pagemill_client.load import Request, WorkloadError, closed_loop, open_loop, poisson, read_workload
from pagemill_client.report import Report, Slo, summarize
from pagemill_client.roles import EXECUTOR, SCHEDULER, STOP_ORDER, OptionError
from pagemill_client.running import running
from pagemill_client.serve import Stack, plan, stop_on_signals
from pagemill_client.supervisor import ServeError
from pagemill_client.terminal import err, out
from pagemill_client.tuning import FACTORS, Candidate, Measured, Result, Rule, choose, make_rule, results, sweep, table

INTERRUPTED_STATUS = 130
_OUR_PORTS = ("--port=0", "--admin-port=0", *(f"--{role.name}.metrics-port=0" for role in STOP_ORDER))


@dataclass(slots=True)
class Tuning:
    """What is known so far. `started`, `longest_s`: for the time budget; seconds on `time.monotonic`."""

    settings: TuneSettings
    options: list[str]
    """Of `pagemill serve`, from the command line."""
    base: dict[str, Any]
    """Options from the --config file, without those of `tune` itself."""
    stop: asyncio.Event
    started: float
    runs: list[Measured] = field(default_factory=list)
    longest_s: float = 0.0
    model: str = ""

    def left_s(self) -> float:
        """Of the budget."""
        return self.settings.budget_s - (time.monotonic() - self.started)

    def has_room_for(self, num_runs: int) -> bool:
        """Whether so many more runs fit, each as long as the longest so far."""
        most = self.settings.max_runs
        allowed = most is None or len(self.runs) + num_runs <= most
        return allowed and not self.stop.is_set() and self.left_s() >= num_runs * self.longest_s


def main(argv: list[str]) -> int:
    """Run `pagemill tune`. Exit status 0 when settings were written, 1 when nothing could be measured, 2 when an option
    cannot be, 130 when interrupted: what was measured until then is printed and written all the same.
    """
    own, options = roles.split(argv, roles.defaults(TuneSettings))
    settings = load(TuneSettings, own)
    try:
        base = {} if settings.config is None else file_values(settings.config)
        _check(settings, options)
        base = {name: value for name, value in base.items() if name not in _tune_only()}
        return asyncio.run(_main(settings, options, base))
    except (OptionError, ModelFileError, WorkloadError) as error:
        err(f"{settings.prog}: {error}")
        return 2


async def _main(settings: TuneSettings, options: list[str], base: dict[str, Any]) -> int:
    stop = asyncio.Event()
    stop_on_signals(stop, asyncio.Event())
    tuning = Tuning(settings, options, base, stop, time.monotonic())
    with tempfile.TemporaryDirectory(prefix="pagemill-") as directory:
        start = _start(_plan(tuning, None, Path(directory)))
    _say(settings, f"starting with {start.words()}; Ctrl-C ends with what there is")
    first = await _measure(tuning, start)
    if first is None:
        reason = tuning.runs[-1].error if tuning.runs else "interrupted"
        err(f"{settings.prog}: nothing was measured: {reason}")
        return INTERRUPTED_STATUS if stop.is_set() else 1
    rule = make_rule(settings.choose, first, settings.max_itl_ms, settings.min_tokens_per_s)
    best = await _sweep(tuning, first, rule)
    await _confirm(tuning, start, best.candidate)
    found = results(tuning.runs)
    rule = make_rule(
        settings.choose, next(r for r in found if r.candidate == start), settings.max_itl_ms, settings.min_tokens_per_s
    )
    chosen = choose(found, start, rule)
    out(table(found, tuning.runs, chosen.candidate))
    _write(tuning, chosen, rule, start)
    return INTERRUPTED_STATUS if stop.is_set() else 0


async def _sweep(tuning: Tuning, first: Result, rule: Rule) -> Result:
    """Try candidates while there is time for them and for the confirmation; the best."""
    settings = tuning.settings
    candidates = sweep(first, rule, None if settings.rate else settings.concurrency)
    best = first
    try:
        candidate = next(candidates)
        while tuning.has_room_for(1 + 2 * settings.confirm):
            _say(settings, f"run {len(tuning.runs) + 1}: {candidate.difference(best.candidate)}")
            result = await _measure(tuning, candidate)
            if result is not None and rule.better(result, best):
                best = result
            candidate = candidates.send(result)
        _say(settings, "interrupted" if tuning.stop.is_set() else "the budget ends the sweep")
    except StopIteration:
        _say(settings, "the sweep is through")
    return best


async def _confirm(tuning: Tuning, start: Candidate, best: Candidate) -> None:
    """Measure the start and the best again, in turn: one run of many is easily the best by luck."""
    if start == best:
        return
    for number in range(tuning.settings.confirm):
        for candidate in (start, best):
            if not tuning.has_room_for(1):
                return
            name = "the start" if candidate == start else best.difference(start)
            _say(tuning.settings, f"confirming, round {number + 1}: {name}")
            await _measure(tuning, candidate)


async def _measure(tuning: Tuning, candidate: Candidate) -> Result | None:
    """One run. None if it failed, or a signal came; a failure is among the runs."""
    began = time.monotonic()
    trial = asyncio.create_task(_run(tuning, candidate))
    stopped = asyncio.create_task(tuning.stop.wait())
    await asyncio.wait([trial, stopped], return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not trial.done():
        trial.cancel()
        await asyncio.gather(trial, return_exceptions=True)  # it ends its processes
        return None
    try:
        report = trial.result()
    except (ServeError, PagemillError) as error:
        measured = Measured(candidate, error=str(error).strip() or "it ended without a word")
    else:
        measured = _measured(candidate, report)
    took_s = time.monotonic() - began
    tuning.longest_s = max(tuning.longest_s, took_s)
    tuning.runs.append(measured)
    _say(tuning.settings, f"  {_words(measured)} ({took_s:.0f} s; {max(0.0, tuning.left_s()):.0f} s left)")
    return None if measured.error is not None else results([measured])[0]


async def _run(tuning: Tuning, candidate: Candidate) -> Report:
    """A service with these settings under the load. The same requests for each, and nothing of them cached before."""
    settings = tuning.settings
    async with contextlib.AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pagemill-")))
        target = await stack.enter_async_context(running(_plan(tuning, candidate, directory)))
        from pagemill_client.aio import AsyncClient  # noqa: PLC0415 (gRPC: while the children start)

        clients = [
            await stack.enter_async_context(AsyncClient(target, timeout_s=settings.timeout_s))
            for _ in range(settings.connections)
        ]
        model = await clients[0].get_model("")
        tuning.model = f"{model.name} ({model.fingerprint})"
        rng = random.Random(settings.seed)  # noqa: S311 (a load that can be repeated, no secret)
        requests = requests_of(settings, model, rng)
        await closed_loop(clients, warmup_of(settings, model, rng), settings.concurrency, model.name)
        if settings.rate:
            records = await open_loop(clients, poisson(requests, settings.rate, rng), model.name)
        else:
            plain = [Request(request.ids, request.n_out) for request in requests]
            records = await closed_loop(clients, plain, settings.concurrency, model.name)
        return summarize(records, Slo(1.0, 0.05))
    raise AssertionError("no context manager here swallows an exception")


def _measured(candidate: Candidate, report: Report) -> Measured:
    if report.errors:
        reasons = ", ".join(f"{reason} {n} times" for reason, n in sorted(report.errors.items()))
        return Measured(candidate, error=f"requests failed: {reasons}")
    if not report.itl_s:
        return Measured(candidate, error="no request had two tokens: no time between tokens to measure")
    return Measured(candidate, report.generated_tokens_per_s, report.itl_s["p99"], report.ttft_s["p99"])


def _plan(tuning: Tuning, candidate: Candidate | None, directory: Path) -> Stack:
    """The stack with the candidate's values, through a file like the one that is written in the end.

    Raises OptionError, ModelFileError.
    """
    file = directory / "options.yaml"
    file.write_text(_yaml(tuning.base | ({} if candidate is None else candidate.options())))
    return plan(["--model", tuning.settings.model, *tuning.options, *_OUR_PORTS, "--config", str(file)], directory)


def _start(stack: Stack) -> Candidate:
    """What the service would have without tuning."""
    owner = dict.fromkeys(FACTORS, SCHEDULER.name) | {"block_size": EXECUTOR.name}
    return Candidate(**{name: getattr(stack.loaded[owner[name]], name) for name in FACTORS})


def _check(settings: TuneSettings, options: Sequence[str]) -> None:
    """Raises OptionError or WorkloadError for what would make a sweep pointless or its end a disappointment."""
    for name in FACTORS:
        flag = "--" + name.replace("_", "-")
        given = [word for word in options if word.partition("=")[0].rpartition(".")[2].removeprefix("--") == flag[2:]]
        if given:
            raise OptionError(f"{given[0]}: tune sweeps it; to start from another value, put it into the --config file")
        if f"PAGEMILL_{name.upper()}" in os.environ:
            raise OptionError(
                f"PAGEMILL_{name.upper()} is set and would win over every value that tune tries: unset it"
            )
    for word in options:
        if word.partition("=")[0].rpartition(".")[2].removeprefix("--") in ("port", "admin-port", "metrics-port"):
            raise OptionError(f"{word}: the services that tune measures choose their ports themselves")
    if settings.workload is not None:
        try:
            read_workload(settings.workload)
        except OSError as error:
            raise OptionError(f"--workload: {error}") from error
    for flag, path in (("--output", settings.output), ("--report", settings.report)):
        if path is not None and path.exists() and not settings.overwrite:
            raise OptionError(f"{flag}: {path} exists (--overwrite replaces it)")
        if path is not None and not path.absolute().parent.is_dir():
            raise OptionError(f"{flag}: no such folder: {path.absolute().parent}")


def _tune_only() -> set[str]:
    """Options that no process of the service has."""
    services = {name for role in STOP_ORDER for name in role.settings_type().model_fields}
    return set(TuneSettings.model_fields) - services


def _write(tuning: Tuning, chosen: Result, rule: Rule, start: Candidate) -> None:
    settings = tuning.settings
    words = ["pagemill", "serve", "--model", settings.model, *tuning.options, "--config", str(settings.output)]
    before = next(result for result in results(tuning.runs) if result.candidate == start)
    head = [
        f"Written by pagemill tune, {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}"
        + (", interrupted" if tuning.stop.is_set() else ""),
        f"for {tuning.model} on {platform.node()}, {len(os.sched_getaffinity(0))} CPUs",
        f"load: {_load_words(settings)}",
        f"rule: {rule.words()}",
        f"chosen: {_result_words(chosen)}",
        f"before: {_result_words(before)}",
        f"use: {shlex.join(words)}",
    ]
    text = "".join(f"# {line}\n" for line in head) + _yaml(tuning.base | chosen.candidate.options())
    settings.output.write_text(text)
    if settings.report is not None:
        document = {
            "settings": settings.model_dump(mode="json"),
            "options": tuning.options,
            "rule": asdict(rule),
            "start": start.options(),
            "chosen": asdict(chosen),
            "runs": [asdict(run) for run in tuning.runs],
        }
        settings.report.write_text(json.dumps(document, indent=1) + "\n")
    _say(settings, f"chosen by {rule.words()}: {_result_words(chosen)}")
    _say(settings, f"before: {_result_words(before)}")
    _say(settings, f"written to {settings.output}; use it: {shlex.join(words)}")


def _load_words(settings: TuneSettings) -> str:
    how = f"{settings.rate:g} arrivals a second" if settings.rate else f"{settings.concurrency} at once"
    if settings.workload is not None:
        return f"{settings.workload}, {how}"
    lengths = f"prompts of {settings.prompt_tokens} tokens, outputs of {settings.output_tokens}"
    return f"{settings.num_requests} random requests, {lengths}, {how}"


def _yaml(values: dict[str, Any]) -> str:
    import yaml  # noqa: PLC0415 (as in pagemill.settings)

    text: str = yaml.safe_dump(values, sort_keys=False) if values else ""
    return text


def _words(run: Measured) -> str:
    return f"failed: {run.error.splitlines()[-1].strip()}" if run.error else _result_words(results([run])[0])


def _result_words(result: Result) -> str:
    runs = f", median of {result.num_runs} runs" if result.num_runs > 1 else ""
    return f"{result.tokens_per_s:.1f} tokens/s, p99 ITL {result.itl_p99_s * 1e3:.0f} ms{runs}"


def _say(settings: TuneSettings, line: str) -> None:
    err(f"{settings.prog}: {line}")
