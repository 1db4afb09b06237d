"""Writes small models of the Llama shape as GGUF files whose matrices have types of one's choice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import quantize

LAYERS, HIDDEN, HEADS, KV_HEADS, INNER, VOCAB = 2, 64, 4, 2, 96, 43
_KV = HIDDEN // HEADS * KV_HEADS
_MATRICES = {
    "attn_q": (HIDDEN, HIDDEN), "attn_k": (_KV, HIDDEN), "attn_v": (_KV, HIDDEN), "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER),
}  # fmt: skip


def shapes(*, tied: bool) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"token_embd": (VOCAB, HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(LAYERS):
        found |= {f"blk.{layer}.{name}": (HIDDEN,) for name in ("attn_norm", "ffn_norm")}
        found |= {f"blk.{layer}.{name}": shape for name, shape in _MATRICES.items()}
    return found if tied else {**found, "output": (VOCAB, HIDDEN)}


def write(file: Path, kind: Callable[[str], str], *, tied: bool = True) -> Path:
    """`kind`: the type of a matrix by its name, such as "blk.0.attn_q". Weights are random, the same in each call."""
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(VOCAB)])
    writer.add_token_types([1] * VOCAB)
    writer.add_eos_token_id(0)
    random = np.random.default_rng(3)
    for name, shape in shapes(tied=tied).items():
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", (1 + 0.1 * random.standard_normal(shape)).astype(np.float32))
            continue
        weight = (random.standard_normal(shape) * 2 / shape[1] ** 0.5).astype(np.float32)
        chosen = gguf.GGMLQuantizationType[kind(name)]
        writer.add_tensor(f"{name}.weight", quantize(weight, chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def mixed(name: str) -> str:
    """Types as in files of several: some that are kept, some that are not, also inside of what is one layer here."""
    kinds = {"token_embd": "Q8_0", "output": "Q5_1", "attn_v": "Q8_0", "ffn_gate": "Q4_1", "ffn_up": "F16",
             "ffn_down": "Q5_0", "attn_output": "BF16"}  # fmt: skip
    return kinds.get(name.rpartition(".")[2], "Q4_0")
