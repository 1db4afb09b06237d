"""Writes GGUF files byte by byte, right or wrong, for tests."""

from __future__ import annotations

import struct
from typing import Any

STRING, ARRAY = 8, 9


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str, value: Any) -> bytes:
    """One metadata entry; the type follows the Python type (int: uint32, float: float32)."""
    return text(key) + _typed(value)


def _typed(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<IB", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", STRING) + text(value)
    kind, body = (
        (STRING, b"".join(map(text, value)))
        if isinstance(value[0], str)
        else (5, struct.pack(f"<{len(value)}i", *value))
    )
    return struct.pack("<IIQ", ARRAY, kind, len(value)) + body


def tensor(name: str, shape: tuple[int, ...], offset: int, kind: int = 0) -> bytes:
    return (
        text(name)
        + struct.pack("<I", len(shape))
        + struct.pack(f"<{len(shape)}Q", *shape[::-1])
        + struct.pack("<IQ", kind, offset)
    )


def gguf(metadata: dict[str, Any], tensors: dict[str, tuple[int, ...]], *, version: int = 3, kind: int = 0) -> bytes:
    """A whole file; tensor data counts up from 0 in float32."""
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    out += b"".join(entry(k, v) for k, v in metadata.items())
    offset, data = 0, b""
    for name, shape in tensors.items():
        count = 1
        for size in shape:
            count *= size
        out += tensor(name, shape, offset, kind)
        raw = struct.pack(f"<{count}f", *range(count))
        raw += bytes(-len(raw) % 32)
        data += raw
        offset += len(raw)
    return out + bytes(-len(out) % 32) + data


def llama_metadata(**more: Any) -> dict[str, Any]:
    return {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.context_length": 64,
        "llama.embedding_length": 8,
        "llama.feed_forward_length": 16,
        "llama.attention.head_count": 2,
        "llama.attention.head_count_kv": 1,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["<|end|>", "a", "b", "<|eot|>"],
        "tokenizer.ggml.token_type": [3, 1, 1, 3],
        "tokenizer.ggml.eos_token_id": 0,
        **more,
    }


LLAMA_TENSORS: dict[str, tuple[int, ...]] = {
    "token_embd.weight": (4, 8),
    "output_norm.weight": (8,),
    "blk.0.attn_norm.weight": (8,),
    "blk.0.ffn_norm.weight": (8,),
    "blk.0.attn_q.weight": (8, 8),
    "blk.0.attn_k.weight": (4, 8),
    "blk.0.attn_v.weight": (4, 8),
    "blk.0.attn_output.weight": (8, 8),
    "blk.0.ffn_gate.weight": (16, 8),
    "blk.0.ffn_up.weight": (16, 8),
    "blk.0.ffn_down.weight": (8, 16),
}
