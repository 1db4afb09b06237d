"""Attention by the compiled kernels: blocks are read where they lie, whatever their size and type.

The kernels do one batch in one call per layer: decode rows and chunks of prompts, the query heads of a KV head as the
rows of one matrix. Blocks that several rows begin with are read once for all of them (`prefixes`). A context is cut
into tiles of `TILE` positions that are added up in order, so the bits of a result depend on nothing but its own row:
not on the neighbours, not on shared blocks, not on how a prompt was cut or on the number of threads.
"""

from __future__ import annotations

import ctypes
import math
from itertools import accumulate, chain

import numpy as np
import torch
from numpy.typing import NDArray

from executor_svc.attention.base import FULL, AttentionOptions
from executor_svc.attention.prefixes import Prefix, find_prefixes
from executor_svc.attention.rotation import HeadNorms, Rotation
from executor_svc.batch import Batch
from executor_svc.kv.geometry import KvGeometry
from executor_svc.kv.layout import Workspace
from executor_svc.kv.pool import KvPool
from executor_svc.native import library as native

Int32s = NDArray[np.int32]

PREFIX_COST = 256
"""Positions that sharing must save to be worth a second round of work."""


class NativeBackend:
    """`AttentionBackend` by `executor_svc.native`; see the module."""

    name = "native"
    batch_invariant = True

    def __init__(self, library: native.Library) -> None:
        self._library = library
        self._workspace = Workspace()

    def refusal(self, geometry: KvGeometry) -> str | None:
        """As `AttentionBackend.refusal`: any block size; float32, bfloat16 or int8; heads of a multiple of 16."""
        if geometry.dtype not in native.CODES:
            return f"attention backend native: KV dtype {geometry.dtype} is none of float32, bfloat16 and int8"
        if geometry.head_dim % 16:
            return f"attention backend native: head size {geometry.head_dim} is not a multiple of 16"
        return None

    def begin(self, batch: Batch, pool: KvPool) -> NativeStep:
        """As `AttentionBackend.begin`."""
        return NativeStep(self._library, batch, pool, self._workspace)


