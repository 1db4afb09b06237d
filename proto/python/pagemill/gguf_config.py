"""A Hugging Face style configuration out of the metadata of a GGUF file.

Only architectures that the executor's own model covers; any other is refused by name. Numbers keep the values that the
file has (an epsilon of 1e-5 comes back as the float32 nearest to it).
"""

from __future__ import annotations

from typing import Any

from pagemill.gguf import GgufError, GgufHeader

_CLASSES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
            "qwen3": "Qwen3ForCausalLM"}  # fmt: skip

_KEYS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
}

ROPE_FACTORS = "rope_freqs.weight"
"""Tensor with one divisor per rotary frequency; how llama.cpp's converter stores llama3 scaling."""


def hf_config(header: GgufHeader) -> dict[str, Any]:
    """The configuration. Raises GgufError for an architecture or an option that is not covered."""
    meta = header.metadata
    arch = meta.get("general.architecture")
    if arch not in _CLASSES:
        raise GgufError(f"{header.path.name}: GGUF architecture {arch!r} is not supported ({', '.join(_CLASSES)} are)")
    if meta.get(f"{arch}.expert_count", 0):
        raise GgufError(f"{header.path.name}: mixture-of-experts models are not supported in GGUF files")
    config: dict[str, Any] = {hf: _number(header, f"{arch}.{key}") for key, hf in _KEYS.items()}
    config |= {
        "architectures": [_CLASSES[arch]],
        "model_type": arch,
        "hidden_act": "silu",
        "num_key_value_heads": _number(header, f"{arch}.attention.head_count_kv", config["num_attention_heads"]),
        "rms_norm_eps": _real(header, f"{arch}.attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "vocab_size": _vocab_size(header, arch),
        "head_dim": _head_dim(header, arch, config),
        "rope_parameters": _rope(header, arch),
    }
    window = meta.get(f"{arch}.attention.sliding_window")
    if window:
        config |= {"sliding_window": _number(header, f"{arch}.attention.sliding_window"), "use_sliding_window": True}
    return config


def _number(header: GgufHeader, key: str, default: int | None = None) -> int:
    value = header.metadata.get(key, default)
    if type(value) is not int or not 0 < value < 1 << 31:
        raise GgufError(f"{header.path.name}: {key} must be a positive number (got {_brief(value)})")
    return value


def _real(header: GgufHeader, key: str, default: float | None = None) -> float:
    value = header.metadata.get(key, default)
    if not isinstance(value, float) or not 0 < value < 1e12:
        raise GgufError(f"{header.path.name}: {key} must be a positive real number (got {_brief(value)})")
    return value


def _brief(value: Any) -> str:
    return f"a list of {len(value)}" if isinstance(value, list) else repr(value)[:60]


def _vocab_size(header: GgufHeader, arch: str) -> int:
    """Rows of the embedding, which is what counts for token ids; the metadata must not contradict it."""
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise GgufError(f"{header.path.name}: no tokenizer (tokenizer.ggml.tokens) in the file")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise GgufError(f"{header.path.name}: no tensor token_embd.weight of two dimensions")
    rows = embedding.shape[0]
    stated = header.metadata.get(f"{arch}.vocab_size", rows)
    if stated != rows or len(tokens) > rows:
        raise GgufError(
            f"{header.path.name}: vocab_size {_brief(stated)}, {len(tokens)} tokens and {rows} embedding rows disagree"
        )
    return rows


def _head_dim(header: GgufHeader, arch: str, config: dict[str, Any]) -> int:
    default = config["hidden_size"] // config["num_attention_heads"]
    head_dim = _number(header, f"{arch}.attention.key_length", default or None)
    if _number(header, f"{arch}.attention.value_length", head_dim) != head_dim:
        raise GgufError(f"{header.path.name}: key and value heads of different sizes are not supported")
    if _number(header, f"{arch}.rope.dimension_count", head_dim) != head_dim:
        raise GgufError(f"{header.path.name}: rotary embeddings over a part of the head are not supported")
    return head_dim


def _rope(header: GgufHeader, arch: str) -> dict[str, Any]:
    meta = header.metadata
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": _real(header, f"{arch}.rope.freq_base", 10000.0)}
    kind = meta.get(f"{arch}.rope.scaling.type", "none")
    if f"{arch}.rope.scale_linear" in meta and kind == "none":  # the older spelling
        return rope | {"rope_type": "linear", "factor": _real(header, f"{arch}.rope.scale_linear")}
    if ROPE_FACTORS in header.tensors:
        return rope | {"rope_type": "factors"}
    if kind == "none":
        return rope
    factor = _real(header, f"{arch}.rope.scaling.factor")
    if kind == "linear":
        return rope | {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = _number(header, f"{arch}.rope.scaling.original_context_length")
        return rope | {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise GgufError(f"{header.path.name}: RoPE scaling {_brief(kind)} is not supported (none, linear and yarn are)")
