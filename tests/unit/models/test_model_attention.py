"""Every backend against dense attention written out in float64, over shapes, dtypes and poisoned memory.

The compiled kernels run once per instruction set that this CPU has.
"""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from executor_svc.attention import row_groups
from executor_svc.attention.base import AttentionBackend, AttentionOptions
from executor_svc.attention.native import NativeBackend
from executor_svc.batch import Batch
from executor_svc.kv.geometry import KvGeometry
from executor_svc.kv.int8_blocks import Int8Blocks, quantise
from executor_svc.kv.pool import KvPool
from tests.unit.models.backends import NAMES, make_backend

LAYERS = 2


@pytest.fixture(params=NAMES)
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    return make_backend(request.param)


def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
    """One row in float64: (new, heads, dim) against (context, kv_heads, dim), causal at the bottom right."""
    new, heads, dim = query.shape
    context, kv_heads = key.shape[:2]
    key = key.double().repeat_interleave(heads // kv_heads, 1)
    value = value.double().repeat_interleave(heads // kv_heads, 1)
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * (options.scale or 1 / math.sqrt(dim))
    position, seen = torch.arange(context - new, context)[:, None], torch.arange(context)
    hidden = seen > position
    if options.window is not None:
        hidden |= seen <= position - options.window
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value).reshape(new, heads * dim)


def run_case(
    backend: AttentionBackend,
    rows: list[tuple[int, int]],
    *,
    heads: int = 6,
    kv_heads: int = 2,
    dim: int = 16,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    options: AttentionOptions | None = None,
    poison: float = math.nan,
    seed: int = 0,
) -> float:
    """Largest error over all rows of (new, context) tokens; every slot not in use holds `poison`.

    The reference attends over what the blocks can hold: of int8, what `quantise` makes of a vector.
    """
    options = options or AttentionOptions()
    torch.manual_seed(seed)
    rng = random.Random(seed)
    counts = [-(-context // block_size) for _, context in rows]
    pool = KvPool(KvGeometry(LAYERS, kv_heads, dim, block_size, kv_dtype or dtype), sum(counts) + 2)
    fill(pool, poison)
    free = list(range(pool.num_blocks))
    rng.shuffle(free)
    tables = torch.zeros(len(rows), max(counts), dtype=torch.int32)
    keys, values, queries, new_kv = [], [], [], []
    positions: list[int] = []
    slots: list[int] = []
    for i, (new, context) in enumerate(rows):
        blocks = [free.pop() for _ in range(counts[i])]
        tables[i, : counts[i]] = torch.tensor(blocks, dtype=torch.int32)
        keys.append(torch.randn(context, kv_heads, dim).to(dtype))
        values.append(torch.randn(context, kv_heads, dim).to(dtype))
        earlier = [blocks[p // block_size] * block_size + p % block_size for p in range(context - new)]
        kv = torch.stack((keys[i], values[i]), 1)
        if earlier:
            pool.blocks.store(1, pool.blocks.store_index(torch.tensor(earlier)), kv[: len(earlier)])
        if kv_dtype == torch.int8:
            keys[i], values[i] = restored(kv).unbind(1)
        new_kv.append(kv[context - new :])
        queries.append(torch.randn(new, heads, dim).to(dtype))
        positions += range(context - new, context)
        slots += [blocks[p // block_size] * block_size + p % block_size for p in range(context - new, context)]
    batch = Batch(
        torch.zeros(len(slots), dtype=torch.int64),
        torch.tensor(positions),
        torch.tensor(slots),
        [new for new, _ in rows],
        [context for _, context in rows],
        tables,
        [],
    )
    assert backend.refusal(pool.geometry) is None
    step = backend.begin(batch, pool)
    step.write(1, torch.cat(new_kv))
    out = step.attend(1, torch.cat(queries), options)
    assert out.dtype == dtype
    assert out.shape == (len(slots), heads * dim)
    parts = torch.split(out, [new for new, _ in rows])
    errors = [
        (part.double() - dense(q, k, v, options)).abs().max()
        for part, q, k, v in zip(parts, queries, keys, values, strict=True)
    ]
    return max(float(e) for e in errors)


def fill(pool: KvPool, poison: float) -> None:
    """Every slot as after a request that went wrong: its values, or their scales, are `poison`."""
    if isinstance(pool.blocks, Int8Blocks):
        pool.blocks.scales.fill_(poison)
        pool.blocks.values.random_(-128, 128)
    else:
        pool.blocks.values.fill_(poison)


def restored(kv: torch.Tensor) -> torch.Tensor:
    """What int8 keeps of (…, head_dim)."""
    stored = quantise(kv)
    return stored.values.float() * stored.scales.float()[..., None]


MIXED = [(1, 1), (1, 5), (7, 7), (1, 64), (3, 20), (1, 17), (1, 130), (2, 2), (1, 4)]


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (5, 1)])
@pytest.mark.parametrize("dim", [8, 10, 16, 48, 64, 128])
@pytest.mark.parametrize("block_size", [1, 3, 16, 32])
def test_equals_dense_attention(
    backend: AttentionBackend, heads: int, kv_heads: int, dim: int, block_size: int
) -> None:
    if dim % 16 and isinstance(backend, NativeBackend):
        refusal = backend.refusal(KvGeometry(LAYERS, kv_heads, dim, block_size, torch.float32))
        assert refusal == f"attention backend native: head size {dim} is not a multiple of 16"
        return
    assert run_case(backend, MIXED, heads=heads, kv_heads=kv_heads, dim=dim, block_size=block_size) < 2e-6


@pytest.mark.parametrize("window", [1, 3, 16, 500])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_window_and_scale(backend: AttentionBackend, window: int, scale: float | None) -> None:
    assert run_case(backend, MIXED, options=AttentionOptions(scale, window)) < 2e-6


def test_chunks_longer_than_one_piece(backend: AttentionBackend) -> None:
    assert run_case(backend, [(300, 300), (129, 400), (128, 128)], block_size=16) < 2e-6
    assert run_case(backend, [(300, 340)], block_size=16, options=AttentionOptions(window=50)) < 2e-6


def test_large_groups_are_cut(backend: AttentionBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """However little may be gathered at once (by sdpa), down to less than one row."""
    for limit in (0, 20_000, 200_000):
        monkeypatch.setattr(row_groups, "MAX_GATHER_BYTES", limit)
        assert run_case(backend, [(1, 60 + i) for i in range(20)]) < 2e-6


def test_bfloat16_errs_by_its_rounding_only(backend: AttentionBackend) -> None:
    assert run_case(backend, MIXED, dtype=torch.bfloat16, dim=64, block_size=16) < 0.03


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slots_beyond_the_context_never_matter(backend: AttentionBackend, poison: float, dtype: torch.dtype) -> None:
    assert run_case(backend, MIXED, poison=poison, dtype=dtype) < (2e-6 if dtype == torch.float32 else 0.03)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (5, 1)])
@pytest.mark.parametrize("dim", [8, 10, 16, 48, 64, 128])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_int8_blocks_equal_dense_attention_over_what_they_hold(
    backend: AttentionBackend, heads: int, kv_heads: int, dim: int, block_size: int
) -> None:
    if dim % 16 and isinstance(backend, NativeBackend):
        return
    error = run_case(
        backend, MIXED, kv_dtype=torch.int8, heads=heads, kv_heads=kv_heads, dim=dim, block_size=block_size
    )
    assert error < 3e-6


@pytest.mark.parametrize("poison", [math.nan, math.inf, 3e38])
def test_int8_slots_beyond_the_context_never_matter(backend: AttentionBackend, poison: float) -> None:
    assert run_case(backend, MIXED, kv_dtype=torch.int8, poison=poison) < 3e-6
    assert run_case(backend, MIXED, kv_dtype=torch.int8, dtype=torch.bfloat16, poison=poison) < 0.04


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float32])
def test_blocks_of_another_type_than_the_model(backend: AttentionBackend, kv_dtype: torch.dtype) -> None:
    assert run_case(backend, MIXED, dtype=torch.float32, kv_dtype=kv_dtype) < (
        0.03 if kv_dtype == torch.bfloat16 else 3e-6
    )
    assert run_case(backend, MIXED, dtype=torch.bfloat16, kv_dtype=kv_dtype) < 0.03


def test_a_nan_row_does_not_reach_its_neighbours(backend: AttentionBackend) -> None:
    """Rows that share a gather: NaN in the context of one is its own affair (docs: one bad row fails that row only)."""
    torch.manual_seed(0)
    pool = KvPool(KvGeometry(1, 1, 16, 4, torch.float32), 4)
    pool.blocks.values.normal_()
    pool.blocks.values[2] = math.nan
    batch = Batch(torch.zeros(2, dtype=torch.int64), torch.tensor([3, 3]), torch.tensor([7, 11]), [1, 1], [4, 4],
                  torch.tensor([[1], [2]], dtype=torch.int32), [])  # fmt: skip
    out = backend.begin(batch, pool).attend(0, torch.randn(2, 2, 16))
    assert out[0].isfinite().all()
    assert out[1].isnan().all()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 150)), min_size=1, max_size=8),
    st.sampled_from([1, 2, 5, 16, 64]),
    st.integers(0, 1000),
)
def test_any_batch(backend: AttentionBackend, rows: list[tuple[int, int]], block_size: int, seed: int) -> None:
    assert run_case(backend, [(new, new + before) for new, before in rows], block_size=block_size, seed=seed) < 2e-6
