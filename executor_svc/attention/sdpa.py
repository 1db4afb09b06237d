"""Reference attention in plain torch, on any device torch runs on: gather blocks, then dense attention.

Every other backend is tested against this one. It also serves where the compiled kernels were not built or refuse a
model, so it is written for speed where that costs no clarity. Per layer and group of rows, `KvBlocks.gather` puts keys
and values of whole blocks side by side, padded to the longest, in the query's type whatever the blocks hold; then

* decode rows: the query heads of a KV head are the rows of one small matrix, two `bmm` and a softmax. Rows are grouped
  by context length so that little is padded. `enable_gqa` instead reads the KV memory at 1.4 GB/s (measured; bmm: 20).
  Scores are rounded to the query's dtype before the softmax in float32; in bfloat16 SmolLM2's logits err by 2 to 4 % of
  their spread either way, as transformers' own do (rounded 1.7 to 3.5 %, unrounded 2.0 to 3.4 %, measured).
* chunks: `scaled_dot_product_attention` per row, causal at the bottom right.
* rows whose tables begin with the same blocks (`prefixes`): those blocks are gathered once, and all tokens of all the
  rows attend to them as one matrix, without a mask. What follows is attended to row by row as above, and the two parts
  are put together by the sums of their exponentials: softmax over A and B is softmax over A and softmax over B,
  weighted by those sums. Not under a sliding window that cuts a context: there the rows see different parts.

Positions beyond a row's context may hold anything (a freed block's old bytes, NaN): scores there are replaced by -inf,
which NaN does not survive, and values there by zero, since 0 * NaN would be NaN.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch.nn import functional

from executor_svc.attention.base import FULL, AttentionOptions
from executor_svc.attention.rotation import HeadNorms, Rotation, rotate_heads
from executor_svc.attention.row_groups import Part, RowGroup, by_prefix, without_prefixes
from executor_svc.batch import Batch
from executor_svc.kv.geometry import KvGeometry
from executor_svc.kv.layout import KvBlocks
from executor_svc.kv.pool import KvPool

_PIECE = 128
"""Queries of a chunk computed at once; 128 is 1.4 to 1.6 x faster than 512 on a prompt of 512."""
_MAX_SCORES = 300_000
"""Scores against a prefix computed at once, over all heads: in float32 what two cores' second-level caches hold. With
twice as many a score costs 2 x, with 16 times as many 3 x (measured; `scaled_dot_product_attention` stays at 1.3 x)."""


class SdpaBackend:
    """`AttentionBackend` by gathering blocks; see the module."""

    name = "sdpa"
    batch_invariant = False

    def refusal(self, geometry: KvGeometry) -> str | None:
        """As `AttentionBackend.refusal`: any block size, head size and type of which there are blocks."""
        if geometry.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.int8):
            return f"attention backend sdpa: KV dtype {geometry.dtype} is neither int8 nor a floating point type"
        return None

    def begin(self, batch: Batch, pool: KvPool) -> SdpaStep:
        """As `AttentionBackend.begin`."""
        return SdpaStep(batch, pool.blocks)


class SdpaStep:
    """`AttentionStep` of `SdpaBackend`."""

    def __init__(self, batch: Batch, blocks: KvBlocks) -> None:
        self._batch = batch
        self._blocks = blocks
        self._store_index = blocks.store_index(batch.slot_mapping)
        self._longest = max(batch.context_lens)
        self._whole: list[Part] | None = None
        self._split: list[Part] | None = None

    def write(self, layer: int, kv: torch.Tensor) -> None:
        """As `AttentionStep.write`."""
        self._blocks.store(layer, self._store_index, kv)

    def rotate_and_write(
        self, layer: int, heads: torch.Tensor, rotation: Rotation, norms: HeadNorms | None
    ) -> torch.Tensor:
        """As `AttentionStep.rotate_and_write`."""
        query, kv = rotate_heads(heads, self._blocks.geometry.num_kv_heads, rotation, norms)
        self.write(layer, kv)
        return query

    def attend(self, layer: int, query: torch.Tensor, options: AttentionOptions = FULL) -> torch.Tensor:
        """As `AttentionStep.attend`."""
        out = torch.empty(query.shape[0], query.shape[1] * query.shape[2], dtype=query.dtype, device=query.device)
        for part in self._parts(options.window):
            rows = query[part.tokens]
            attended = self._attend_whole if part.shared is None else self._attend_split
            out[part.tokens] = attended(layer, part, rows, options).view(rows.shape[0], -1)
        return out

    def _parts(self, window: int | None) -> list[Part]:
        """Made when the first layer asks: a model may slide its window in some layers, in all or in none."""
        if window is not None and window < self._longest:
            self._whole = self._whole or without_prefixes(self._batch, self._blocks)
            return self._whole
        self._split = self._split or by_prefix(self._batch, self._blocks)
        return self._split

    def _attend_whole(self, layer: int, part: Part, query: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        """Rows without a prefix: (tokens, heads, head_dim) in and out."""
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        for group in part.groups:
            key, value = self._gather(layer, group, query.dtype)
            compute = _attend_decode if group.query_len == 1 else _attend_chunk
            out[group.span] = compute(query[group.span], key, value, group, options)
        return out

    def _attend_split(self, layer: int, part: Part, query: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        """Rows with a prefix: (tokens, heads, head_dim) in and out."""
        assert part.shared is not None
        scale = _scale(query, options)
        key, value = self._blocks.gather(layer, part.shared, 1, query.dtype)
        shared = _attend_prefix(query, key, value, scale)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        for group in part.groups:
            key, value = self._gather(layer, group, query.dtype)
            compute = _decode_partial if group.query_len == 1 else _chunk_partial
            own = compute(query[group.span], key, value, group, scale)
            out[group.span] = _merge(own, _Partial(shared.out[group.span], shared.log_sum[group.span]))
        return out

    def _gather(self, layer: int, group: RowGroup, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (rows * kv_heads, padded_len, head_dim) of a group, values zero beyond the contexts."""
        key, value = self._blocks.gather(layer, group.index, group.num_rows, dtype)
        if group.stale is not None:
            value.view(-1, value.shape[-1]).index_fill_(0, group.stale, 0)
        return key, value


