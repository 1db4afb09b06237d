"""What the worker hands the model runner for one step, and what it asks of a runner.

The worker builds a `Batch` from the mirrored lanes; only the runner touches KV bytes. Row i owns the tokens
``sum(query_lens[:i]) .. sum(query_lens[:i + 1])`` of the flat columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from executor_svc.lanes import Int64s, LaneMirror
from executor_svc.plans import Int32s


@dataclass(slots=True)
class Batch:
    """One step's tokens. Decode rows (one token) and chunks of prompts may be mixed, in any order of rows.

    Positions of a row are consecutive and end at ``context_lens[i] - 1``; the KV of every earlier position of the
    row is in its blocks already, or is written by this very batch. Every block id is in [0, num_blocks). A sane
    scheduler never lets two tokens share a slot; if one does, the values there are arbitrary and nothing else suffers.
    """

    token_ids: torch.Tensor
    """(num_tokens,) int64, each in [0, vocab_size); rows one after another."""
    positions: torch.Tensor
    """(num_tokens,) int64."""
    slot_mapping: torch.Tensor
    """(num_tokens,) int64: block_id * block_size + offset, where the token's keys and values go."""
    query_lens: list[int]
    """Tokens per row, at least 1 each."""
    context_lens: list[int]
    """Positions of the row that exist after this step, cached ones included; at least the row's query_len."""
    block_tables: torch.Tensor
    """(num_rows, width) int32, 0-padded; width is what the longest row needs. A row may have blocks beyond its need."""
    sample_rows: list[int]
    """Rows that sample, ascending. Empty: no logits are wanted, the forward only writes KV."""


class ModelRunner(Protocol):
    """A loaded model with its paged KV pool on one device.

    Before `allocate_kv` there is no pool and neither `forward` nor `block_bytes` may be called. Calls come from one
    thread at a time. A method that raises has changed nothing but KV bytes of slots in its own batch.
    """

    vocab_size: int
    """Number of token ids; the width of the logits."""
    max_model_len: int
    """Positions the model can address."""
    block_size: int
    """Token positions per block."""
    num_blocks: int
    """Blocks in the pool; 0 before `allocate_kv`."""
    bytes_per_block: int
    """Of one block over all layers, keys and values."""
    weight_bytes: int
    """Of weights and other buffers that stay for the life of the runner."""
    buffer_bytes_per_token: int
    """Of buffers that grow to the largest step's tokens and stay; 0 without any."""
    dtype_name: str
    """Of weights and activations, such as "bfloat16", or "bfloat16, weights int8"."""
    kv_dtype_name: str
    device_name: str
    """In words, such as "cpu: 2 threads"."""
    attention_name: str
    """The attention backend chosen."""
    model_name: str
    fingerprint: str
    tokenizer_hash: str

    def allocate_kv(self, num_blocks: int) -> None:
        """Replace the pool by one of `num_blocks` zeroed blocks; the old one's memory is given back first.

        On a CPU the zeros must be lazy pages (calloc or mmap), so that a large pool costs nothing until it is used.
        Raises MemoryError or RuntimeError if there is no such memory.
        """
        ...

    def forward(self, batch: Batch) -> torch.Tensor:
        """Write the batch's KV; returns logits (len(batch.sample_rows), vocab_size) float32, in that order."""
        ...

    def block_bytes(self) -> NDArray[np.uint8]:
        """The pool itself as (num_blocks, bytes_per_block) bytes, for copies of whole blocks; it keeps the memory."""
        ...


def build_batch(mirror: LaneMirror, lanes: Int32s, num_tokens: Int64s) -> Batch:
    """The batch of rows that fit (`LaneMirror.rows_that_fit`); at least one row. Changes nothing.

    No Python loop over rows or tokens: everything is gathered by index.
    """
    starts = mirror.position[lanes]
    ends = starts + num_tokens
    if int(num_tokens.max()) == 1:
        token_lanes, positions = lanes, starts
    else:
        firsts = np.cumsum(num_tokens) - num_tokens
        token_lanes = np.repeat(lanes, num_tokens)
        positions = np.arange(token_lanes.size) + np.repeat(starts - firsts, num_tokens)
    block, offset = np.divmod(positions, mirror.block_size)
    slots = mirror.tables[token_lanes, block].astype(np.int64) * mirror.block_size + offset
    width = -(-int(ends.max()) // mirror.block_size)
    return Batch(
        token_ids=torch.from_numpy(mirror.tokens[token_lanes, positions].astype(np.int64)),
        positions=torch.from_numpy(positions),
        slot_mapping=torch.from_numpy(slots),
        query_lens=num_tokens.tolist(),
        context_lens=ends.tolist(),
        block_tables=torch.from_numpy(mirror.tables[:, :width][lanes]),
        sample_rows=np.flatnonzero(ends == mirror.num_tokens[lanes]).tolist(),
    )
