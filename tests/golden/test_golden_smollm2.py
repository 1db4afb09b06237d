"""SmolLM2-135M-Instruct from its GGUF file against transformers: weights, ids in float32, near-ties in bfloat16."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import modeling_gguf_pytorch_utils

from executor_svc.runner import PagedRunner, load
from executor_svc.weights.source import open_source
from pagemill.model_files import read_model_info
from tests.golden.golden_paged import forward, greedy, new_rows

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

NUM_OUTPUTS = 8
NEAR_TIE = 0.5
"""Largest gap in float32 logits, between its own choice and that of bfloat16, that counts as a near-tie. SmolLM2's
logits spread over some 30; bfloat16 keeps 8 bits, and transformers' own bfloat16 run errs by as much (see below)."""


@pytest.fixture(scope="module")
def reference_weights(demo_model: Path) -> dict[str, torch.Tensor]:
    """The float32 weights as transformers' own GGUF loader gives them."""
    config = transformers.AutoConfig.from_pretrained(str(demo_model.parent), gguf_file=demo_model.name)
    with torch.device("meta"):
        empty = transformers.LlamaForCausalLM(config)
    load: Any = modeling_gguf_pytorch_utils.load_gguf_checkpoint
    tensors = load(str(demo_model), return_tensors=True, model_to_load=empty)["tensors"]
    assert isinstance(tensors, dict)
    return tensors


@pytest.fixture(scope="module")
def reference_model(demo_model: Path, reference_weights: dict[str, torch.Tensor]) -> Any:
    config = transformers.AutoConfig.from_pretrained(str(demo_model.parent), gguf_file=demo_model.name)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model.load_state_dict(reference_weights, strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers are no weights and were left on meta
    model.train(mode=False)
    return model


@pytest.fixture(scope="module")
def float32_runner(demo_model: Path) -> PagedRunner:
    return load(demo_model, dtype="float32")


@dataclass
class Case:
    prompt: list[int]
    ours: list[int]
    """Prompt and greedy continuation by the runner in float32, the prompt whole and alone."""
    expected: list[int]
    """Prompt and what transformers chooses at each position given `ours` before it. If the two are equal, `ours` is
    transformers' greedy continuation, by induction; one pass over the text instead of one per token."""
    logits: torch.Tensor
    """(NUM_OUTPUTS, vocab) of transformers."""


def make_prompts() -> list[list[int]]:
    """40 prompts of 1 to 1,500 tokens around block borders: phrases that repeat, with noise."""
    rng = random.Random(5)
    lengths = [1, 1, 2, 3, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 700, 1500]
    lengths += [rng.randint(1, 200) for _ in range(40 - len(lengths))]
    prompts = []
    for length in lengths:
        phrase = [rng.randrange(3, 2000) for _ in range(rng.randint(3, 12))]
        prompts.append([rng.choice(phrase) if rng.random() < 0.9 else rng.randrange(3, 49000) for _ in range(length)])
    return prompts


@pytest.fixture(scope="module")
def cases(reference_model: Any, float32_runner: PagedRunner) -> list[Case]:
    cases = []
    for row in greedy(float32_runner, make_prompts(), NUM_OUTPUTS, max_rows=1):
        prompt = row.ids[:-NUM_OUTPUTS]
        with torch.inference_mode():
            out = reference_model(torch.tensor([row.ids[:-1]]), use_cache=False, logits_to_keep=NUM_OUTPUTS)
        cases.append(Case(prompt, row.ids, prompt + out.logits[0].argmax(-1).tolist(), out.logits[0]))
    return cases


def test_weights_are_those_of_transformers(demo_model: Path, reference_weights: dict[str, torch.Tensor]) -> None:
    source = open_source(read_model_info(demo_model))
    assert len(reference_weights) == 272
    for name, expected in reference_weights.items():
        found = torch.empty(expected.shape)
        source.read_into(name, found)
        assert torch.equal(found, expected), name


def test_float32_greedy_ids_equal_transformers(cases: list[Case]) -> None:
    for case in cases:
        assert case.ours == case.expected, f"prompt of {len(case.prompt)} tokens"


def test_neighbours_and_chunks_change_no_id(float32_runner: PagedRunner, cases: list[Case]) -> None:
    """Random batches of up to 12 rows; long prompts in chunks of random size, short ones whole, decode rows between."""
    prompts = [case.prompt for case in cases]
    rows = greedy(float32_runner, prompts, NUM_OUTPUTS, seed=4, max_rows=12, max_chunk=256, budget=512)
    for row, case in zip(rows, cases, strict=True):
        assert row.ids == case.expected, f"prompt of {len(case.prompt)} tokens"


def test_bfloat16_differs_only_at_near_ties(demo_model: Path, cases: list[Case], record_property: Any) -> None:
    """Each first difference is between two ids that float32 itself nearly ties; the margins are recorded."""
    runner = load(demo_model, dtype="bfloat16")
    rows = greedy(runner, [case.prompt for case in cases], NUM_OUTPUTS, seed=1, max_chunk=256, budget=512)
    margins = []
    for row, case in zip(rows, cases, strict=True):
        start = len(case.prompt)
        for got, expected, logits in zip(row.ids[start:], case.expected[start:], case.logits, strict=True):
            if got != expected:
                margins.append(round(float(logits[expected] - logits[got]), 4))
                break
    report = f"bfloat16 differs on {len(margins)} of {len(cases)} prompts; float32 margins {sorted(margins)}"
    record_property("bfloat16_differences", report)
    print(report)  # noqa: T201
    assert all(margin <= NEAR_TIE for margin in margins), report
    assert len(margins) < len(cases) / 2, report


def test_poisoned_blocks_never_reach_the_logits(float32_runner: PagedRunner, cases: list[Case]) -> None:
    """Every free block and every slot beyond a context holds NaN, as after a request that went wrong."""
    short = [case for case in cases if len(case.prompt) <= 64]
    rows = new_rows(float32_runner, [case.prompt for case in short], 2, random.Random(2))
    float32_runner.pool.data.fill_(float("nan"))
    for _ in range(2):
        logits = forward(float32_runner, [(row, len(row.ids) - row.computed) for row in rows])
        assert logits.isfinite().all()
        for row, scores in zip(rows, logits, strict=True):
            row.ids.append(int(scores.argmax()))
    for row, case in zip(rows, short, strict=True):
        assert row.ids == case.expected[: len(row.ids)]