def _scale(query: torch.Tensor, options: AttentionOptions) -> float:
    return options.scale or 1 / math.sqrt(query.shape[-1])


def _attend_decode(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: RowGroup, options: AttentionOptions
) -> torch.Tensor:
    """One query token per row: (rows, heads, head_dim) over (rows * kv_heads, padded_len, head_dim)."""
    scores = _decode_scores(query, key, group, _scale(query, options), options.window)
    weights = torch.softmax(scores, dim=-1).to(query.dtype)
    return torch.bmm(weights.view(key.shape[0], -1, group.padded_len), value).view(query.shape)


def _decode_scores(
    query: torch.Tensor, key: torch.Tensor, group: RowGroup, scale: float, window: int | None
) -> torch.Tensor:
    """(rows, heads, padded_len) float32, -inf where a row sees nothing."""
    num_rows, num_heads, head_dim = query.shape
    scores = torch.bmm(query.reshape(key.shape[0], -1, head_dim), key.transpose(1, 2))
    scores = scores.view(num_rows, num_heads, group.padded_len).float().mul_(scale)
    hidden = group.decode_hidden(window)
    return scores if hidden is None else scores.masked_fill_(hidden[:, None, :], -math.inf)


def _attend_chunk(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: RowGroup, options: AttentionOptions
) -> torch.Tensor:
    """Several query tokens per row: (rows * query_len, heads, head_dim) over (rows * kv_heads, padded_len, head_dim).

    In pieces of some 100 queries, each against the keys it may see: the kernel computes masked scores too, and half of
    a square of scores is masked. The query heads of a KV head are rows of one matrix here as well.
    """
    rows = _by_kv_head(query, key, group)  # (rows * kv_heads, query heads of each, query_len, head_dim)
    out = torch.empty_like(rows)
    for start in range(0, group.query_len, _PIECE):
        end = min(start + _PIECE, group.query_len)
        mask = group.chunk_mask(start, end, rows.shape[1], options.window, query.dtype)
        seen = mask.shape[1]  # keys beyond are not even read, so nothing can leak from there
        piece = rows[:, :, start:end].reshape(1, rows.shape[0], -1, rows.shape[3])
        attended = functional.scaled_dot_product_attention(
            piece, key[None, :, :seen], value[None, :, :seen], mask, scale=options.scale
        )
        out[:, :, start:end] = attended.view(rows.shape[0], rows.shape[1], end - start, -1)
    return _by_token(out, query)


