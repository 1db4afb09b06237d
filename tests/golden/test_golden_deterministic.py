"""A sequence's logits, bit for bit, whatever is beside it, however its prompt is cut, and after preemption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from executor_svc.attention.base import AttentionError
from executor_svc.models import layers
from executor_svc.runner import load
from tests.golden.test_golden_families import GQA, make_model, prompts
from tests.golden.test_golden_quantised import KERNEL_SHAPE, NUM_OUTPUTS, WAYS, same_in_any_batch

FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("Llama", {**KERNEL_SHAPE, "tie_word_embeddings": True}),
    ("Llama", {**KERNEL_SHAPE, "attention_bias": True, "mlp_bias": True}),
    ("Qwen2", KERNEL_SHAPE),
    ("Qwen3", {**KERNEL_SHAPE, "tie_word_embeddings": True}),
    ("Mistral", {**KERNEL_SHAPE, "sliding_window": 7}),
]


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize(("family", "options"), FAMILIES)
def test_bfloat16_weights(family: str, options: dict[str, Any], kv_dtype: str, tmp_path: Path) -> None:
    """Token by token gives what whole prompts give, so a sequence that is computed again comes out the same too."""
    make_model(tmp_path, family, options).to(torch.bfloat16).save_pretrained(tmp_path)
    runner = load(tmp_path, dtype="bfloat16", kv_dtype=kv_dtype, block_size=4, deterministic=True)
    same_in_any_batch(runner, prompts(options["vocab_size"]), NUM_OUTPUTS, WAYS)


@pytest.mark.parametrize(
    ("asked", "because"),
    [
        ({"dtype": "float32"}, r"torch multiplies matrices \(own \(llama shape\), float32\)"),
        ({"attention": "sdpa"}, r"torch computes everything \(forced\)"),
    ],
)
def test_what_depends_on_the_batch_is_refused(asked: dict[str, Any], because: str, tmp_path: Path) -> None:
    make_model(tmp_path, "Llama", KERNEL_SHAPE)
    with pytest.raises(AttentionError, match=f"^deterministic: {because}") as error:
        load(tmp_path, deterministic=True, num_threads=1, **asked)
    assert "\n" not in str(error.value)
    load(tmp_path, num_threads=1, **asked)


def test_transformers_models_are_refused(tmp_path: Path) -> None:
    make_model(tmp_path, "Gemma", {**GQA, "head_dim": 16})
    with pytest.raises(AttentionError, match=r"^deterministic: transformers runs this model"):
        load(tmp_path, deterministic=True, num_threads=1)


def test_kernels_multiply_also_where_onednn_would_be_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU with AMX, whose products in oneDNN depend on the number of rows."""
    make_model(tmp_path, "Llama", KERNEL_SHAPE)
    monkeypatch.setattr(layers, "computes_linear", lambda kernels: False)
    runner = load(tmp_path, dtype="bfloat16", deterministic=True, block_size=4)
    same_in_any_batch(runner, prompts(KERNEL_SHAPE["vocab_size"])[:3], 2, WAYS[:3])
