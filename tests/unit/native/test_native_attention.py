"""The compiled attention: shared prefixes, and that the bits of a row depend on the row alone."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from executor_svc.attention import native
from executor_svc.attention.base import AttentionOptions
from executor_svc.attention.native import NativeBackend, NativeStep
from executor_svc.batch import Batch
from executor_svc.native.library import TILE, load, open_library
from tests.unit.models.backends import NAMES, make_backend
from tests.unit.models.test_model_prefixes import DIM, HEADS, KV_HEADS, Case, Spec, make_case
from tests.unit.native.builds import build

WIDE = "wide"
"""16 floats to a vector and products of bf16 pairs, as on CPUs with AVX-512 BF16, on any CPU."""


@pytest.fixture(params=[*(name for name in NAMES if name != "sdpa"), WIDE])
def backend(request: pytest.FixtureRequest) -> NativeBackend:
    if request.param == WIDE:
        return NativeBackend(open_library(build("-O2", "-DVW=16", "-DPM_EMULATE_DOT")))
    made = make_backend(request.param)
    assert isinstance(made, NativeBackend)
    return made


@pytest.fixture(autouse=True)
def _any_prefix_pays() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "PREFIX_COST", 0)
        yield


def begin(backend: NativeBackend, case: Case, batch: Batch | None = None) -> NativeStep:
    return backend.begin(batch or case.batch, case.pool)


def attend(
    backend: NativeBackend, case: Case, options: AttentionOptions | None = None, threads: int = 2
) -> torch.Tensor:
    """With the batch's keys and values written, by this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        step = begin(backend, case)
        step.write(0, case.kv)
        return step.attend(0, case.query, options or AttentionOptions())
    finally:
        torch.set_num_threads(before)


def num_grouped(step: NativeStep) -> int:
    """Tokens times KV heads that begin with what a group has computed."""
    plan = step._plan(HEADS, windowed=False)
    return sum(i.num_tokens for i in plan._items if i.flags & 1)


