"""The Llama shape: Llama, Mistral, Qwen2, Qwen3 and what is built like them, on a flat batch of tokens.

Tokens of all rows lie one after another, without padding; only attention knows rows. Projections that share an input
are one matrix (q, k, v; gate, up). After each layer there is one residual stream and no other state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from executor_svc.attention.base import AttentionOptions, AttentionStep
from executor_svc.attention.native import NativeStep
from executor_svc.attention.rotation import HeadNorms, Rotation
from executor_svc.models.base import ModelShape
from executor_svc.models.loading import WeightLoader
from executor_svc.models.rope import (
    RopeSpec,
    RotaryTable,
    UnsupportedModelError,
    inverse_frequencies,
    rope_spec,
)
from executor_svc.models.sequence import LayerSequence, are_kernels

_MAX_LAYERS = 4096

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


@dataclass(frozen=True, slots=True)
class LlamaSpec:
    """The configuration, checked and with every default filled in."""

    shape: ModelShape
    hidden_size: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeSpec
    tied_embeddings: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    """Sliding window per layer; None: full attention."""


def llama_spec(config: dict[str, Any]) -> LlamaSpec:
    """From a Hugging Face configuration. Raises UnsupportedModelError with one line."""
    family = ARCHITECTURES[config["architectures"][0]]
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedModelError(f"activation {config['hidden_act']!r} is not supported (silu is)")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method")
        raise UnsupportedModelError(f"quantised checkpoints ({method}) are not supported")
    heads = _count(config, "num_attention_heads")
    kv_heads = _count(config, "num_key_value_heads", heads)
    hidden = _count(config, "hidden_size")
    head_dim = _count(config, "head_dim", hidden // heads)
    if heads % kv_heads or head_dim % 2:
        raise UnsupportedModelError(f"{heads} heads of size {head_dim} do not share {kv_heads} KV heads")
    layers = _count(config, "num_hidden_layers")
    if layers > _MAX_LAYERS:  # before anything is allocated per layer
        raise UnsupportedModelError(f"{layers} layers, more than the {_MAX_LAYERS} allowed")
    bias = bool(config.get("attention_bias", False))
    shape = ModelShape(
        layers, heads, kv_heads, head_dim, _count(config, "vocab_size"), _count(config, "max_position_embeddings")
    )
    return LlamaSpec(
        shape=shape,
        hidden_size=hidden,
        intermediate_size=_count(config, "intermediate_size"),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=rope_spec(config, head_dim),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or (family != "mistral" and bias),
        out_bias=family in ("llama", "qwen3") and bias,
        mlp_bias=family == "llama" and bool(config.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        windows=_windows(config, family, layers),
    )


def _count(config: dict[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if type(value) is not int or not 0 < value < 1 << 31:
        raise UnsupportedModelError(f"configuration: {key} must be a positive number (got {value!r})")
    return value


def _windows(config: dict[str, Any], family: str, layers: int) -> tuple[int | None, ...]:
    """Mistral slides in every layer; Qwen only where `use_sliding_window` and `layer_types` say so."""
    window = config.get("sliding_window")
    if window is None or family == "llama" or (family != "mistral" and not config.get("use_sliding_window", False)):
        return (None,) * layers
    window = _count(config, "sliding_window")
    if family == "mistral":
        return (window,) * layers
    kinds = config.get("layer_types")
    if kinds is None:  # as transformers derives them
        first = config.get("max_window_layers", 28)
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    if len(kinds) != layers:
        raise UnsupportedModelError(f"configuration: layer_types names {len(kinds)} layers of {layers}")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


class _Layer:
    """One decoder layer."""

    def __init__(self, spec: LlamaSpec, loader: WeightLoader, index: int) -> None:
        s = spec.shape
        q_size, kv_size = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
        attn, mlp = f"model.layers.{index}.self_attn", f"model.layers.{index}.mlp"
        eps = spec.rms_norm_eps
        self.input_norm = loader.norm(f"model.layers.{index}.input_layernorm", spec.hidden_size, eps)
        parts = [(f"{attn}.q_proj", q_size), (f"{attn}.k_proj", kv_size), (f"{attn}.v_proj", kv_size)]
        self.qkv = loader.linear(parts, spec.hidden_size, bias=spec.qkv_bias)
        self.norms: HeadNorms | None = None
        if spec.qk_norm:
            query, key = (loader.tensor(f"{attn}.{name}.weight", (s.head_dim,)) for name in ("q_norm", "k_norm"))
            self.norms = HeadNorms(query, key, eps)
        self.out = loader.linear([(f"{attn}.o_proj", spec.hidden_size)], q_size, bias=spec.out_bias)
        self.mlp_norm = loader.norm(f"model.layers.{index}.post_attention_layernorm", spec.hidden_size, eps)
        inner = spec.intermediate_size
        self.gate_up = loader.linear(
            [(f"{mlp}.gate_proj", inner), (f"{mlp}.up_proj", inner)], spec.hidden_size, bias=spec.mlp_bias
        )
        self.down = loader.linear([(f"{mlp}.down_proj", spec.hidden_size)], inner, bias=spec.mlp_bias)
        self.options = AttentionOptions(window=spec.windows[index])
        self.silu_mul = loader.silu_mul
        self._index = index
        self._shape = s

    def __call__(self, x: torch.Tensor, rotation: Rotation, step: AttentionStep) -> torch.Tensor:
        s = self._shape
        heads = self.qkv(self.input_norm(x)).view(x.shape[0], s.num_heads + 2 * s.num_kv_heads, s.head_dim)
        query = step.rotate_and_write(self._index, heads, rotation, self.norms)
        x = self.out.add_to(x, step.attend(self._index, query, self.options))
        return self.down.add_to(x, self.silu_mul(self.gate_up(self.mlp_norm(x))))


class LlamaModel:
    """`CausalLM` of the Llama shape."""

    implementation = "own (llama shape)"

    def __init__(self, spec: LlamaSpec, loader: WeightLoader, dtype: torch.dtype) -> None:
        self.shape = spec.shape
        self.dtype = dtype
        vocab, hidden = spec.shape.vocab_size, spec.hidden_size
        embed = "model.embed_tokens"
        if spec.tied_embeddings:
            self._embedding, self._head = loader.tied(embed, vocab, hidden)
        else:
            self._embedding = loader.embedding(embed, vocab, hidden)
            self._head = loader.linear([("lm_head", vocab)], hidden, bias=False)
        self._layers = [_Layer(spec, loader, i) for i in range(spec.shape.num_layers)]
        self._norm = loader.norm("model.norm", hidden, spec.rms_norm_eps)
        self._rotary = RotaryTable(*inverse_frequencies(spec.rope, loader.rope_factors()))
        self._sequence = None
        self.buffer_bytes_per_token = 0
        if loader.kernels is not None and are_kernels(self._layers):
            self._sequence = LayerSequence(loader.kernels, self._layers, spec.shape, dtype)
            self.buffer_bytes_per_token = self._sequence.bytes_per_token
        projections = (p for layer in self._layers for p in (layer.qkv, layer.out, layer.gate_up, layer.down))
        self.batch_invariant = self._head.batch_invariant and all(p.batch_invariant for p in projections)
        self.weight_bytes = loader.nbytes

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, step: AttentionStep, sample: torch.Tensor | None
    ) -> torch.Tensor | None:
        """As `CausalLM.forward`."""
        rotation = self._rotary.rotation(positions)
        x = self._embedding(token_ids)
        if self._sequence is not None and isinstance(step, NativeStep):
            x = self._sequence.run(x, rotation, step)
        else:
            for layer in self._layers:
                x = layer(x, rotation, step)
        return None if sample is None else self._head(self._norm(x[sample]))
