"""Rows that share blocks: which prefixes are chosen, and that attending to them once changes no result."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from executor_svc.attention import row_groups, sdpa
from executor_svc.attention.base import AttentionOptions
from executor_svc.attention.prefixes import Prefix, find_prefixes
from executor_svc.attention.sdpa import SdpaBackend, SdpaStep
from executor_svc.batch import Batch
from executor_svc.kv.geometry import KvGeometry
from executor_svc.kv.pool import KvPool
from executor_svc.runner import PagedRunner, load
from tests.unit.modelfiles.gguf_writer import LLAMA_TENSORS, gguf, llama_metadata
from tests.unit.models.test_model_attention import dense, fill, restored

KV_HEADS, HEADS, DIM = 2, 6, 16


@dataclass(frozen=True)
class Spec:
    """A row of `new` tokens with `context`; `shared` blocks at its head are those of the earlier row `like`."""

    new: int
    context: int
    like: int = 0
    shared: int = 0


@dataclass
class Case:
    pool: KvPool
    batch: Batch
    query: torch.Tensor
    kv: torch.Tensor
    rows: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    """Query, keys and values of each row, as they can be read back."""

    def step(self) -> SdpaStep:
        step = SdpaBackend().begin(self.batch, self.pool)
        step.write(0, self.kv)
        return step

    def error(self, out: torch.Tensor, options: AttentionOptions | None = None) -> float:
        """The largest, against float64 row by row."""
        parts = torch.split(out, [row[0].shape[0] for row in self.rows])
        wanted = [dense(*row, options or AttentionOptions()) for row in self.rows]
        return max(float((a.double() - b).abs().max()) for a, b in zip(parts, wanted, strict=True))


def make_case(
    specs: list[Spec],
    *,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> Case:
    """Content beyond every context is NaN. Earlier positions are stored, new ones are left to `AttentionStep.write`."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    counts = [-(-s.context // block_size) for s in specs]
    pool = KvPool(KvGeometry(1, KV_HEADS, DIM, block_size, kv_dtype or dtype), sum(counts) + 2)
    fill(pool, math.nan)
    free = list(range(pool.num_blocks))
    rng.shuffle(free)
    tables: list[list[int]] = []
    contents: list[torch.Tensor] = []
    queries, new_kv, rows = [], [], []
    positions: list[int] = []
    slots: list[int] = []
    for spec, count in zip(specs, counts, strict=True):
        kv = torch.randn(spec.context, 2, KV_HEADS, DIM).to(dtype)
        table = [free.pop() for _ in range(count)]
        if spec.shared:
            assert spec.shared * block_size <= min(spec.context - spec.new, specs[spec.like].context)
            table[: spec.shared] = tables[spec.like][: spec.shared]
            kv[: spec.shared * block_size] = contents[spec.like][: spec.shared * block_size]
        tables.append(table)
        contents.append(kv)
        before = spec.context - spec.new
        where = [table[p // block_size] * block_size + p % block_size for p in range(spec.context)]
        stored = range(spec.shared * block_size, before)  # what is shared is written once, by the row that brought it
        if stored:
            index = pool.blocks.store_index(torch.tensor([where[p] for p in stored]))
            pool.blocks.store(0, index, kv[stored.start : stored.stop])
        new_kv.append(kv[before:])
        queries.append(torch.randn(spec.new, HEADS, DIM).to(dtype))
        positions += range(before, spec.context)
        slots += where[before:]
        readable = restored(kv) if kv_dtype == torch.int8 else kv
        rows.append((queries[-1], readable[:, 0], readable[:, 1]))
    width = max(counts)
    padded = torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32)
    batch = Batch(torch.zeros(len(slots), dtype=torch.int64), torch.tensor(positions), torch.tensor(slots),
                  [s.new for s in specs], [s.context for s in specs], padded, [])  # fmt: skip
    return Case(pool, batch, torch.cat(queries), torch.cat(new_kv), rows)


@pytest.fixture
def _any_prefix_pays() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_groups, "PREFIX_COST", 0)
        yield


def shared_lens(step: SdpaStep) -> list[int]:
    """Rows of each part that has a prefix."""
    return [sum(g.num_rows for g in part.groups) for part in step._parts(None) if part.shared is not None]


