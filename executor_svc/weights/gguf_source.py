"""Weights from a GGUF file, dequantised with the numpy code of the `gguf` package.

Names are translated to Hugging Face's. llama.cpp stores query and key projections of the Llama architecture with each
head's rows interleaved (its rotary embedding pairs neighbours, ours pairs halves); that permutation is undone here.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from executor_svc.weights.source import check_shape
from pagemill.gguf import GgufHeader, TensorInfo
from pagemill.gguf_config import ROPE_FACTORS

_CHUNK_VALUES = 1 << 20
"""Values dequantised at once: the float32 intermediates stay in cache, and peak memory stays flat."""

_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """llama.cpp's name of a tensor that Hugging Face calls `name`; unknown names come back as they are."""
    stem, dot, suffix = name.rpartition(".")
    if stem in _TOP:
        return _TOP[stem] + dot + suffix
    parts = stem.split(".", 3)
    if len(parts) == 4 and parts[:2] == ["model", "layers"] and parts[3] in _IN_LAYER:
        return f"blk.{parts[2]}.{_IN_LAYER[parts[3]]}{dot}{suffix}"
    return name


class GgufSource:
    """`WeightSource` over one GGUF file; offsets were checked when the header was read."""

    def __init__(self, header: GgufHeader, config: dict[str, Any]) -> None:
        self._tensors = header.tensors
        permuted = config["model_type"] in ("llama", "mistral")
        self._heads = (
            {".attn_q.": config["num_attention_heads"], ".attn_k.": config["num_key_value_heads"]} if permuted else {}
        )
        with header.path.open("rb") as file:
            # A private writable mapping, because torch warns about read-only memory; nothing is written.
            self._data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=np.uint8)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """As `WeightSource.shape`."""
        info = self._tensors.get(gguf_name(name))
        return info.shape if info else None

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """As `WeightSource.read_into`."""
        check_shape(name, self.shape(name), tuple(out.shape))
        stored = gguf_name(name)
        heads = next((count for part, count in self._heads.items() if part in stored), None)
        target = out if heads is None else torch.empty_like(out)
        self._dequantise(self._tensors[stored], target.view(out.shape[0], -1))
        if heads is not None:
            out.copy_(_half_pairs(target, heads))

    def rope_factors(self) -> torch.Tensor | None:
        """Divisors of the rotary frequencies, float32; None if the file has none."""
        info = self._tensors.get(ROPE_FACTORS)
        if info is None:
            return None
        factors = torch.empty(info.shape)
        self._dequantise(info, factors.view(info.shape[0], -1))
        return factors

    def _dequantise(self, info: TensorInfo, out: torch.Tensor) -> None:
        kind = GGMLQuantizationType(info.type.type_id)
        rows = info.shape[0] if len(info.shape) > 1 else 1
        data = self._data[info.offset : info.offset + info.nbytes].reshape(rows, -1)
        flat = out.view(rows, -1)
        step = max(1, _CHUNK_VALUES // flat.shape[1])
        for row in range(0, rows, step):
            values = dequantize(data[row : row + step], kind)
            flat[row : row + step].copy_(torch.from_numpy(np.ascontiguousarray(values)))


def _half_pairs(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from interleaved order (0, d/2, 1, d/2+1, …) back to halves."""
    return weight.view(heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)
