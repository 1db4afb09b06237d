"""Logits and greedy ids of tiny random models equal those of transformers, in float32, however the work is cut."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from executor_svc import runner as runners
from executor_svc.models.llama import LlamaModel
from executor_svc.models.rope import UnsupportedModelError
from executor_svc.models.transformers_model import TransformersModel
from tests.golden.golden_paged import greedy

BASE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GQA = {**BASE, "num_key_value_heads": 2}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
OWN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", GQA),
    "llama_mha_tied": ("Llama", {**BASE, "tie_word_embeddings": True}),
    "llama_mqa": ("Llama", {**BASE, "num_key_value_heads": 1}),
    "llama_odd_head_dim": ("Llama", {**GQA, "head_dim": 10}),
    "llama_biases": ("Llama", {**GQA, "attention_bias": True, "mlp_bias": True}),
    "llama_linear": ("Llama", {**GQA, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama_dynamic": ("Llama", {**GQA, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    "llama_llama3": ("Llama", {**GQA, "rope_parameters": LLAMA3}),
    "llama_yarn": ("Llama", {**GQA, "rope_parameters": YARN}),
    "llama_yarn_mscale": (
        "Llama",
        {**GQA, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 16, "truncate": False}},
    ),
    "mistral_window": ("Mistral", {**GQA, "head_dim": 16, "sliding_window": 7}),
    "mistral_full": ("Mistral", {**GQA, "sliding_window": None}),
    "qwen2": ("Qwen2", GQA),
    "qwen2_window": ("Qwen2", {**GQA, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {**GQA, "head_dim": 16}),
    "qwen3_tied_bias": ("Qwen3", {**GQA, "head_dim": 16, "tie_word_embeddings": True, "attention_bias": True}),
}
FOREIGN: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_neox": ("GPTNeoX", BASE),
    "phi": ("Phi", BASE),
    "olmo2": ("Olmo2", GQA),
    "gemma": ("Gemma", {**GQA, "head_dim": 16}),
    "opt_offset_positions": ("OPT", {**BASE, "ffn_dim": 80, "word_embed_proj_dim": 48}),
    "mixtral": ("Mixtral", {**GQA, "num_local_experts": 4}),
}
NUM_OUTPUTS = 6


def make_model(directory: Path, family: str, options: dict[str, Any]) -> Any:
    """A random model, saved to `directory`; weights are spread so that attention and biases matter."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**options)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.08)
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    return model


def prompts(vocab: int) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(vocab) for _ in range(n)] for n in (1, 2, 4, 5, 16, 17, 50)]


def reference(model: Any, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """Greedy ids, and logits of each step, recomputed from scratch without a cache."""
    ids, logits = list(prompt), []
    with torch.no_grad():
        for _ in range(NUM_OUTPUTS):
            scores = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
            logits.append(scores)
            ids.append(int(scores.argmax()))
    return ids, torch.stack(logits)


def check(model: Any, directory: Path) -> runners.PagedRunner:
    runner = runners.load(directory, dtype="float32", block_size=4, num_threads=1)
    given = prompts(model.config.vocab_size)
    expected = [reference(model, prompt) for prompt in given]
    scale = max(float(logits.abs().max()) for _, logits in expected)
    ways: list[dict[str, int]] = [{}, {"max_chunk": 3}, {"max_rows": 2, "max_chunk": 7}, {"budget": 11}]
    for seed, way in enumerate(ways):
        for row, (ids, logits) in zip(
            greedy(runner, given, NUM_OUTPUTS, seed=seed, keep_logits=True, **way), expected, strict=True
        ):
            assert row.ids == ids, way
            torch.testing.assert_close(torch.stack(row.logits), logits, rtol=0, atol=2e-6 * max(1.0, scale))
    return runner


@pytest.mark.parametrize("name", OWN)
def test_own_models_equal_transformers(name: str, tmp_path: Path) -> None:
    family, options = OWN[name]
    runner = check(make_model(tmp_path, family, options), tmp_path)
    assert isinstance(runner._model, LlamaModel)


@pytest.mark.parametrize("name", FOREIGN)
def test_other_architectures_run_through_transformers(name: str, tmp_path: Path) -> None:
    family, options = FOREIGN[name]
    runner = check(make_model(tmp_path, family, options), tmp_path)
    assert isinstance(runner._model, TransformersModel)
    assert runner.weight_bytes > 0


@pytest.mark.parametrize(
    ("family", "options", "why"),
    [
        ("Gemma2", {**GQA, "head_dim": 16}, "softcap"),
        (
            "Bloom",
            {"vocab_size": 97, "hidden_size": 48, "n_layer": 2, "n_head": 4, "seq_length": 64},
            "cannot be paged",
        ),
        ("Mamba", {"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 2, "seq_length": 64}, "cannot be paged"),
    ],
)
def test_what_cannot_be_paged_is_refused_by_name(
    family: str, options: dict[str, Any], why: str, tmp_path: Path
) -> None:
    make_model(tmp_path, family, options)
    with pytest.raises(UnsupportedModelError, match=why):
        runners.load(tmp_path, dtype="float32", num_threads=1)


def test_unknown_rope_scaling_goes_to_transformers_or_is_named(tmp_path: Path) -> None:
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 6, "long_factor": [2.0] * 6,
                "original_max_position_embeddings": 64, "factor": 1.0}  # fmt: skip
    make_model(tmp_path, "Llama", {**GQA, "rope_parameters": longrope})
    assert isinstance(runners.load(tmp_path, dtype="float32", num_threads=1)._model, TransformersModel)


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    """With packed weights and fused sums where the CPU has bfloat16; the bound is a few roundings of the logits."""
    model = make_model(tmp_path, "Qwen3", {**GQA, "head_dim": 16})
    runner = runners.load(tmp_path, dtype="bfloat16", block_size=4, num_threads=1)
    given = prompts(97)
    for prompt, row in zip(given, greedy(runner, given, 1, max_chunk=5, keep_logits=True), strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([prompt]), use_cache=False).logits[0, -1]
        assert float((row.logits[0] - expected).abs().max()) < 0.06 * float(expected.abs().max())
