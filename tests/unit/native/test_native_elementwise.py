"""Linear layers, norms, SiLU, rotation, and the storing of keys and values against torch: sizes, types, odd values."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional

from executor_svc.attention.native import NativeBackend
from executor_svc.attention.rotation import HeadNorms, Rotation
from executor_svc.attention.sdpa import SdpaBackend
from executor_svc.batch import Batch
from executor_svc.kv.geometry import KvGeometry
from executor_svc.kv.int8_blocks import Int8Blocks, quantise
from executor_svc.kv.pool import KvPool
from executor_svc.models.layers import Linear, RmsNorm, SiluMul
from executor_svc.native.library import Library

FLOATS = [torch.float32, torch.bfloat16]
CLOSE: dict[torch.dtype, Any] = {
    torch.float32: {"rtol": 2e-6, "atol": 1e-6},
    torch.bfloat16: {"rtol": 8e-3, "atol": 1e-3},
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [1, 7, 16, 64, 576, 577, 4096])
@pytest.mark.parametrize("rows", [1, 3, 70])
def test_rms_norm(kernels: Library, dtype: torch.dtype, size: int, rows: int) -> None:
    torch.manual_seed(size)
    x = (torch.randn(rows, size + 5) * 3).to(dtype)[:, :size]  # rows apart, as a slice of something wider
    weight = torch.randn(size).to(dtype)
    out = RmsNorm(weight, 1e-5, kernels)(x)
    assert out.dtype == dtype
    torch.testing.assert_close(out, RmsNorm(weight, 1e-5, None)(x), **CLOSE[dtype])
    assert torch.equal(out[-1:], RmsNorm(weight, 1e-5, kernels)(x[-1:]))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [1, 7, 16, 1536, 1537])
@pytest.mark.parametrize("rows", [1, 3, 70])
def test_silu_mul(kernels: Library, dtype: torch.dtype, size: int, rows: int) -> None:
    torch.manual_seed(size)
    x = (torch.randn(rows, 2 * size) * 30).to(dtype)
    out = SiluMul(kernels)(x)
    gate, up = x.float().chunk(2, 1)
    torch.testing.assert_close(out, (functional.silu(gate) * up).to(dtype), **CLOSE[dtype])
    assert torch.equal(out[-1:], SiluMul(kernels)(x[-1:]))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("size", "outputs"), [(576, 960), (7, 1), (64, 33), (1536, 576), (16, 16)])
@pytest.mark.parametrize("rows", [1, 5, 12, 13, 97, 200])
def test_linear(kernels: Library, dtype: torch.dtype, biased: bool, size: int, outputs: int, rows: int) -> None:
    """bf16 weights against float64; a row's bits are the same in any batch."""
    torch.manual_seed(rows)
    weight = torch.randn(outputs, size).to(torch.bfloat16)
    bias = torch.randn(outputs).to(torch.bfloat16) if biased else None
    x = torch.randn(rows, size + 3).to(dtype)[:, :size]
    residual = torch.randn(rows, outputs).to(dtype)
    linear = Linear(weight.clone(), bias, kernels, pack=True)
    assert linear.packed_nbytes == weight.nbytes
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    close: dict[str, Any] = {torch.float32: {"rtol": 1e-5, "atol": 2e-4}, torch.bfloat16: {"rtol": 8e-3, "atol": 1e-2}}[
        dtype
    ]
    out, added = linear(x), linear.add_to(residual, x)
    assert out.dtype == added.dtype == dtype
    torch.testing.assert_close(out.double(), expected, **close)
    torch.testing.assert_close(added.double(), expected + residual.double(), **close)
    for row in {0, rows // 2, rows - 1}:
        assert torch.equal(linear(x[row : row + 1])[0], out[row])
    chosen = torch.randperm(outputs)[:9]
    assert torch.equal(linear.rows(chosen), weight[chosen])


def test_silu_of_extreme_values(kernels: Library) -> None:
    gate = torch.tensor([[-1e30, -200.0, -88.5, -0.0, 88.5, 1e30, math.nan, math.inf] * 2])
    out = SiluMul(kernels)(torch.cat((gate, torch.ones_like(gate)), 1))
    torch.testing.assert_close(out, functional.silu(gate), rtol=2e-6, atol=1e-36, equal_nan=True)


def pools(kv_dtype: torch.dtype, dim: int, block_size: int) -> tuple[KvPool, KvPool]:
    geometry = KvGeometry(2, 2, dim, block_size, kv_dtype)
    return KvPool(geometry, 9), KvPool(geometry, 9)


def batch_of(positions: torch.Tensor, slots: torch.Tensor) -> Batch:
    n = len(slots)
    return Batch(torch.zeros(n, dtype=torch.int64), positions, slots, [1] * n, [1] * n,
                 torch.zeros(n, 1, dtype=torch.int32), [])  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kv_dtype", [*FLOATS, torch.int8])
@pytest.mark.parametrize(("dim", "block_size"), [(16, 3), (64, 16), (80, 1)])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 9])
def test_rotate_and_write(
    kernels: Library,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    dim: int,
    block_size: int,
    normed: bool,
    num_tokens: int,
) -> None:
    """The same queries, keys and values as torch's, which computes rotations in the model's type."""
    torch.manual_seed(dim)
    mine, reference = pools(kv_dtype, dim, block_size)
    slots = torch.randperm(9 * block_size)[:num_tokens]
    angles = torch.rand(50, dim // 2) * 6
    rotation = Rotation(angles.cos(), angles.sin(), torch.randint(0, 50, (num_tokens,)))
    norms = HeadNorms(torch.randn(dim).to(dtype), torch.randn(dim).to(dtype), 1e-6) if normed else None
    batch = batch_of(rotation.positions, slots)
    heads = torch.randn(num_tokens, 6 + 4, dim).to(dtype)
    steps = NativeBackend(kernels).begin(batch, mine), SdpaBackend().begin(batch, reference)
    out, expected = (step.rotate_and_write(1, heads.clone(), rotation, norms) for step in steps)
    bound: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.03, "atol": 0.03}
    torch.testing.assert_close(out, expected, **bound)
    stored, wanted = (contents(pool) for pool in (mine, reference))
    assert torch.equal(stored[:, :, 1], wanted[:, :, 1])  # values are not computed with
    if kv_dtype == torch.int8:  # a step of the scale further where rounding fell to the other side
        bound = {"rtol": bound["rtol"], "atol": bound["atol"] + 0.05}
    if kv_dtype == torch.bfloat16:
        bound = {"rtol": max(bound["rtol"], 8e-3), "atol": bound["atol"]}
    torch.testing.assert_close(stored, wanted, **bound)
    assert int((wanted != 0).any(-1).sum()) == num_tokens * 2 * 2


