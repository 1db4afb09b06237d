"""Rotary position embeddings as an attention step applies them, and the same in plain torch."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.nn import functional


@dataclass(slots=True)
class Rotation:
    """Of one batch: the model's table, and the tokens' places in it."""

    cos: torch.Tensor
    """(positions, head_dim / 2) float32, of every position that the model has met so far."""
    sin: torch.Tensor
    positions: torch.Tensor
    """(num_tokens,) int64."""
    _gathered: tuple[torch.Tensor, torch.Tensor] | None = field(default=None, repr=False)

    def gathered(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and signed sin, (num_tokens, 1, head_dim) each, for `rotate`; made when the first layer asks."""
        if self._gathered is None:
            cos, sin = self.cos[self.positions].to(dtype), self.sin[self.positions].to(dtype)
            self._gathered = torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]
        return self._gathered


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorm of each query and key head, before they are rotated."""

    query: torch.Tensor
    """(head_dim,) weights."""
    key: torch.Tensor
    eps: float


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate (num_tokens, heads, head_dim), pairs being (i, i + head_dim/2); cos and sin as `gathered` gives them."""
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin)


def rotate_heads(
    heads: torch.Tensor, num_kv_heads: int, rotation: Rotation, norms: HeadNorms | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries (num_tokens, num_heads, head_dim), and keys with values (num_tokens, 2, num_kv_heads, head_dim).

    Of `heads` (num_tokens, num_heads + 2 * num_kv_heads, head_dim), which is overwritten.
    """
    num_heads, head_dim = heads.shape[1] - 2 * num_kv_heads, heads.shape[2]
    turning = heads[:, : num_heads + num_kv_heads]
    if norms is not None:
        query = functional.rms_norm(turning[:, :num_heads], (head_dim,), norms.query, norms.eps)
        key = functional.rms_norm(turning[:, num_heads:], (head_dim,), norms.key, norms.eps)
        turning = torch.cat((query, key), dim=1)
    turned = rotate(turning, *rotation.gathered(heads.dtype))
    heads[:, num_heads : num_heads + num_kv_heads] = turned[:, num_heads:]
    return turned[:, :num_heads], heads[:, num_heads:].view(-1, 2, num_kv_heads, head_dim)