def _by_kv_head(query: torch.Tensor, key: torch.Tensor, group: RowGroup) -> torch.Tensor:
    """(rows * query_len, heads, head_dim) as (rows * kv_heads, heads of a KV head, query_len, head_dim), a view or not.

    A view where there is one row.
    """
    kv_heads = key.shape[0] // group.num_rows
    shape = (group.num_rows, group.query_len, kv_heads, -1, query.shape[-1])
    return query.reshape(shape).permute(0, 2, 3, 1, 4).flatten(0, 1)


def _by_token(x: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """What `_by_kv_head` made of the query (its last dimension may be another), in the query's order again."""
    num_tokens, num_heads, _ = query.shape
    query_len, heads = x.shape[2], x.shape[1]
    kv_heads = num_heads // heads
    return x.view(-1, kv_heads, heads, query_len, x.shape[3]).permute(0, 3, 1, 2, 4).reshape(num_tokens, num_heads, -1)


class _Partial(NamedTuple):
    """Attention over a part of the contexts, in float32."""

    out: torch.Tensor
    """(tokens, heads, head_dim): with weights that sum to 1 over this part."""
    log_sum: torch.Tensor
    """(tokens, heads, 1): logarithm of the sum of the exponentials of this part's scores."""


def _merge(a: _Partial, b: _Partial) -> torch.Tensor:
    """Attention over both parts, (tokens, heads, head_dim) float32."""
    return torch.lerp(a.out, b.out, torch.sigmoid(b.log_sum - a.log_sum))


def _weigh(scores: torch.Tensor, value: torch.Tensor) -> _Partial:
    """Of (batch, queries, keys) float32, which are overwritten, and (batch, keys, head_dim)."""
    top = scores.amax(-1, keepdim=True)
    weights = scores.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    return _Partial(torch.bmm(weights.to(value.dtype), value).float() / total, total.log() + top)


def _attend_prefix(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> _Partial:
    """All tokens over one prefix that each of them sees whole: (kv_heads, positions, head_dim)."""
    num_tokens, _, head_dim = query.shape
    kv_heads, length, _ = key.shape
    rows = query.reshape(num_tokens, kv_heads, -1, head_dim).transpose(0, 1).flatten(1, 2)
    step = max(16, _MAX_SCORES // (length * kv_heads))
    pieces = []
    for start in range(0, rows.shape[1], step):
        scores = torch.bmm(rows[:, start : start + step], key.transpose(1, 2)).float().mul_(scale)
        pieces.append(_weigh(scores, value))
    joined = (torch.cat(columns, 1) if len(pieces) > 1 else columns[0] for columns in zip(*pieces, strict=True))
    return _Partial(*(x.view(kv_heads, num_tokens, -1, x.shape[2]).transpose(0, 1).flatten(1, 2) for x in joined))


def _decode_partial(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: RowGroup, scale: float
) -> _Partial:
    """As `_attend_decode`, of what follows the prefix."""
    scores = _decode_scores(query, key, group, scale, None)
    own = _weigh(scores.view(key.shape[0], -1, group.padded_len), value)
    return _Partial(own.out.view(query.shape), own.log_sum.view(*query.shape[:2], 1))


def _chunk_partial(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: RowGroup, scale: float
) -> _Partial:
    """As `_attend_chunk`, of what follows the prefix."""
    rows = _by_kv_head(query, key, group)
    batch, heads, _, head_dim = rows.shape
    pieces = []
    for start in range(0, group.query_len, _PIECE):
        end = min(start + _PIECE, group.query_len)
        mask = group.chunk_mask(start, end, heads, None, torch.float32)
        seen = mask.shape[1]
        piece = rows[:, :, start:end].reshape(batch, -1, head_dim)
        scores = torch.bmm(piece, key[:, :seen].transpose(1, 2)).float().mul_(scale).add_(mask)
        pieces.append([x.view(batch, heads, end - start, -1) for x in _weigh(scores, value[:, :seen])])
    return _Partial(*(_by_token(torch.cat(columns, 2), query) for columns in zip(*pieces, strict=True)))
