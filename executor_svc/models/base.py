"""What the runner needs of a model, whoever implements it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from executor_svc.attention.base import AttentionStep


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Numbers that the KV pool and the scheduler depend on."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int


class CausalLM(Protocol):
    """A decoder-only language model without a cache of its own: keys and values go through the step."""

    shape: ModelShape
    dtype: torch.dtype
    weight_bytes: int
    buffer_bytes_per_token: int
    """Of buffers that grow to the largest step's tokens and stay; 0 without any."""
    batch_invariant: bool
    """Whether the bits of a sequence's logits depend on that sequence alone, given attention of which that is true."""
    implementation: str
    """In words for the log, such as "own"."""

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, step: AttentionStep, sample: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Run (num_tokens,) ids at their positions; writes and reads KV through `step` layer by layer.

        Returns logits (len(sample), vocab_size) of the tokens that `sample` indexes; None (and no lm_head) when
        `sample` is None.
        """
        ...
