"""All layers in one call of the kernels: the same bits as layer by layer, whatever the model and the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from executor_svc.attention.native import PREFIX_COST
from executor_svc.attention.prefixes import find_prefixes
from executor_svc.batch import Batch
from executor_svc.models.llama import LlamaModel
from executor_svc.models.sequence import LayerSequence
from executor_svc.runner import PagedRunner, load
from executor_svc.startup import warm_up
from tests.golden.golden_paged import Row, greedy
from tests.golden.test_golden_families import GQA, make_model, prompts

SHAPE: dict[str, Any] = {**GQA, "head_dim": 16}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_biases": ("Llama", {**SHAPE, "attention_bias": True, "mlp_bias": True}),
    "qwen3_head_norms": ("Qwen3", {**SHAPE, "tie_word_embeddings": True}),
    "mistral_window_everywhere": ("Mistral", {**SHAPE, "sliding_window": 7}),
    "qwen2_window_in_some": (
        "Qwen2",
        {**GQA, "hidden_size": 64, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
}
WAYS: list[dict[str, int]] = [{"max_rows": 1, "max_chunk": 3}, {}, {"max_chunk": 3}, {"max_rows": 2, "budget": 11}]
"""Of few tokens first, so that buffers must grow, and of few again."""


def model_of(runner: PagedRunner) -> LlamaModel:
    model = runner._model
    assert isinstance(model, LlamaModel)
    return model


def outputs(runner: PagedRunner, way: dict[str, int]) -> list[Row]:
    return greedy(runner, prompts(SHAPE["vocab_size"]), 4, keep_logits=True, **way)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("weight_dtype", ["auto", "int8"])
@pytest.mark.parametrize("name", FAMILIES)
def test_one_call_gives_the_bits_of_many(
    name: str, weight_dtype: str, num_threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one thread, and with more than there are CPUs, so that some sleep while they wait for others."""
    make_model(tmp_path, *FAMILIES[name]).to(torch.bfloat16).save_pretrained(tmp_path)
    runner = load(
        tmp_path,
        dtype="bfloat16",
        weight_dtype=weight_dtype,
        block_size=4,
        num_threads=num_threads,
        deterministic=True,
    )
    model = model_of(runner)
    calls = 0
    run = LayerSequence.run

    def counted(self: LayerSequence, *args: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return run(self, *args)

    monkeypatch.setattr(LayerSequence, "run", counted)
    together = [outputs(runner, way) for way in WAYS]
    assert calls > len(WAYS)
    calls = 0
    monkeypatch.setattr(model, "_sequence", None)
    one_by_one = [outputs(runner, way) for way in WAYS]
    assert calls == 0
    for found, expected in zip(together, one_by_one, strict=True):
        for row, wanted in zip(found, expected, strict=True):
            assert row.ids == wanted.ids
            assert torch.equal(torch.stack(row.logits), torch.stack(wanted.logits))


def test_a_shared_prefix_in_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that share tiles, whose attention is two rounds of work; on three threads."""
    make_model(tmp_path, *FAMILIES["qwen3_head_norms"]).to(torch.bfloat16).save_pretrained(tmp_path)
    runner = load(tmp_path, dtype="bfloat16", block_size=16, num_threads=3, deterministic=True)
    runner.allocate_kv(40)
    model, found = model_of(runner), []
    for sequence in (model._sequence, None):
        monkeypatch.setattr(model, "_sequence", sequence)
        torch.from_numpy(runner.block_bytes()).zero_()
        whole = torch.arange(272)
        runner.forward(Batch(whole % 40, whole, whole, [272], [272], torch.arange(17, dtype=torch.int32)[None], []))
        tables = torch.arange(17, dtype=torch.int32).repeat(5, 1)
        tables[:, 16] = torch.arange(20, 25)
        rows = torch.arange(5)
        slots = tables[:, 16].long() * 16
        for position in (256, 257):
            batch = Batch(rows + 3, torch.full((5,), position), slots + position - 256, [1] * 5, [position + 1] * 5,
                          tables, list(range(5)))  # fmt: skip
            found.append(runner.forward(batch))
    assert find_prefixes(tables.numpy(), np.full(5, 16), PREFIX_COST // 16)
    assert torch.equal(torch.stack(found[:2]), torch.stack(found[2:]))


def test_buffers_that_cannot_grow_leave_the_next_step_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The executor halves a batch that finds no memory, and goes on."""
    make_model(tmp_path, *FAMILIES["llama_biases"])
    runner = load(tmp_path, dtype="bfloat16", weight_dtype="int8", block_size=4)
    expected = outputs(runner, {"max_rows": 1, "max_chunk": 3})
    sequence = model_of(runner)._sequence
    assert sequence is not None
    buffers = (sequence._x, sequence._normed, sequence._heads, sequence._attended, sequence._gate_up, sequence._inner)
    assert runner.buffer_bytes_per_token * sequence._num_rows == sum(buffer.nbytes for buffer in buffers)
    before, empty, calls = sequence._x.data_ptr(), torch.empty, 0

    def fails_in_the_middle(*size: Any, **options: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("no memory")
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", fails_in_the_middle)
    with pytest.raises(RuntimeError, match="no memory"):
        sequence._make(128)
    monkeypatch.setattr(torch, "empty", empty)
    assert sequence._x.data_ptr() != before
    for row, wanted in zip(outputs(runner, {"max_rows": 1, "max_chunk": 3}), expected, strict=True):
        assert row.ids == wanted.ids
        assert torch.equal(torch.stack(row.logits), torch.stack(wanted.logits))


def test_the_pool_leaves_room_for_the_buffers_of_the_largest_step(tmp_path: Path) -> None:
    """Also when the warm-up has no time for one, and when a probe has made most of them before."""
    make_model(tmp_path, *FAMILIES["llama_biases"])
    runner = load(tmp_path, dtype="bfloat16", weight_dtype="int8", block_size=4)
    runner.buffer_bytes_per_token = 1 << 20
    with torch.inference_mode():
        assert warm_up(runner, 4, 64, 64).activation_bytes >= 64 << 20


def test_layers_that_are_not_kernels_run_one_by_one(tmp_path: Path) -> None:
    make_model(tmp_path, *FAMILIES["llama_biases"])
    assert model_of(load(tmp_path, dtype="float32"))._sequence is None
    assert model_of(load(tmp_path, dtype="bfloat16", attention="sdpa"))._sequence is None
