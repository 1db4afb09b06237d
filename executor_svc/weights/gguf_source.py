"""Weights from a GGUF file, dequantised with the numpy code of the `gguf` package.

Names are translated to Hugging Face's. llama.cpp stores query and key projections of the Llama architecture with each
head's rows interleaved (its rotary embedding pairs neighbours, ours pairs halves); that order is undone here.
"""

from __future__ import annotations

import mmap
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from executor_svc.weights.source import Blocks, check_rows
from pagemill.gguf import GgufHeader, TensorInfo
from pagemill.gguf_config import ROPE_FACTORS

T = TypeVar("T", bound=np.generic)

_CHUNK_VALUES = 1 << 17
"""Values dequantised at once by a thread: the float32 intermediates stay in cache, and peak memory stays flat."""

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
        # Only numpy runs in these: each thread that uses torch gets a team of OpenMP threads of its own. They are kept,
        # for new ones would begin with memory that the system has to hand out again.
        self._num_threads = torch.get_num_threads()
        self._threads = ThreadPoolExecutor(self._num_threads)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """As `WeightSource.shape`."""
        info = self._tensors.get(gguf_name(name))
        return info.shape if info else None

    def read_into(self, name: str, out: torch.Tensor, first_row: int = 0) -> None:
        """As `WeightSource.read_into`."""
        check_rows(name, self.shape(name), tuple(out.shape), first_row)
        stored = gguf_name(name)
        self._dequantise(self._tensors[stored], out, first_row, self._order(stored))

    def blocks(self, name: str) -> Blocks | None:
        """As `WeightSource.blocks`."""
        stored = gguf_name(name)
        info = self._tensors.get(stored)
        if info is None or len(info.shape) != 2 or info.type.block_size == 1:
            return None
        data, order = self._rows(info), self._order(stored)

        def rows(first: int, end: int) -> torch.Tensor:
            return torch.from_numpy(_ordered(data, order, first, end))

        return Blocks(info.type.name, *info.shape, rows)

    def close(self) -> None:
        """As `WeightSource.close`."""
        self._threads.shutdown()

    def rope_factors(self) -> torch.Tensor | None:
        """Divisors of the rotary frequencies, float32; None if the file has none."""
        info = self._tensors.get(ROPE_FACTORS)
        if info is None:
            return None
        factors = torch.empty(info.shape)
        self._dequantise(info, factors, 0, None)
        return factors

    def _rows(self, info: TensorInfo) -> NDArray[np.uint8]:
        """(rows, bytes of a row) of the file; a vector is one row."""
        rows = info.shape[0] if len(info.shape) > 1 else 1
        return self._data[info.offset : info.offset + info.nbytes].reshape(rows, -1)

    def _order(self, stored: str) -> NDArray[np.int64] | None:
        """Which stored row each row is; None: the same."""
        heads = next((count for part, count in self._heads.items() if part in stored), None)
        return None if heads is None else _half_pairs(self._tensors[stored].shape[0], heads)

    def _dequantise(self, info: TensorInfo, out: torch.Tensor, first: int, order: NDArray[np.int64] | None) -> None:
        kind = GGMLQuantizationType(info.type.type_id)
        data = self._rows(info)
        if len(info.shape) == 1:
            values = np.asarray(dequantize(data, kind)).reshape(-1)
            out.copy_(torch.from_numpy(_ordered(values, order, first, first + len(out)).copy()))
            return
        flat = out.view(out.shape[0], -1)
        step = max(1, _CHUNK_VALUES // flat.shape[1])

        def values_from(row: int) -> NDArray[np.float32]:
            part = _ordered(data, order, first + row, first + min(row + step, len(flat)))
            # As one long row: gguf takes sixteen rows at a time, and a call costs more than sixteen rows do.
            return np.ascontiguousarray(dequantize(part.reshape(1, -1), kind)).reshape(len(part), -1)

        starts = range(0, len(flat), step)
        for index in range(0, len(starts), self._num_threads):
            several = starts[index : index + self._num_threads]
            for row, part in zip(several, self._threads.map(values_from, several), strict=True):
                flat[row : row + step].copy_(torch.from_numpy(part))


def _ordered(data: NDArray[T], order: NDArray[np.int64] | None, first: int, end: int) -> NDArray[T]:
    return data[first:end] if order is None else data[order[first:end]]


def _half_pairs(rows: int, heads: int) -> NDArray[np.int64]:
    """Where the rows of each head lie, halves after halves, in interleaved order (0, d/2, 1, d/2+1, …)."""
    return np.arange(rows).reshape(heads, -1, 2).transpose(0, 2, 1).reshape(-1)
