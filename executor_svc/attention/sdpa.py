"""Reference attention in plain torch, on any device torch runs on: gather blocks, then dense attention.

Every other backend is tested against this one. It is also the CPU path until the C kernels come, so it is written for
speed where that costs no clarity. Per layer and group of rows, `KvBlocks.gather` puts keys and values of whole blocks
side by side, padded to the longest, in the query's type whatever the blocks hold; then

* decode rows: the query heads of a KV head are the rows of one small matrix, two `bmm` and a softmax. Rows are grouped
  by context length so that little is padded. `enable_gqa` instead reads the KV memory at 1.4 GB/s (measured; bmm: 20).
  Scores are rounded to the query's dtype before the softmax in float32; in bfloat16 SmolLM2's logits err by 2 to 4 % of
  their spread either way, as transformers' own do (rounded 1.7 to 3.5 %, unrounded 2.0 to 3.4 %, measured).
* chunks: `scaled_dot_product_attention` per row, causal at the bottom right.

Positions beyond a row's context may hold anything (a freed block's old bytes, NaN): scores there are replaced by -inf,
which NaN does not survive, and values there by zero, since 0 * NaN would be NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch.nn import functional

from executor_svc.attention.base import FULL, AttentionOptions
from executor_svc.batch import Batch
from executor_svc.kv.geometry import KvGeometry
from executor_svc.kv.layout import KvBlocks
from executor_svc.kv.pool import KvPool

_MAX_GATHER_BYTES = 32 << 20
"""Keys and values gathered at once, so that memory does not grow with rows times context. One row may need more."""
_PIECE = 128
"""Queries of a chunk computed at once; 128 is 1.4 to 1.6 x faster than 512 on a prompt of 512."""


class SdpaBackend:
    """`AttentionBackend` by gathering blocks; see the module."""

    name = "sdpa"

    def refusal(self, geometry: KvGeometry) -> str | None:
        """As `AttentionBackend.refusal`: any block size, head size and type of which there are blocks."""
        if geometry.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.int8):
            return f"attention backend sdpa: KV dtype {geometry.dtype} is neither int8 nor a floating point type"
        return None

    def begin(self, batch: Batch, pool: KvPool) -> SdpaStep:
        """As `AttentionBackend.begin`."""
        return SdpaStep(batch, pool.blocks)


@dataclass(slots=True)
class _Group:
    """Rows that are gathered together."""

    tokens: torch.Tensor | slice
    """Where the rows' tokens are in the flat batch: an index for decode rows, a slice for one chunk."""
    num_rows: int
    query_len: int
    """Tokens per row."""
    context_lens: list[int]
    padded_len: int
    """Positions gathered per row: a multiple of the block size."""
    index: torch.Tensor
    """What `KvBlocks.gather` takes."""
    hidden: torch.Tensor | None
    """(rows, padded_len) bool: positions beyond the context. None: the gather holds no such positions."""
    stale: torch.Tensor | None
    """The same positions as rows of the gathered values, (rows * kv_heads * padded_len, head_dim); None as above."""
    masks: dict[tuple[int | None, int], torch.Tensor] = field(default_factory=dict)
    """Masks by (window, first query), made when the first layer asks."""


