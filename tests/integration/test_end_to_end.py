"""One real stack, as `pagemill serve` starts it, with the demo model: what clients get, and what survives a kill.

float32, so that equal requests give equal ids whatever runs beside them; greedy ids against transformers are
compared in tests/golden.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from pagemill_client import (
    AsyncClient,
    Delta,
    FinishReason,
    Generation,
    InvalidRequestError,
    Message,
    UnavailableError,
)
from pagemill_client.aio import AsyncGenerateStream
from tests.integration.serve_process import SMALL, ServeProcess

pytestmark = [pytest.mark.model, pytest.mark.timeout(180)]

PROMPTS = (
    "The capital of France is",
    "Water boils at",
    "def fibonacci(n):\n",
    "Grüße aus Köln, 東京 und 🙂:",
    "1, 2, 3, 4,",
    "word " * 300,
)


@pytest.fixture(scope="module")
def service() -> Iterator[ServeProcess]:
    with ServeProcess("--model", "demo", "--executor.dtype=float32", *SMALL) as service:
        assert service.target
        yield service


async def greedy(client: AsyncClient, prompt: str | Sequence[int], num: int) -> Generation:
    async with client.generate(prompt, temperature=0.0, max_tokens=num, ignore_eos=True) as stream:
        return await stream.collect()


async def test_prompts_give_the_same_ids_alone_and_together(service: ServeProcess) -> None:
    async with AsyncClient(service.target) as client:
        alone = [await greedy(client, prompt, 12) for prompt in PROMPTS]
        together = await asyncio.gather(*(greedy(client, prompt, 12) for prompt in PROMPTS))
        assert [g.token_ids for g in together] == [g.token_ids for g in alone]
        assert "Paris" in alone[0].text
        for prompt, generation in zip(PROMPTS, alone, strict=True):
            assert len(generation.token_ids) == 12
            assert generation.finished is not None
            assert generation.finished.reason is FinishReason.LENGTH
            assert generation.finished.usage.completion_tokens == 12
            ids = await client.tokenize(prompt)
            assert generation.accepted.num_prompt_tokens == len(ids) == generation.finished.usage.prompt_tokens
            assert (await greedy(client, ids, 12)).token_ids == generation.token_ids
            assert (await client.detokenize(generation.token_ids)).startswith(generation.text)


async def test_a_conversation_is_answered_and_ends_by_itself(service: ServeProcess) -> None:
    async with AsyncClient(service.target) as client:
        question = [Message("user", "What is the capital of France? Answer in one word.")]
        generation = await client.chat(question, temperature=0.0, max_tokens=64).collect()
        assert "Paris" in generation.text
        assert "<|im_end|>" not in generation.text
        assert generation.finished is not None
        assert generation.finished.reason is FinishReason.STOP
        assert generation.finished.stop_match is None  # the model's own end


async def test_a_seed_repeats_a_sampled_output(service: ServeProcess) -> None:
    async with AsyncClient(service.target) as client:
        first = await client.generate("Once upon a time", max_tokens=16, temperature=1.2, top_k=50).collect()
        again = client.generate("Once upon a time", max_tokens=16, temperature=1.2, top_k=50, seed=first.accepted.seed)
        beside = greedy(client, "The sea", 16)
        assert (await asyncio.gather(again.collect(), beside))[0].token_ids == first.token_ids


async def test_a_stop_string_never_leaks(service: ServeProcess) -> None:
    async with AsyncClient(service.target) as client:
        whole = (await greedy(client, "1, 2, 3, 4,", 24)).text
        stopped = await client.generate("1, 2, 3, 4,", temperature=0.0, max_tokens=24, stop=" 8").collect()
        assert " 8" in whole
        assert stopped.text == whole.partition(" 8")[0]
        assert stopped.finished is not None
        assert stopped.finished.stop_match == " 8"


async def test_a_request_is_cancelled_by_another_call(service: ServeProcess) -> None:
    async with AsyncClient(service.target) as client:
        async with client.generate("On and on", max_tokens=1000, ignore_eos=True, request_id="on-and-on") as stream:
            await anext(stream.texts())
            assert await client.cancel("on-and-on")
            generation = await stream.collect()
        assert generation.finished is not None
        assert generation.finished.reason is FinishReason.CANCELLED
        assert len(generation.token_ids) < 1000
        assert not await client.cancel("on-and-on")


BEYOND = 1_000_000
"""Larger than the vocabulary."""
REFUSED: list[tuple[str, dict[str, Any]]] = [
    *(("sampling.logit_bias", {"logit_bias": {key: 1.0}}) for key in (1, BEYOND, BEYOND + 1000, 2**32 - 1)),
    *(("token_ids.ids", {"prompt": ids}) for ids in ([BEYOND], [], [2**32 - 1])),
    *(("sampling.temperature", {"temperature": value}) for value in (-1.0, float("nan"), float("inf"))),
    *(("sampling.top_p", {"top_p": value}) for value in (0.0, 1.5)),
    *(("sampling.repetition_penalty", {"repetition_penalty": value}) for value in (0.0, -1.0, 1e-38, 1.1)),
    ("sampling.frequency_penalty", {"frequency_penalty": 2.0}),
    ("sampling.presence_penalty", {"presence_penalty": 2.0}),
    ("stopping.max_tokens", {"max_tokens": 0, "echo": True, "logprobs": 1}),
    *(("output.n", {"n": n}) for n in (0, 2, 10**9)),
    *(("output.logprobs", {"logprobs": value}) for value in (1, BEYOND)),
    *(("output.prompt_logprobs", {"prompt_logprobs": value}) for value in (1, 2**32 - 1)),
    *(("stopping.stop", {"stop": stop}) for stop in ([""], ["x"] * 10_000)),
    ("text", {"prompt": ""}),
]
"""The field that a refusal names, and what is asked for."""
GREEDY: list[dict[str, Any]] = [
    *({"temperature": value} for value in (1e-45, 1e-4)),
    *({"top_p": value} for value in (1e-9, 1e-4)),
    *({"top_k": 1}, {"min_p": 1.0}),
]


async def test_inputs_that_broke_other_systems_leave_it_as_it_was(service: ServeProcess) -> None:
    """All of them, one after the other; then the same probe gives the same ids, from the same processes."""
    modules = ("executor_svc", "scheduler_svc", "scheduler_svc.gateway")
    pids = [service.pid_of(module) for module in modules]
    async with AsyncClient(service.target) as client:
        expected = (await greedy(client, PROMPTS[0], 4)).token_ids
        for field, bad in REFUSED:
            options: dict[str, Any] = {"prompt": PROMPTS[0], "temperature": 0.0, "max_tokens": 4, **bad}
            with pytest.raises(InvalidRequestError) as caught:
                await client.generate(**options).collect()
            assert caught.value.reason in ("INVALID_PARAMETER", "UNSUPPORTED_FEATURE"), bad
            assert caught.value.violations[0].field.startswith(field), bad
        assert (await greedy(client, PROMPTS[0], 4)).token_ids == expected
    assert [service.pid_of(module) for module in modules] == pids
    assert service.count("Traceback") == 0


async def test_b07_b08_the_narrowest_choice_is_the_greedy_one(service: ServeProcess) -> None:
    async with AsyncClient(service.target) as client:
        expected = (await greedy(client, PROMPTS[0], 4)).token_ids
        streams = [client.generate(PROMPTS[0], max_tokens=4, ignore_eos=True, **narrow) for narrow in GREEDY]
        generations = await asyncio.gather(*(stream.collect() for stream in streams))
        assert [g.token_ids for g in generations] == [expected] * len(GREEDY)


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
async def test_b04_every_seed_repeats_its_output(service: ServeProcess, seed: int) -> None:
    async with AsyncClient(service.target) as client:
        twice = [
            await client.generate("Once", max_tokens=4, temperature=1.5, ignore_eos=True, seed=seed).collect()
            for _ in range(2)
        ]
        assert twice[0].token_ids == twice[1].token_ids
        assert twice[0].accepted.seed == seed


async def test_what_the_model_cannot_take_is_refused_with_the_numbers(service: ServeProcess) -> None:
    async with AsyncClient(service.target) as client:
        info = await client.get_model()
        with pytest.raises(InvalidRequestError) as caught:
            await client.generate([1] * info.max_model_len, max_tokens=1).collect()
        assert caught.value.reason == "CONTEXT_LENGTH_EXCEEDED"
        assert str(info.max_model_len) in caught.value.message


async def run_to(stream: AsyncGenerateStream, num_tokens: int) -> None:
    seen = 0
    async for event in stream:
        if isinstance(event, Delta):
            seen += len(event.token_ids)
        if seen >= num_tokens:
            return
    raise AssertionError("the stream ended early")


@pytest.mark.parametrize(("role", "module"), [("executor", "executor_svc"), ("scheduler", "scheduler_svc")])
async def test_streams_go_on_with_equal_ids_when_a_process_is_killed(
    service: ServeProcess, role: str, module: str
) -> None:
    prompts = PROMPTS[:2]
    async with AsyncClient(service.target) as client:
        expected = await asyncio.gather(*(greedy(client, prompt, 32) for prompt in prompts))
        streams = [client.generate(p, temperature=0.0, max_tokens=32, ignore_eos=True) for p in prompts]
        await asyncio.gather(*(run_to(stream, 4) for stream in streams))
        os.kill(service.pid_of(module), signal.SIGKILL)
        generations = await asyncio.gather(*(stream.collect() for stream in streams))
        assert [g.token_ids for g in generations] == [g.token_ids for g in expected]
        assert [g.text for g in generations] == [g.text for g in expected]
    assert service.count(f"{role} ended (killed by SIGKILL); starting it again") == 1


async def test_a_killed_gateway_is_found_again_at_its_address(service: ServeProcess) -> None:
    async with AsyncClient(service.target) as client:
        expected = await greedy(client, PROMPTS[0], 8)
        stream = client.generate("On and on", max_tokens=1000, ignore_eos=True)
        await run_to(stream, 2)
        os.kill(service.pid_of("scheduler_svc.gateway"), signal.SIGKILL)
        with pytest.raises(UnavailableError):  # the stream lived in that process; no end is invented for it
            await stream.collect()
        async with asyncio.timeout(60):
            while not await client.ready():
                await asyncio.sleep(0.1)
        assert (await greedy(client, PROMPTS[0], 8)).token_ids == expected.token_ids


def test_nothing_else_was_restarted(service: ServeProcess) -> None:
    """Runs last: three kills above, and not one crash besides."""
    assert service.count("starting it again") == 3