MIXED = [
    Spec(1, 33),
    Spec(1, 40, 0, 8),
    Spec(5, 37, 0, 8),  # begins where the shared part ends
    Spec(1, 33, 0, 8),  # one position of its own
    Spec(9, 60, 0, 8),
    Spec(9, 60, 0, 8),  # two chunks alike
    Spec(7, 20),  # alone
    Spec(1, 90),
    Spec(1, 95, 7, 22),  # another prefix
    Spec(130, 300, 7, 20),
    Spec(1, 9),
]


@pytest.mark.usefixtures("_any_prefix_pays")
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("most_scores", [300_000, 100])
def test_equals_dense_attention(kv_dtype: torch.dtype, most_scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa, "_MAX_SCORES", most_scores)
    case = make_case(MIXED, kv_dtype=kv_dtype)
    step = case.step()
    assert sorted(shared_lens(step)) == [3, 6]
    assert case.error(step.attend(0, case.query)) < 3e-6
    options = AttentionOptions(scale=0.3)
    assert case.error(step.attend(0, case.query, options), options) < 3e-6


@pytest.mark.usefixtures("_any_prefix_pays")
def test_equals_the_path_without_prefixes() -> None:
    case = make_case(MIXED)
    together = case.step().attend(0, case.query)
    row_groups.PREFIX_COST = 1 << 20
    step = case.step()
    assert not shared_lens(step)
    assert float((together - step.attend(0, case.query)).abs().max()) < 2e-6


@pytest.mark.usefixtures("_any_prefix_pays")
def test_a_query_may_lie_in_memory_in_any_order() -> None:
    """As transformers hands it over, heads first."""
    case = make_case(MIXED)
    heads_first = case.query.transpose(0, 1).contiguous().transpose(0, 1)
    for cost in (0, 1 << 20):
        row_groups.PREFIX_COST = cost
        assert case.error(case.step().attend(0, heads_first)) < 3e-6
    one_chunk = make_case([Spec(9, 20)])
    heads_first = one_chunk.query.transpose(0, 1).contiguous().transpose(0, 1)
    assert one_chunk.error(one_chunk.step().attend(0, heads_first)) < 3e-6


@pytest.mark.usefixtures("_any_prefix_pays")
def test_bfloat16_errs_by_its_rounding_only() -> None:
    for kv_dtype in (torch.bfloat16, torch.int8):
        case = make_case(MIXED, dtype=torch.bfloat16, kv_dtype=kv_dtype)
        assert case.error(case.step().attend(0, case.query)) < 0.04


@pytest.mark.usefixtures("_any_prefix_pays")
@pytest.mark.parametrize("window", [1, 30, 299, 300, 1000])
def test_a_window_that_cuts_a_context_goes_row_by_row(window: int) -> None:
    """And may alternate with full attention from layer to layer."""
    case = make_case(MIXED)
    step = case.step()
    options = AttentionOptions(window=window)
    for chosen in (options, AttentionOptions(), options):
        assert case.error(step.attend(0, case.query, chosen), chosen) < 3e-6


