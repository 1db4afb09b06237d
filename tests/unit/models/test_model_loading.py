"""Loading through the runner: what it says about itself, tiny GGUF files, and refusals in one line."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from executor_svc.attention.base import AttentionError
from executor_svc.batch import Batch, ModelRunner
from executor_svc.models.llama import llama_spec
from executor_svc.models.rope import UnsupportedModelError
from executor_svc.runner import load, usable_cpus
from executor_svc.weights.gguf_source import gguf_name
from executor_svc.weights.source import WeightError
from tests.unit.modelfiles.gguf_writer import LLAMA_TENSORS, gguf, llama_metadata


def tiny(path: Path, tensors: dict[str, tuple[int, ...]] | None = None, **more: Any) -> Path:
    file = path / "tiny.gguf"
    file.write_bytes(gguf(llama_metadata(**more), tensors or LLAMA_TENSORS))
    return file


def test_the_runner_describes_itself(tmp_path: Path) -> None:
    runner: ModelRunner = load(tiny(tmp_path), dtype="float32", block_size=4, num_threads=1)
    assert (runner.vocab_size, runner.max_model_len, runner.block_size, runner.num_blocks) == (4, 64, 4, 0)
    assert runner.bytes_per_block == 2 * 1 * 1 * 4 * 4 * 4
    values = sum(rows * (cols[0] if cols else 1) for rows, *cols in LLAMA_TENSORS.values())
    assert runner.weight_bytes == 4 * values
    assert (runner.dtype_name, runner.kv_dtype_name) == ("float32", "float32")
    assert runner.attention_name == "sdpa"  # heads of 4 are nothing for the kernels
    with pytest.raises(RuntimeError, match="allocate_kv"):
        runner.block_bytes()
    runner.allocate_kv(3)
    runner.allocate_kv(2)
    assert runner.num_blocks == 2


def test_without_sampling_rows_only_kv_is_written(tmp_path: Path) -> None:
    runner = load(tiny(tmp_path), dtype="float32", block_size=4, num_threads=1)
    runner.allocate_kv(2)
    batch = Batch(torch.tensor([1, 2]), torch.arange(2), torch.tensor([4, 5]), [2], [2],
                  torch.tensor([[1]], dtype=torch.int32), [])  # fmt: skip
    assert runner.forward(batch).shape == (0, 4)
    assert runner.pool.blocks.values[1, :, :, :, :2].abs().sum() > 0
    assert not runner.pool.blocks.values[0].any()
    assert not runner.pool.blocks.values[1, :, :, :, 2:].any()


@pytest.mark.parametrize(
    ("tensors", "more", "why"),
    [
        ({k: v for k, v in LLAMA_TENSORS.items() if "ffn_up" not in k}, {}, "ffn_up|up_proj.*missing"),
        ({**LLAMA_TENSORS, "blk.0.ffn_down.weight": (8, 8)}, {}, r"down_proj.*shape \[8, 8\].*\[8, 16\]"),
        (LLAMA_TENSORS, {"llama.block_count": 2}, "layers.1.*missing"),
        (LLAMA_TENSORS, {"llama.embedding_length": 1 << 30}, "asks for|missing"),
    ],
)
def test_weights_that_do_not_fit_the_configuration(
    tensors: dict[str, tuple[int, ...]], more: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(WeightError, match=why) as refused:
        load(tiny(tmp_path, tensors, **more), dtype="float32", num_threads=1)
    assert "\n" not in str(refused.value)


def test_no_thread_outlives_a_load_that_fails(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with pytest.raises(WeightError) as refused:
        load(tiny(tmp_path, {**LLAMA_TENSORS, "blk.0.ffn_down.weight": (8, 8)}), dtype="float32", num_threads=1)
    assert refused.traceback  # which holds on to everything that was there
    assert set(threading.enumerate()) == before


def test_forced_choices_that_cannot_work_fail_at_load(tmp_path: Path) -> None:
    with pytest.raises(AttentionError, match="flash_attn"):
        load(tiny(tmp_path), attention="flash_attn")
    with pytest.raises(ValueError, match="float8"):
        load(tiny(tmp_path), dtype="float8")
    with pytest.raises(ValueError, match="block_size"):
        load(tiny(tmp_path), block_size=0)
    deep: dict[str, Any] = {"llama.block_count": (1 << 31) - 1}
    with pytest.raises(UnsupportedModelError, match="layers, more than"):
        load(tiny(tmp_path, **deep), num_threads=1)
    odd = {**LLAMA_TENSORS, "blk.0.attn_q.weight": (6, 8), "blk.0.attn_output.weight": (8, 6)}
    with pytest.raises(UnsupportedModelError, match="heads of size 3"):
        load(tiny(tmp_path, odd, **{"llama.attention.key_length": 3, "llama.attention.value_length": 3}), num_threads=1)


def test_names_of_llama_cpp() -> None:
    assert gguf_name("model.embed_tokens.weight") == "token_embd.weight"
    assert gguf_name("model.layers.12.self_attn.q_proj.bias") == "blk.12.attn_q.bias"
    assert gguf_name("model.layers.0.post_attention_layernorm.weight") == "blk.0.ffn_norm.weight"
    assert gguf_name("something.else") == "something.else"


def test_threads_never_exceed_what_the_process_may_use() -> None:
    assert 1 <= usable_cpus() <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("window", "kinds", "why"),
    [
        (-1, ["sliding_attention"] * 2, "sliding_window must be a positive number"),
        (0, ["sliding_attention"] * 2, "sliding_window must be a positive number"),
        (True, ["sliding_attention"] * 2, "sliding_window must be a positive number"),
        (4, ["sliding_attention"], "layer_types names 1 layers of 2"),
    ],
)
def test_windows_that_make_no_sense_are_refused(window: object, kinds: list[str], why: str) -> None:
    config = {
        "architectures": ["Qwen2ForCausalLM"], "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 32,
        "num_hidden_layers": 2, "vocab_size": 4, "max_position_embeddings": 64, "intermediate_size": 8,
        "use_sliding_window": True, "sliding_window": window, "layer_types": kinds,
    }  # fmt: skip
    with pytest.raises(UnsupportedModelError, match=why):
        llama_spec(config)
    assert llama_spec(
        config | {"sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]}
    ).windows == (
        None,
        4,
    )
