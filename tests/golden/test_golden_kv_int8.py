"""int8 KV through whole models: near float32 KV, the same however the work is cut, plain bytes anywhere."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from bench.kv_quality import perplexity, predict
from executor_svc.kv import int8_blocks
from executor_svc.models.llama import LlamaModel
from executor_svc.models.transformers_model import TransformersModel
from executor_svc.runner import PagedRunner, load
from pagemill.model_files import read_model_info
from scheduler_svc.gateway import tokenizer
from tests.golden.golden_paged import Row, forward, greedy, new_rows
from tests.golden.test_golden_families import FOREIGN, NUM_OUTPUTS, OWN, make_model, prompts

FAMILIES = {**OWN, **FOREIGN}
CHOSEN = ["llama", "mistral_window", "qwen3", "gemma", "opt_offset_positions"]
NEAR = 0.03
"""Error of the logits relative to them, in root mean square: 3 layers of random weights. Measured: 0.002 to 0.011."""
ONE_STEP = 1e-3
"""What float32 rounding may do at most, by moving a number that lay between two steps. Measured: below 5e-7."""


def saved(name: str, path: Path) -> Path:
    make_model(path, *FAMILIES[name])
    return path


def runner_of(path: Path, kv_dtype: str) -> PagedRunner:
    return load(path, dtype="float32", kv_dtype=kv_dtype, block_size=4, num_threads=1)


def last_logits(runner: PagedRunner, ids: list[list[int]], *, seed: int, max_chunk: int = 1 << 30) -> torch.Tensor:
    rows = greedy(runner, ids, 1, seed=seed, max_chunk=max_chunk, keep_logits=True)
    return torch.stack([row.logits[0] for row in rows])


@pytest.mark.parametrize("name", CHOSEN)
def test_own_models_and_those_of_transformers_stay_near(name: str, tmp_path: Path) -> None:
    """Given the ids that float32 KV chose, so that one near-tie does not decide about all that follows."""
    path = saved(name, tmp_path)
    exact, coarse = runner_of(path, "float32"), runner_of(path, "int8")
    assert isinstance(coarse._model, LlamaModel if name in OWN else TransformersModel)
    assert coarse.bytes_per_block < 0.4 * exact.bytes_per_block
    given = [row.ids for row in greedy(exact, prompts(97), NUM_OUTPUTS)]
    expected = last_logits(exact, given, seed=1)
    found = last_logits(coarse, given, seed=2)
    error = float((found - expected).norm() / expected.norm())
    assert 0 < error < NEAR


@pytest.mark.parametrize("name", CHOSEN)
def test_chunks_and_neighbours_change_rounding_only(name: str, tmp_path: Path) -> None:
    """A token's bytes are its own. What differs between cuts is float32 rounding, which may move a number one step."""
    runner = runner_of(saved(name, tmp_path), "int8")
    whole = last_logits(runner, prompts(97), seed=0)
    for seed, max_chunk in ((1, 1), (2, 3), (3, 7)):
        cut = last_logits(runner, prompts(97), seed=seed, max_chunk=max_chunk)
        assert float((cut - whole).abs().max() / whole.abs().max()) < ONE_STEP


def moved(runner: PagedRunner, row: Row, to: list[int]) -> Row:
    """The row with its blocks' bytes copied elsewhere and the old ones overwritten with NaN."""
    blocks = runner.pool.block_bytes()
    blocks[to] = blocks[row.blocks]
    blocks[row.blocks] = 0xFF  # scales of ones are NaN
    return Row(list(row.ids), to, row.computed)


@pytest.mark.parametrize("name", ["llama", "gemma"])
@pytest.mark.parametrize("length", [1, 4, 5, 17, 50])
def test_bytes_copied_to_other_blocks_give_identical_logits(name: str, length: int, tmp_path: Path) -> None:
    """Partial blocks too; out and in as plain bytes, as by way of another tier, with nothing left at the old place."""
    runner = runner_of(saved(name, tmp_path), "int8")
    rng = random.Random(length)
    ids = [rng.randrange(97) for _ in range(length)]
    row, spare = new_rows(runner, [ids, ids], 2, rng)
    row.ids.append(int(forward(runner, [(row, length)]).argmax()))
    held = runner.pool.block_bytes()[row.blocks].copy()
    copy = moved(runner, row, spare.blocks)
    there = forward(runner, [(copy, 1)])
    runner.pool.block_bytes()[row.blocks] = held
    assert torch.equal(forward(runner, [(row, 1)]), there)


def test_a_nan_in_a_block_fails_its_row_only(tmp_path: Path) -> None:
    runner = runner_of(saved("llama", tmp_path), "int8")
    rows = new_rows(runner, [[5, 6, 7, 8, 9], [10, 11, 12]], 2, random.Random(0))
    for row, logits in zip(rows, forward(runner, [(row, len(row.ids)) for row in rows]), strict=True):
        row.ids.append(int(logits.argmax()))
    blocks = runner.pool.blocks
    kv = torch.full((1, 2, runner.geometry.num_kv_heads, runner.geometry.head_dim), float("nan"))
    blocks.store(1, blocks.store_index(torch.tensor([rows[0].blocks[0] * 4 + 2])), kv)
    bad, good = forward(runner, [(row, 1) for row in rows])
    assert bad.isnan().all()
    assert good.isfinite().all()


TEXT = """A block is a fixed number of token positions across all layers, keys and values together. The scheduler
decides which blocks a sequence may use, and the executor owns the bytes in them. When memory is short, the scheduler
chooses a victim and either lets its blocks be copied to the memory of the host or forgets them, in which case the
prompt and what has been generated so far are computed again later. Which of the two is cheaper depends on how fast
the machine copies and how fast it computes, so both are measured when the executor starts. Nobody who reads the
stream can tell the difference, except by the clock: the tokens are the same. A request that has waited for long is
not made to wait for ever, because those that came later cannot overtake it without end. If the executor dies, its
sequences go back to the queue and continue on the next one that says hello, and if the scheduler dies, the gateways
hand in their streams again, with the tokens that were already sent."""


@pytest.mark.model
@pytest.mark.timeout(300)
def test_perplexity_of_smollm2_stays_within_one_percent(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And would not with 4 bits, so the bound can fail. `bench.kv_quality` measures the same on a longer text."""
    ids = tokenizer.load(read_model_info(demo_model)).encode(TEXT, add_special_tokens=False)[:192]
    window = torch.tensor([ids])
    exact = perplexity(predict(load(demo_model, dtype="float32"), window))
    runner = load(demo_model, dtype="float32", kv_dtype="int8")
    ratio = perplexity(predict(runner, window)) / exact
    monkeypatch.setattr(int8_blocks, "_LARGEST", 7)
    coarse = load(demo_model, dtype="float32", kv_dtype="int8", attention="sdpa")  # the kernels do not look there
    ratio_of_4_bits = perplexity(predict(coarse, window)) / exact
    found = f"perplexity {exact:.4f}; int8 x {ratio:.5f}; 4 bits x {ratio_of_4_bits:.5f}"
    assert 0.99 <= ratio <= 1.01, found
    assert ratio_of_4_bits > 1.05, found