BLOCK = 16
SHARING = [
    Spec(1, 400),
    Spec(1, 300, 0, 17),  # one block more than two tiles
    Spec(5, 277, 0, 17),  # begins where the shared blocks end
    Spec(40, 400, 0, 20),
    Spec(130, 500, 0, 16),
    Spec(1, 257, 0, 16),  # one position of its own
    Spec(7, 20),
    Spec(1, 3000),
    Spec(1, 2500, 7, 150),
    Spec(1, 9),
]


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shared_prefixes_equal_dense_attention(
    backend: NativeBackend, kv_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    case = make_case(SHARING, block_size=BLOCK, dtype=dtype, kv_dtype=kv_dtype)
    assert num_grouped(begin(backend, case)) == KV_HEADS * (1 + 1 + 5 + 40 + 130 + 1 + 1 + 1)
    bound = 4e-6 if dtype == kv_dtype == torch.float32 or (dtype, kv_dtype) == (torch.float32, torch.int8) else 0.04
    for threads in (1, 2, 7):
        assert case.error(attend(backend, case, threads=threads)) < bound


@pytest.mark.parametrize("window", [1, 100, 128, 129, 2999, 5000])
def test_windows_over_many_tiles(backend: NativeBackend, window: int) -> None:
    options = AttentionOptions(scale=0.2, window=window)
    case = make_case([Spec(1, 3000), Spec(200, 700), Spec(3, 3)], block_size=BLOCK)
    assert case.error(attend(backend, case, options), options) < 4e-6


def sole_row(backend: NativeBackend, case: Case, row: int, new: int, threads: int) -> torch.Tensor:
    """The result of one row's last `new` tokens in a batch of their own; its keys and values are in the pool."""
    batch = case.batch
    end = sum(batch.query_lens[: row + 1])
    part = slice(end - new, end)
    alone = Batch(
        batch.token_ids[part],
        batch.positions[part],
        batch.slot_mapping[part],
        [new],
        [batch.context_lens[row]],
        batch.block_tables[row : row + 1].contiguous(),
        [],
    )
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return begin(backend, case, alone).attend(0, case.query[part])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_of_a_row_are_its_own(
    backend: NativeBackend, dtype: torch.dtype, kv_dtype: torch.dtype | None
) -> None:
    """Alone or not, sharing blocks or not, its context in one piece or several, token by token or as a chunk."""
    case = make_case(SHARING, block_size=BLOCK, dtype=dtype, kv_dtype=kv_dtype)
    together = attend(backend, case)
    assert together.isfinite().all()
    for threads in (1, 2, 7):
        assert torch.equal(attend(backend, case, threads=threads), together)
    ends = torch.tensor(case.batch.query_lens).cumsum(0).tolist()
    for row, (end, new) in enumerate(zip(ends, case.batch.query_lens, strict=True)):
        for threads, last in ((2, new), (5, 1), (1, (new + 1) // 2)):
            assert torch.equal(sole_row(backend, case, row, last, threads), together[end - last : end]), (row, last)


def test_a_long_context_is_cut_among_threads(backend: NativeBackend) -> None:
    """Or the test above proves less than it says."""
    case = make_case([Spec(1, 3000)], block_size=BLOCK)
    torch.set_num_threads(4)
    plan = begin(backend, case)._plan(HEADS, windowed=False)
    torch.set_num_threads(2)
    items = plan._items[: plan.call.plan.contents.num_items]
    assert [i.num_tiles for i in items if i.flags == 16] == [-(-3000 // TILE)] * KV_HEADS
    assert sum(i.num_tiles for i in items if i.flags == 8) == -(-3000 // TILE) * KV_HEADS
    assert len(items) >= 4 * KV_HEADS


def test_nan_stays_where_it_belongs(backend: NativeBackend) -> None:
    """In a row of its own, in blocks that rows share, and in the keys of one tile among many."""
    case = make_case(SHARING, block_size=BLOCK)
    clean = attend(backend, case)
    case.kv[1] = math.nan
    out = attend(backend, case)
    assert out[1].isnan().all()
    rest = [i for i in range(len(out)) if i != 1]
    assert torch.equal(out[rest], clean[rest])
    case = make_case(SHARING, block_size=BLOCK)
    case.pool.blocks.values[int(case.batch.block_tables[7, 60]), 0, 0] = math.nan
    out = attend(backend, case)
    long = len(out) - 3
    assert out[long : long + 2].isnan().all()
    assert out[:long].isfinite().all()
    assert out[long + 2].isfinite().all()


@pytest.mark.parametrize("factor", [1e-4, 60.0, 3e3])
def test_scores_of_any_size_merge(backend: NativeBackend, factor: float) -> None:
    case = make_case(SHARING, block_size=BLOCK)
    case.query.mul_(factor)
    parts = torch.split(case.query, case.batch.query_lens)
    case.rows = [(part, *row[1:]) for part, row in zip(parts, case.rows, strict=True)]
    out = attend(backend, case)
    assert out.isfinite().all()
    assert case.error(out) < 5e-6 * max(1, factor)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Spec], int]:
    """Rows of which each may share with any earlier one, around the borders of tiles."""
    block_size = draw(st.sampled_from([1, 3, 16, 64, 200]))
    rows: list[Spec] = []
    for _ in range(draw(st.integers(1, 6))):
        new = draw(st.sampled_from([1, 1, 1, 2, 33, 130]))
        like = draw(st.integers(0, max(0, len(rows) - 1)))
        most = rows[like].context // block_size if rows else 0
        shared = draw(st.sampled_from([0, most, most // 2]))
        rest = draw(st.sampled_from([0, 1, 70, 126, 127, 128, 300, 1100]))
        rows.append(Spec(new, shared * block_size + rest + new, like, shared))
    return rows, block_size


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches(), st.integers(0, 1000), st.sampled_from([torch.float32, torch.int8]), st.sampled_from([1, 2, 16]))
def test_any_batch(
    backend: NativeBackend, drawn: tuple[list[Spec], int], seed: int, kv_dtype: torch.dtype, threads: int
) -> None:
    rows, block_size = drawn
    case = make_case(rows, block_size=block_size, kv_dtype=kv_dtype, seed=seed)
    together = attend(backend, case, threads=threads)
    assert case.error(together) < 4e-6
    last = len(rows) - 1
    assert torch.equal(sole_row(backend, case, last, 1, 2), together[-1:])


def test_a_query_may_lie_in_memory_in_any_order(backend: NativeBackend) -> None:
    """As transformers hands it over, heads first."""
    case = make_case(SHARING, block_size=BLOCK)
    usual = attend(backend, case)
    case.query = case.query.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(attend(backend, case), usual)


def test_layers_with_and_without_a_window_take_turns(backend: NativeBackend) -> None:
    """As in Gemma. The second plan of a step needs a larger workspace than the first; neither may be freed."""
    case = make_case([Spec(1, 6000), Spec(1, 300), *[Spec(1, 300, 1, 16)] * 4], block_size=BLOCK)
    windowed = AttentionOptions(window=1000)
    torch.set_num_threads(4)
    try:
        fresh = NativeBackend(backend._library)  # with an empty workspace
        step = begin(fresh, case)
        step.write(0, case.kv)
        first = step.attend(0, case.query, windowed)
        assert case.error(step.attend(0, case.query)) < 4e-6
        plans = [step._plan(HEADS, windowed=True), step._plan(HEADS, windowed=False)]
        needs = [plan.call.plan.contents.workspace_floats for plan in plans]
        assert 0 < needs[0] < needs[1]
        for plan, need in zip(plans, needs, strict=True):
            assert plan._memory.data_ptr() == plan.call.workspace
            assert plan._memory.numel() >= need
        others = [torch.zeros(need) for need in needs for _ in range(8)]  # would take what was freed
        assert torch.equal(step.attend(0, case.query, windowed), first)
        assert not any(other.any() for other in others)
    finally:
        torch.set_num_threads(2)


def test_one_openmp_for_torch_and_the_kernels() -> None:
    """Two would each start a team of threads on the same cores."""
    torch.set_num_threads(3)
    seen = load().num_threads()
    torch.set_num_threads(2)
    assert (seen, load().num_threads()) == (3, 2)
    assert DIM % 16 == 0
