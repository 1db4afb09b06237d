"""What an attention backend offers: write a step's keys and values into the pool, attend through block tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from executor_svc.attention.rotation import HeadNorms, Rotation
from executor_svc.batch import Batch
from executor_svc.kv.geometry import KvGeometry
from executor_svc.kv.pool import KvPool


class AttentionError(ValueError):
    """A backend cannot serve this model or block size; the text is one line for the operator."""


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """How one layer attends, beyond causality."""

    scale: float | None = None
    """Factor on query · key. None: 1 / sqrt(head_dim)."""
    window: int | None = None
    """A position sees itself and the window - 1 positions before it. None: all before it."""


FULL = AttentionOptions()


class AttentionStep(Protocol):
    """One batch on its way through the layers; whatever all layers share has been computed once."""

    def write(self, layer: int, kv: torch.Tensor) -> None:
        """Store keys and values (num_tokens, 2, num_kv_heads, head_dim) of the batch's tokens in their slots."""
        ...

    def rotate_and_write(
        self, layer: int, heads: torch.Tensor, rotation: Rotation, norms: HeadNorms | None
    ) -> torch.Tensor:
        """Normalise and rotate queries and keys, store keys and values; returns the queries.

        `heads`: (num_tokens, num_heads + 2 * num_kv_heads, head_dim), queries, keys, values, and undefined afterwards.
        The queries, (num_tokens, num_heads, head_dim), may be a view of it.
        """
        ...

    def attend(self, layer: int, query: torch.Tensor, options: AttentionOptions = FULL) -> torch.Tensor:
        """Attention of (num_tokens, num_heads, head_dim) over each row's context, read through its block table.

        Query head h uses KV head ``h * num_kv_heads // num_heads``. Position p of a row sees the positions 0..p of
        that row (see `AttentionOptions.window`), none of another row, and whatever lies in slots beyond the context
        has no influence, NaN included. Returns (num_tokens, num_heads * head_dim) of the query's dtype.
        """
        ...


class AttentionBackend(Protocol):
    """A way to compute attention on one kind of device."""

    name: str
    batch_invariant: bool
    """Whether the bits of a row's result depend on nothing but the row, and not on how its prompt was cut."""

    def refusal(self, geometry: KvGeometry) -> str | None:
        """Why this backend cannot serve such blocks (size, dtype, head size), as one line; None if it can."""
        ...

    def begin(self, batch: Batch, pool: KvPool) -> AttentionStep:
        """Prepare one batch; nothing is written before `AttentionStep.write`."""
        ...