class SdpaStep:
    """`AttentionStep` of `SdpaBackend`."""

    def __init__(self, batch: Batch, blocks: KvBlocks) -> None:
        self._blocks = blocks
        self._store_index = blocks.store_index(batch.slot_mapping)
        self._groups = _group_rows(batch, blocks)

    def write(self, layer: int, kv: torch.Tensor) -> None:
        """As `AttentionStep.write`."""
        self._blocks.store(layer, self._store_index, kv)

    def attend(self, layer: int, query: torch.Tensor, options: AttentionOptions = FULL) -> torch.Tensor:
        """As `AttentionStep.attend`."""
        out = torch.empty(query.shape[0], query.shape[1] * query.shape[2], dtype=query.dtype, device=query.device)
        for group in self._groups:
            key, value = self._gather(layer, group, query.dtype)
            rows = query[group.tokens]
            compute = _attend_decode if group.query_len == 1 else _attend_chunk
            out[group.tokens] = compute(rows, key, value, group, options)
        return out

    def _gather(self, layer: int, group: _Group, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (rows * kv_heads, padded_len, head_dim) of a group, values zero beyond the contexts."""
        key, value = self._blocks.gather(layer, group.index, group.num_rows, dtype)
        if group.stale is not None:
            value.view(-1, value.shape[-1]).index_fill_(0, group.stale, 0)
        return key, value


def _group_rows(batch: Batch, blocks: KvBlocks) -> list[_Group]:
    starts = [0, *accumulate(batch.query_lens)]
    buckets: dict[int, list[int]] = {}
    groups = []
    for row, query_len in enumerate(batch.query_lens):
        if query_len == 1:
            buckets.setdefault(_bucket(batch.context_lens[row]), []).append(row)
        else:
            tokens = slice(starts[row], starts[row + 1])
            groups.append(_make_group(batch, blocks, [row], batch.context_lens[row], tokens))
    for length, members in buckets.items():
        most = max(1, _MAX_GATHER_BYTES // blocks.gathered_bytes(length))
        for first in range(0, len(members), most):
            rows = members[first : first + most]
            index = torch.tensor([starts[row] for row in rows], device=batch.token_ids.device)
            reach = length if len(rows) > 1 else batch.context_lens[rows[0]]  # a row alone needs no common length
            groups.append(_make_group(batch, blocks, rows, reach, index))
    return groups


def _bucket(context_len: int) -> int:
    """The length to which decode rows of about this context are padded: steps of 128, of a quarter from 1,024 on.

    Lengths must recur: oneDNN compiles a matrix product for each new shape (0.3 to 1.3 ms, measured).
    """
    step = max(128, 1 << max(0, context_len.bit_length() - 3))
    return -(-context_len // step) * step


def _make_group(batch: Batch, blocks: KvBlocks, rows: list[int], length: int, tokens: torch.Tensor | slice) -> _Group:
    g = blocks.geometry
    context_lens = [batch.context_lens[row] for row in rows]
    num_blocks = -(-length // g.block_size)
    padded_len = num_blocks * g.block_size
    device = batch.block_tables.device
    tables = batch.block_tables[rows, :num_blocks].long()
    if tables.shape[1] < num_blocks:  # the table is as wide as the batch needs, the bucket may be wider
        tables = functional.pad(tables, (0, num_blocks - tables.shape[1]))
    index = blocks.gather_index(tables)
    hidden = stale = None
    if min(context_lens) < padded_len:
        hidden = torch.arange(padded_len, device=device) >= torch.tensor(context_lens, device=device)[:, None]
        stale = hidden[:, None].expand(-1, g.num_kv_heads, -1).flatten().nonzero()[:, 0]
    query_len = batch.query_lens[rows[0]]
    return _Group(tokens, len(rows), query_len, context_lens, padded_len, index, hidden, stale)


def _attend_decode(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: _Group, options: AttentionOptions
) -> torch.Tensor:
    """One query token per row: (rows, heads, head_dim) over (rows * kv_heads, padded_len, head_dim)."""
    num_rows, num_heads, head_dim = query.shape
    per_kv_head = num_heads * num_rows // key.shape[0]
    scale = options.scale or 1 / math.sqrt(head_dim)
    scores = torch.bmm(query.reshape(-1, per_kv_head, head_dim), key.transpose(1, 2))
    scores = scores.view(num_rows, num_heads, group.padded_len).float().mul_(scale)
    hidden = _decode_hidden(group, options.window)
    if hidden is not None:
        scores.masked_fill_(hidden[:, None, :], -math.inf)
    weights = torch.softmax(scores, dim=-1).to(query.dtype)
    out = torch.bmm(weights.view(-1, per_kv_head, group.padded_len), value)
    return out.view(num_rows, num_heads * head_dim)


def _decode_hidden(group: _Group, window: int | None) -> torch.Tensor | None:
    if window is None or max(group.context_lens) <= window:
        return group.hidden
    if (window, 0) not in group.masks:
        device = group.index.device
        first = torch.tensor(group.context_lens, device=device)[:, None] - window
        outside = torch.arange(group.padded_len, device=device) < first
        group.masks[window, 0] = outside if group.hidden is None else outside | group.hidden
    return group.masks[window, 0]


def _attend_chunk(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: _Group, options: AttentionOptions
) -> torch.Tensor:
    """Several query tokens of one row: (query_len, heads, head_dim) over (kv_heads, padded_len, head_dim).

    In pieces of some 100 queries, each against the keys it may see: the kernel computes masked scores too, and half of
    a square of scores is masked. The query heads of a KV head are rows of one matrix here as well.
    """
    query_len, num_heads, head_dim = query.shape
    before = group.context_lens[0] - query_len
    kv_heads = key.shape[0]
    out = torch.empty(query_len, num_heads, head_dim, dtype=query.dtype, device=query.device)
    for start in range(0, query_len, _PIECE):
        end = min(start + _PIECE, query_len)
        rows = query[start:end].transpose(0, 1).reshape(1, kv_heads, -1, head_dim)
        seen = before + end  # keys beyond are not even read, so nothing can leak from there
        mask = _chunk_mask(group, (start, end), num_heads // kv_heads, options.window, query.dtype)
        attended = functional.scaled_dot_product_attention(
            rows, key[None, :, :seen], value[None, :, :seen], mask, scale=options.scale
        )
        out[start:end] = attended.view(num_heads, end - start, head_dim).transpose(0, 1)
    return out.view(query_len, num_heads * head_dim)


def _chunk_mask(
    group: _Group, piece: tuple[int, int], repeats: int, window: int | None, dtype: torch.dtype
) -> torch.Tensor:
    """Additive mask of a piece of the queries, causal at the bottom right, once per query head of a KV head."""
    start, end = piece
    key = (window, start)
    if key not in group.masks:
        before = group.context_lens[0] - group.query_len
        device = group.index.device
        key_pos = torch.arange(before + end, device=device)
        query_pos = torch.arange(before + start, before + end, device=device)[:, None]
        hidden = key_pos > query_pos
        if window is not None:
            hidden |= key_pos <= query_pos - window
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
        group.masks[key] = mask.masked_fill_(hidden, -math.inf).repeat(repeats, 1)
    return group.masks[key]