@pytest.mark.usefixtures("_any_prefix_pays")
def test_a_prefix_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rows share it, in what order they come; and each position after it once too, but for padding."""
    specs = [Spec(1, 321), *(Spec(1, 321 + i, 0, 80) for i in range(31))]
    case = make_case(specs)
    step = case.step()
    read = []
    gather = case.pool.blocks.gather

    def counted(layer: int, index: torch.Tensor, num_rows: int, dtype: torch.dtype) -> torch.Tensor:
        out = gather(layer, index, num_rows, dtype)
        read.append(out.shape[1] // KV_HEADS * out.shape[2])
        return out

    monkeypatch.setattr(case.pool.blocks, "gather", counted)
    assert case.error(step.attend(0, case.query)) < 3e-6
    assert read == [320, 32 * 64]


def test_short_prefixes_are_left_alone() -> None:
    """One of n rows pays if n - 1 times its positions exceed the cost of a part of its own."""
    border = row_groups.PREFIX_COST // 4
    for shared, pays in ((border, False), (border + 1, True)):
        case = make_case([Spec(1, 4 * border + 9), Spec(1, 4 * border + 9, 0, shared)])
        assert shared_lens(case.step()) == ([2] if pays else [])


@pytest.mark.usefixtures("_any_prefix_pays")
def test_a_nan_in_a_row_of_its_own_stays_there_and_one_in_the_prefix_is_everyones() -> None:
    specs = [Spec(1, 35), Spec(1, 35, 0, 8), Spec(3, 36, 0, 8), Spec(1, 12)]
    case = make_case(specs)
    case.kv[1] = math.nan
    out = case.step().attend(0, case.query)
    assert out[1].isnan().all()
    assert out[[0, 2, 3, 4, 5]].isfinite().all()
    case = make_case(specs)
    case.pool.blocks.values[int(case.batch.block_tables[0, 3])] = math.nan
    out = case.step().attend(0, case.query)
    assert out[:5].isnan().all()
    assert out[5].isfinite().all()


@pytest.mark.usefixtures("_any_prefix_pays")
def test_scores_of_very_different_size_merge() -> None:
    """All weight on the prefix, all on what follows: neither overflows nor loses the other to 0 / 0."""
    for factor in (1e-4, 60.0, 3e3):
        case = make_case([Spec(1, 37), Spec(1, 37, 0, 8), Spec(4, 39, 0, 8)])
        case.query.mul_(factor)
        parts = torch.split(case.query, [1, 1, 4])
        case.rows = [(part, *row[1:]) for part, row in zip(parts, case.rows, strict=True)]
        out = case.step().attend(0, case.query)
        assert out.isfinite().all()
        assert case.error(out) < 3e-6 * max(1, factor)


@st.composite
def specs(draw: st.DrawFn) -> tuple[list[Spec], int]:
    """Rows of which each may share with any earlier one, which may still be computing what is shared."""
    block_size = draw(st.sampled_from([1, 2, 5, 16]))
    rows: list[Spec] = []
    for _ in range(draw(st.integers(1, 9))):
        new = draw(st.sampled_from([1, 1, 1, 2, 3, 17, 40]))
        like = draw(st.integers(0, max(0, len(rows) - 1)))
        most = rows[like].context // block_size if rows else 0
        shared = draw(st.integers(0, most))
        rest = draw(st.sampled_from([0, 0, 1, 7, 70]))
        rows.append(Spec(new, shared * block_size + rest + new, like, shared))
    return rows, block_size


@settings(max_examples=60, deadline=None)
@given(specs(), st.integers(0, 1000), st.sampled_from([torch.float32, torch.int8]), st.sampled_from([0, 8, 64]))
def test_any_batch(drawn: tuple[list[Spec], int], seed: int, kv_dtype: torch.dtype, cost: int) -> None:
    rows, block_size = drawn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_groups, "PREFIX_COST", cost)
        case = make_case(rows, block_size=block_size, kv_dtype=kv_dtype, seed=seed)
        assert case.error(case.step().attend(0, case.query)) < 4e-6


def test_nothing_is_shared() -> None:
    assert find_prefixes(np.array([[1, 2], [3, 4]], np.int32), np.array([2, 2]), 0) == []
    assert find_prefixes(np.array([[1, 2], [1, 4]], np.int32), np.array([0, 2]), 0) == []
    assert find_prefixes(np.zeros((1, 1), np.int32), np.array([1]), 0) == []


def test_a_row_that_shares_less_does_not_shorten_the_prefix_of_the_others() -> None:
    """Everyone has the system prompt, three a document after it, of which one is still computing the first block."""
    tables = np.array([[9, 1, 2, 3, 7], [9, 6, 0, 0, 0], [9, 1, 2, 3, 8], [9, 1, 2, 3, 5], [9, 4, 0, 0, 0]], np.int32)
    assert find_prefixes(tables, np.array([4, 2, 4, 1, 2]), 2) == [Prefix([0, 2], 4)]
    assert find_prefixes(tables, np.array([4, 2, 4, 4, 2]), 2) == [Prefix([0, 2, 3], 4)]
    assert find_prefixes(tables, np.array([4, 2, 4, 4, 2]), 0) == [Prefix([0, 2, 3], 4), Prefix([1, 4], 1)]


def brute_force(tables: list[tuple[int, ...]], cost: int) -> int:
    """The most that can be saved, by trying every way to cut the rows into groups."""
    if not tables:
        return 0
    first, *rest = tables
    best = brute_force(rest, cost)
    for size in range(1, len(rest) + 1):
        for others in itertools.combinations(range(len(rest)), size):
            group = [first, *(rest[i] for i in others)]
            depth = len(list(itertools.takewhile(lambda column: len(set(column)) == 1, zip(*group, strict=False))))
            left = [row for i, row in enumerate(rest) if i not in others]
            best = max(best, depth * size - cost + brute_force(left, cost))
    return best


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), max_size=4).map(tuple), min_size=1, max_size=6), st.integers(0, 4))
def test_prefixes_save_as_much_as_can_be_saved(heads: list[tuple[int, ...]], cost: int) -> None:
    """What lies beyond the blocks that may be shared is ignored, equal or not."""
    tables = np.zeros((len(heads), 5), np.int32)
    for row, head in enumerate(heads):
        tables[row, : len(head)] = head
    found = find_prefixes(tables, np.array([len(head) for head in heads]), cost)
    taken = [row for prefix in found for row in prefix.rows]
    assert len(taken) == len(set(taken))
    for prefix in found:
        assert len(prefix.rows) > 1
        assert prefix.num_blocks > 0
        assert len({heads[row][: prefix.num_blocks] for row in prefix.rows}) == 1
        assert all(len(heads[row]) >= prefix.num_blocks for row in prefix.rows)
    saved = sum((len(prefix.rows) - 1) * prefix.num_blocks - cost for prefix in found)
    assert saved == brute_force(heads, cost)


def test_many_rows_nest_deeply() -> None:
    """A staircase: each row has one block more in common with the next. No recursion that deep."""
    tables = np.where(np.arange(1000) < np.arange(1000)[:, None], 1, 5000 + np.arange(1000)[:, None]).astype(np.int32)
    found = find_prefixes(tables, np.full(1000, 1000), 0)
    assert sum((len(p.rows) - 1) * p.num_blocks for p in found) >= 499 * 500


def tiny(path: Path) -> PagedRunner:
    file = path / "tiny.gguf"
    file.write_bytes(gguf(llama_metadata(), LLAMA_TENSORS))
    runner = load(file, dtype="float32", block_size=4, num_threads=1)
    runner.allocate_kv(64)
    return runner


@pytest.mark.usefixtures("_any_prefix_pays")
def test_a_model_gives_the_same_logits_with_and_without_sharing(tmp_path: Path) -> None:
    """Decode rows and a chunk, once through blocks they share and once through copies of their own."""
    runner = tiny(tmp_path)
    prompt = [1, 2, 0, 1, 2, 2, 1, 0, 1]
    rows = [[*prompt, 2], [*prompt, 1], [*prompt, 0, 1, 2]]

    def run(tables: list[list[int]], spans: list[tuple[int, int, int]]) -> torch.Tensor:
        ids = [rows[row][p] for row, start, end in spans for p in range(start, end)]
        positions = [p for _, start, end in spans for p in range(start, end)]
        slots = [tables[row][p // 4] * 4 + p % 4 for row, start, end in spans for p in range(start, end)]
        return runner.forward(
            Batch(torch.tensor(ids) % runner.vocab_size, torch.tensor(positions), torch.tensor(slots),
                  [end - start for _, start, end in spans], [end for _, _, end in spans],
                  torch.tensor([tables[row] for row, _, _ in spans], dtype=torch.int32), list(range(len(spans))))
        )  # fmt: skip

    shared = [[3, 8, 5], [3, 8, 6], [3, 8, 7]]
    run(shared, [(0, 0, 9)])
    runner.pool.block_bytes()[[6, 7]] = runner.pool.block_bytes()[5]
    apart = [[20, 21, 22], [23, 24, 25], [26, 27, 28]]
    for table in apart:
        runner.pool.block_bytes()[table] = runner.pool.block_bytes()[shared[0]]
    last = [(0, 9, 10), (1, 9, 10), (2, 9, 12)]
    expected = run(apart, last)
    assert torch.allclose(run(shared, last), expected, rtol=1e-5, atol=1e-6)
