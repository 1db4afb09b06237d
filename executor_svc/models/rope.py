"""Rotary position embeddings: inverse frequencies of each scaling variant, and the cos/sin table.

Variants are named by `rope_type` of a Hugging Face configuration: default, linear, dynamic, llama3, yarn; "factors" is
llama.cpp's form of llama3 (one divisor per frequency, a tensor of the GGUF file). Others are refused by name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from executor_svc.attention.rotation import Rotation

SUPPORTED = ("default", "linear", "dynamic", "llama3", "yarn", "factors")


class UnsupportedModelError(ValueError):
    """The configuration asks for something the own models do not do; the text is one line."""


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding over whole heads."""

    rope_type: str
    theta: float
    head_dim: int
    max_position_embeddings: int
    params: dict[str, Any]
    """The variant's own numbers, named as in the configuration."""


def rope_spec(config: dict[str, Any], head_dim: int) -> RopeSpec:
    """From `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before it).

    Raises UnsupportedModelError for a variant that is not supported.
    """
    params = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope_type = params.pop("rope_type", None) or params.pop("type", "default")
    if rope_type not in SUPPORTED:
        raise UnsupportedModelError(f"RoPE scaling {rope_type!r} is not supported ({', '.join(SUPPORTED)} are)")
    partial = params.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise UnsupportedModelError(f"rotary embeddings over a part ({partial}) of the head are not supported")
    theta = float(params.pop("rope_theta", None) or config.get("rope_theta") or 10000.0)
    return RopeSpec(rope_type, theta, head_dim, int(config["max_position_embeddings"]), params)


def inverse_frequencies(spec: RopeSpec, factors: torch.Tensor | None = None) -> tuple[torch.Tensor, float]:
    """(head_dim / 2,) float32, and a factor on cos and sin (1 except for yarn)."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim
    plain = 1.0 / (spec.theta**exponents)
    match spec.rope_type:
        case "linear":
            return plain / _param(spec, "factor"), 1.0
        case "llama3":
            return _llama3(spec, plain), 1.0
        case "yarn":
            return _yarn(spec, exponents)
        case "factors":
            if factors is None or factors.shape != plain.shape:
                raise UnsupportedModelError(f"RoPE factors must have shape {tuple(plain.shape)}")
            return plain / factors.float(), 1.0
    # "dynamic" stretches only sequences longer than max_position_embeddings, which are never admitted.
    return plain, 1.0


def _param(spec: RopeSpec, name: str, default: float | None = None) -> float:
    value = spec.params.get(name)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise UnsupportedModelError(f"RoPE scaling {spec.rope_type!r} needs the number {name} (got {value!r})")
    return float(value)


def _llama3(spec: RopeSpec, plain: torch.Tensor) -> torch.Tensor:
    """Llama 3.1: long wavelengths are divided by `factor`, short ones kept, those between blended."""
    factor, low, high = (_param(spec, name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    original = _param(spec, "original_max_position_embeddings", spec.max_position_embeddings)
    wavelen = 2 * math.pi / plain
    smooth = (original / wavelen - low) / (high - low)
    blended = (1 - smooth) * (plain / factor) + smooth * plain
    result = torch.where(wavelen > original / low, plain / factor, blended)
    return torch.where(wavelen < original / high, plain, result)


def _yarn(spec: RopeSpec, exponents: torch.Tensor) -> tuple[torch.Tensor, float]:
    """YaRN (arXiv 2309.00071, section 3): blend between scaled and plain frequencies, and a temperature."""
    original = _param(spec, "original_max_position_embeddings", spec.max_position_embeddings)
    factor = _param(spec, "factor", spec.max_position_embeddings / original)
    dim = spec.head_dim

    def dim_of(num_rotations: float) -> float:
        return dim * math.log(original / (num_rotations * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = dim_of(_param(spec, "beta_fast", 32) or 32), dim_of(_param(spec, "beta_slow", 1) or 1)
    if spec.params.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 if low == high else 0
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    pos_freqs = spec.theta**exponents
    keep = 1 - ramp
    return 1.0 / (factor * pos_freqs) * (1 - keep) + 1.0 / pos_freqs * keep, _yarn_scale(spec, factor)


def _yarn_scale(spec: RopeSpec, factor: float) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if spec.params.get("attention_factor") is not None:
        return _param(spec, "attention_factor")
    if spec.params.get("mscale") and spec.params.get("mscale_all_dim"):
        return mscale(_param(spec, "mscale")) / mscale(_param(spec, "mscale_all_dim"))
    return mscale(1.0)


class RotaryTable:
    """cos and sin of every position, float32; grows by doubling up to what is asked."""

    def __init__(self, inv_freq: torch.Tensor, scale: float) -> None:
        self._inv_freq = inv_freq
        self._scale = scale
        self._cos = self._sin = torch.empty(0)
        self._grow(4096)

    def _grow(self, length: int) -> None:
        angles = torch.arange(length, dtype=torch.float32)[:, None] * self._inv_freq
        self._cos, self._sin = angles.cos() * self._scale, angles.sin() * self._scale

    def rotation(self, positions: torch.Tensor) -> Rotation:
        """Of a batch whose tokens have these positions, (num_tokens,) int64."""
        top = int(positions.max()) + 1
        if top > self._cos.shape[0]:
            self._grow(1 << (top - 1).bit_length())
        return Rotation(self._cos, self._sin, positions)