def contents(pool: KvPool) -> torch.Tensor:
    values = pool.blocks.values.float()
    return values * pool.blocks.scales.float()[..., None] if isinstance(pool.blocks, Int8Blocks) else values


@pytest.mark.parametrize("dtype", FLOATS)
def test_int8_is_bit_for_bit_what_torch_stores(kernels: Library, dtype: torch.dtype) -> None:
    """Of values that are not computed with: large, tiny, zero, halves, and not finite."""
    torch.manual_seed(0)
    mine, _ = pools(torch.int8, 16, 16)
    exponents = torch.arange(140) - 100
    vectors = torch.randn(140, 16) * torch.pow(2.0, exponents[:, None].float())
    vectors[3] = 0
    vectors[4] = torch.arange(16) - 7.5
    vectors[5, 2], vectors[6, 3], vectors[7, 4] = math.nan, math.inf, -math.inf
    vectors = vectors.to(dtype)
    heads = torch.zeros(140, 6, 16, dtype=dtype)
    heads[:, 4], heads[:, 5] = vectors, vectors.flip(0)
    step = NativeBackend(kernels).begin(batch_of(torch.zeros(140, dtype=torch.int64), torch.arange(140)), mine)
    step.rotate_and_write(
        0, heads.clone(), Rotation(torch.ones(1, 8), torch.zeros(1, 8), torch.zeros(140, dtype=torch.int64)), None
    )
    assert isinstance(mine.blocks, Int8Blocks)
    for head, x in ((0, vectors), (1, vectors.flip(0))):
        wanted = quantise(x)
        values = mine.blocks.values[:, 0, 1, head].reshape(-1, 16)[:140]
        scales = mine.blocks.scales[:, 0, 1, head].reshape(-1)[:140]
        finite = x.isfinite().all(-1)
        assert torch.equal(values[finite], wanted.values[finite])
        assert torch.equal(scales[finite], wanted.scales[finite])
        assert (~scales[~finite].isfinite()).all()
        assert int((~finite).sum()) == 3
