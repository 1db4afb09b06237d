"""int8 blocks: what they weigh, how near a number comes back, and that nothing that is not finite ever looks finite."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from executor_svc.attention.sdpa import SdpaBackend
from executor_svc.batch import Batch
from executor_svc.config import ExecutorSettings
from executor_svc.kv.geometry import KvGeometry
from executor_svc.kv.int8_blocks import Int8Blocks, quantise
from executor_svc.kv.pool import KvPool
from executor_svc.runner import PagedRunner, load
from executor_svc.startup import prepare
from tests.unit.modelfiles.gguf_writer import LLAMA_TENSORS, gguf, llama_metadata

GEOMETRY = KvGeometry(num_layers=2, num_kv_heads=3, head_dim=10, block_size=4, dtype=torch.int8)


def round_trip(
    kv: torch.Tensor, *, dtype: torch.dtype = torch.float32, geometry: KvGeometry = GEOMETRY
) -> torch.Tensor:
    """Store (tokens, 2, heads, dim) at scattered slots of layer 1 and gather it again, in the same order."""
    size = geometry.block_size
    count = -(-kv.shape[0] // size)
    pool = KvPool(geometry, count + 2)
    order = torch.randperm(pool.num_blocks)[:count]
    slots = (order[:, None] * size + torch.arange(size)).reshape(-1)[: kv.shape[0]]
    pool.blocks.store(1, pool.blocks.store_index(slots), kv)
    read = pool.blocks.gather(1, pool.blocks.gather_index(order[None]), 1, dtype)
    assert read.dtype == dtype
    return read[:, :, : kv.shape[0]].permute(2, 0, 1, 3).clone()


@pytest.mark.parametrize(
    ("layers", "heads", "dim", "expected", "of_bfloat16"),
    [
        (30, 3, 64, 190_080, 0.515625),  # SmolLM2-135M
        (26, 1, 256, 214_784, 0.5042067308),  # Gemma 3 1B: 128 bytes are padding
        (18, 1, 256, 148_736, 0.5043402777),  # Gemma 2B: likewise
        (32, 8, 128, 1_064_960, 0.5078125),  # Llama 3.1 8B
        (28, 2, 128, 232_960, 0.5078125),  # Qwen2.5 1.5B
    ],
)
def test_bytes_per_block(layers: int, heads: int, dim: int, expected: int, of_bfloat16: float) -> None:
    geometry = KvGeometry(layers, heads, dim, 16, torch.int8)
    assert geometry.bytes_per_block == expected
    bfloat16 = KvGeometry(layers, heads, dim, 16, torch.bfloat16)
    assert geometry.bytes_per_block / bfloat16.bytes_per_block == pytest.approx(of_bfloat16)
    assert f"= {expected} bytes" in geometry.arithmetic


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 4), st.integers(1, 3), st.integers(1, 33), st.sampled_from([1, 3, 16]), st.integers(1, 40), st.data()
)
def test_every_number_comes_back_within_half_a_step(
    layers: int, heads: int, dim: int, block_size: int, tokens: int, data: st.DataObject
) -> None:
    """Whatever the magnitude, heads and positions beside each other differing by 60 orders of magnitude."""
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    exponents = torch.empty(tokens, 2, heads, 1).uniform_(-30, 30)
    kv = torch.randn(tokens, 2, heads, dim) * 10**exponents
    largest = kv.abs().amax(-1, keepdim=True)
    geometry = KvGeometry(layers + 1, heads, dim, block_size, torch.int8)
    error = (round_trip(kv, geometry=geometry) - kv).abs()
    assert (error <= largest * (1.00001 / 253)).all()
    rounded = (round_trip(kv, dtype=torch.bfloat16, geometry=geometry).float() - kv).abs()
    assert (rounded <= largest * (1.00001 / 253) + kv.abs() / 250).all()


def test_the_bound_is_as_tight_as_it_is_stated() -> None:
    """A number just past the middle between two steps, with the scale rounded up: the error is most of the bound."""
    kv = torch.randn(4096, 2, 3, 10)
    error = (round_trip(kv) - kv).abs() / kv.abs().amax(-1, keepdim=True)
    assert 0.98 / 253 < float(error.max()) <= 1.00001 / 253


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_stay_zeros_and_tiny_numbers_become_zeros(dtype: torch.dtype) -> None:
    kv = torch.zeros(3, 2, 3, 10)
    assert not round_trip(kv, dtype=dtype).any()
    for tiny in (1e-36, 1e-40, 1e-45):
        kv[1] = tiny
        assert not round_trip(kv, dtype=dtype).any()
    kv[1] = 1e-35
    assert float((round_trip(kv) - kv).abs().max()) < 1e-37


def test_huge_numbers_come_back() -> None:
    kv = torch.randn(2, 2, 3, 10)
    kv[0, 0, 1, 3] = 3e38
    kv[1, 1, 2, 0] = -3e38
    read = round_trip(kv)
    assert read[0, 0, 1, 3].item() == pytest.approx(3e38, rel=0.005)
    assert read[1, 1, 2, 0].item() == pytest.approx(-3e38, rel=0.005)
    assert read.isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_reads_back_as_nan(bad: float, dtype: torch.dtype) -> None:
    """The whole vector of that position and head, and no other: a row error, never a number."""
    kv = torch.randn(9, 2, 3, 10)
    kv[4, 1, 2, 7] = bad
    kv[5, 0, 0] = bad
    read = round_trip(kv, dtype=dtype)
    expected = torch.zeros(9, 2, 3, dtype=torch.bool)
    expected[4, 1, 2] = expected[5, 0, 0] = True
    assert torch.equal(read.isnan(), expected[..., None].expand(-1, -1, -1, 10))
    assert read[~read.isnan()].isfinite().all()


def test_any_nan_is_a_nan() -> None:
    """Every payload and sign: a memory of ones is a NaN too."""
    bits = torch.tensor([-1, 0x7FFFFFFF, 0x7F800001, -0x7FFFFF, 0x7FC00000], dtype=torch.int32)
    for nan in bits.view(torch.float32):
        stored = quantise(torch.stack((nan, torch.tensor(1.0))))
        assert stored.scales.isnan()
        assert not stored.values.any()


def test_bytes_depend_on_the_vector_alone() -> None:
    """Stored with others or alone: equal bytes, so that equal content has equal checksums."""
    kv = torch.randn(64, 2, 3, 10)
    kv[7, 0, 0, 0] = math.nan
    together = quantise(kv)
    for token in range(64):
        alone = quantise(kv[token])
        assert torch.equal(alone.values, together.values[token])
        assert torch.equal(alone.scales.view(torch.int16), together.scales[token].view(torch.int16))


def test_storing_touches_its_slots_only() -> None:
    pool = KvPool(GEOMETRY, 5)
    blocks = pool.blocks
    assert isinstance(blocks, Int8Blocks)
    blocks.store(1, blocks.store_index(torch.tensor([2 * 4 + 1, 3 * 4 + 3])), torch.randn(2, 2, 3, 10))
    written = torch.zeros(5, 2, 2, 3, 4, dtype=torch.bool)
    written[2, 1, :, :, 1] = written[3, 1, :, :, 3] = True
    assert torch.equal(blocks.values.any(-1), written)
    assert torch.equal(blocks.scales != 0, written)
    assert int((pool.block_bytes() != 0).sum()) <= 2 * 6 * (10 + 2)  # nothing in the padding


def attend(pool: KvPool, tables: list[list[int]], context: int, query: torch.Tensor) -> torch.Tensor:
    """One decode row per table, without writing."""
    rows = len(tables)
    batch = Batch(torch.zeros(rows, dtype=torch.int64), torch.full((rows,), context - 1),
                  torch.zeros(rows, dtype=torch.int64), [1] * rows, [context] * rows,
                  torch.tensor(tables, dtype=torch.int32), [])  # fmt: skip
    return SdpaBackend().begin(batch, pool).attend(1, query)


@pytest.mark.parametrize("which", [0, 1])
def test_a_nan_key_or_value_is_the_affair_of_its_row(which: int) -> None:
    pool = KvPool(GEOMETRY, 4)
    blocks = pool.blocks
    kv = torch.randn(16, 2, 3, 10)
    kv[1 * 4 + 2, which, :, 0] = math.nan
    blocks.store(1, blocks.store_index(torch.arange(16)), kv)
    query = torch.randn(2, 6, 10)
    out = attend(pool, [[0, 3], [1, 2]], 7, query)
    assert out[0].isfinite().all()
    assert out[1].isnan().view(6, 10).any(-1).all(), "every head of the row"
    healthy = attend(pool, [[0, 3], [0, 3]], 7, query)
    assert torch.equal(out[0], healthy[0])


def tiny(path: Path, kv_dtype: str) -> PagedRunner:
    file = path / "tiny.gguf"
    file.write_bytes(gguf(llama_metadata(), LLAMA_TENSORS))
    return load(file, dtype="float32", kv_dtype=kv_dtype, block_size=4, num_threads=1)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "bfloat16", "float32"])
def test_the_hello_says_the_type_and_the_bytes(kv_dtype: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    runner = tiny(tmp_path, kv_dtype)
    vectors, dim = 2 * 1 * 1 * 4, 4
    expected = {"auto": vectors * dim * 4, "float32": vectors * dim * 4, "bfloat16": vectors * dim * 2, "int8": 64}
    memory = 64 * 64
    run = ExecutorSettings(model=tmp_path / "tiny.gguf", kv_memory_bytes=memory, max_num_seqs=4, max_model_len=64)
    ready = prepare(runner, run)
    assert ready.hello.kv_dtype == ("float32" if kv_dtype == "auto" else kv_dtype)
    assert ready.hello.bytes_per_block == expected[kv_dtype] == runner.pool.block_bytes().shape[1]
    assert ready.hello.num_device_blocks == memory // expected[kv_dtype] == runner.pool.block_bytes().shape[0]
    said = " ".join(str(record.__dict__) for record in caplog.records)
    assert f"= {expected[kv_dtype]} bytes" in said
    assert f"block {expected[kv_dtype]} bytes" in said


def test_an_unknown_kv_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"kv_dtype must be one of auto, bfloat16, float32, int8 \(got 'fp8'\)"):
        tiny(tmp_path, "fp8")