class NativeStep:
    """`AttentionStep` of `NativeBackend`. Holds every array that the kernels' structures point to."""

    def __init__(self, library: native.Library, batch: Batch, pool: KvPool, workspace: Workspace) -> None:
        g = pool.geometry
        self._library = library
        self._batch = batch
        self._memory = pool
        self._workspace = workspace
        self._store_index: torch.Tensor | None = None
        self._starts = np.fromiter(accumulate(batch.query_lens, initial=0), np.int32, len(batch.query_lens) + 1)
        self._lens = np.array(batch.context_lens, np.int32)
        self._tables: Int32s = np.ascontiguousarray(batch.block_tables.numpy())
        self._pool = native.Pool(
            pool.block_bytes().ctypes.data,
            g.bytes_per_block,
            g.num_vectors * g.head_dim,
            g.num_layers,
            g.num_kv_heads,
            g.block_size,
            g.head_dim,
            native.CODES[g.dtype],
        )
        self._longest = max(batch.context_lens)
        self._rope = native.Rope(ctypes.pointer(self._pool))
        self._whole: _Plan | None = None
        self._shared: _Plan | None = None

    def write(self, layer: int, kv: torch.Tensor) -> None:
        """As `AttentionStep.write`."""
        if self._store_index is None:
            self._store_index = self._memory.blocks.store_index(self._batch.slot_mapping)
        self._memory.blocks.store(layer, self._store_index, kv)

    def rotate_and_write(
        self, layer: int, heads: torch.Tensor, rotation: Rotation, norms: HeadNorms | None
    ) -> torch.Tensor:
        """As `AttentionStep.rotate_and_write`; the queries are a view."""
        rope = self.rope(heads, rotation)
        rope.layer = layer
        if norms is not None:
            rope.query_norm, rope.key_norm, rope.eps = norms.query.data_ptr(), norms.key.data_ptr(), norms.eps
        self._library.rope_store(ctypes.byref(rope))
        return heads[:, : rope.num_heads]

    def rope(self, heads: torch.Tensor, rotation: Rotation) -> native.Rope:
        """`pm_rope` of any layer, without norms. There is one of them, which the next call changes."""
        rope = self._rope
        rope.heads, rope.stride = heads.data_ptr(), heads.stride(0)
        rope.dtype, rope.num_tokens = native.CODES[heads.dtype], heads.shape[0]
        rope.num_heads = heads.shape[1] - 2 * self._pool.num_kv_heads
        rope.cos, rope.sin = rotation.cos.data_ptr(), rotation.sin.data_ptr()
        rope.positions, rope.slots = rotation.positions.data_ptr(), self._batch.slot_mapping.data_ptr()
        rope.query_norm = rope.key_norm = None
        return rope

    def attend(self, layer: int, query: torch.Tensor, options: AttentionOptions = FULL) -> torch.Tensor:
        """As `AttentionStep.attend`."""
        num_tokens, num_heads, head_dim = query.shape
        if query.stride(2) != 1 or query.stride(1) != head_dim:
            query = query.contiguous()
        out = torch.empty(num_tokens, num_heads * head_dim, dtype=query.dtype)
        call = self.attention(query, out, options)
        call.layer = layer
        if self._library.attend(ctypes.byref(call)) != 0:
            raise MemoryError("no memory for the attention kernels' buffers")
        return out

    def attention(self, query: torch.Tensor, out: torch.Tensor, options: AttentionOptions) -> native.Attention:
        """`pm_attention` of any layer. There are two of them, with a window within the contexts and without, which the
        next call changes. Heads of a query lie one behind the other."""
        _, num_heads, head_dim = query.shape
        window = options.window if options.window is not None and options.window < self._longest else 0
        call = self._plan(num_heads, bool(window)).call
        call.query, call.out, call.query_stride = query.data_ptr(), out.data_ptr(), query.stride(0)
        call.query_dtype, call.window = native.CODES[query.dtype], window
        call.scale = options.scale or 1 / math.sqrt(head_dim)
        return call

    def _plan(self, num_heads: int, windowed: bool) -> _Plan:
        """Made when the first layer asks. Under a window rows see different parts of a prefix: it is not shared."""
        if windowed:
            self._whole = self._whole or self._make_plan(num_heads, [])
            return self._whole
        if self._shared is None:
            size = self._pool.block_size
            before = self._lens.astype(np.int64) - self._batch.query_lens
            self._shared = self._make_plan(
                num_heads, find_prefixes(self._tables, before // size, -(-PREFIX_COST // size))
            )
        return self._shared

    def _make_plan(self, num_heads: int, prefixes: list[Prefix]) -> _Plan:
        rows = native.Rows(
            len(self._lens),
            self._tables.shape[1],
            num_heads,
            self._starts.ctypes.data,
            self._lens.ctypes.data,
            self._tables.ctypes.data,
        )
        groups = _Groups(prefixes, self._starts, self._pool.block_size)
        num_tokens = int(self._starts[-1])
        return _Plan(self._library, self._pool, rows, groups, num_tokens=num_tokens, workspace=self._workspace)


class _Groups:
    """`pm_groups` of these prefixes, each cut to whole tiles."""

    def __init__(self, prefixes: list[Prefix], starts: Int32s, block_size: int) -> None:
        lens = [prefix.num_blocks * block_size // native.TILE * native.TILE for prefix in prefixes]
        used = [(prefix.rows, length) for prefix, length in zip(prefixes, lens, strict=True) if length]
        tokens = [list(chain.from_iterable(range(starts[r], starts[r + 1]) for r in rows)) for rows, _ in used]
        self._starts = np.fromiter(accumulate(map(len, tokens), initial=0), np.int32, len(used) + 1)
        self._tokens = np.fromiter(chain.from_iterable(tokens), np.int32)
        self._lens = np.array([length for _, length in used], np.int32)
        self._rows = np.array([rows[0] for rows, _ in used], np.int32)
        self._shared_lens = np.zeros(len(starts) - 1, np.int32)
        for rows, length in used:
            self._shared_lens[rows] = length
        self.struct = native.Groups(
            len(used),
            *(x.ctypes.data for x in (self._starts, self._tokens, self._lens, self._rows, self._shared_lens)),
        )


class _Plan:
    """`pm_plan` of a batch, and the call that every layer makes with it."""

    def __init__(
        self,
        library: native.Library,
        pool: native.Pool,
        rows: native.Rows,
        groups: _Groups,
        *,
        num_tokens: int,
        workspace: Workspace,
    ) -> None:
        threads = library.num_threads()
        # At most one item per token and KV head in a row and in a group; pieces of those that are cut beside them.
        capacity = (2 * num_tokens + 64 * threads) * pool.num_kv_heads
        self._items = (native.Item * capacity)()
        self._groups = groups
        plan = native.Plan(ctypes.addressof(self._items), capacity)
        done = library.plan_attention(
            ctypes.byref(pool), ctypes.byref(rows), ctypes.byref(groups.struct), threads, ctypes.byref(plan)
        )
        if done != 0:
            raise RuntimeError("the attention plan exceeds its bound")
        # Held here too: another plan of the same step may need a larger workspace, which would free this one's memory.
        self._memory = memory = workspace.take((max(1, plan.workspace_floats),), torch.empty(0))
        self.call = native.Attention(
            ctypes.pointer(pool),
            ctypes.pointer(rows),
            ctypes.pointer(groups.struct),
            ctypes.pointer(plan),
            memory.data_ptr(),
            num_tokens=num_tokens,
        )
