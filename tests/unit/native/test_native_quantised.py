"""Products with weights in 8 and 4 bits: sizes, types, extreme numbers, and the same bits for a row in any batch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from executor_svc.models.quantised import QuantisedLinear, rounded_to_int8
from executor_svc.native.library import Library
from executor_svc.weights.quantised import Format, QuantisedMatrix
from tests.unit.native.quantised_cases import KINDS, kept, product, quantised

FLOATS = [torch.float32, torch.bfloat16]
CLOSE: dict[torch.dtype, Any] = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-4},
    torch.bfloat16: {"rtol": 8e-3, "atol": 1e-2},
}


def check_products(
    kernels: Library | None, dtype: torch.dtype, kind: str, outputs: int, in_features: int, rows: int
) -> None:
    torch.manual_seed(rows)
    case = quantised(kind, torch.randn(outputs, in_features))
    x = torch.randn(rows, in_features + 3)[:, :in_features].clone()
    x[:, in_features // 2] *= 20
    x[rows // 2] *= 1e-3
    x = x.to(dtype)
    bias, residual = torch.randn(outputs), torch.randn(rows, outputs).to(dtype)
    linear = QuantisedLinear(case.matrix, bias, kernels)
    expected = product(case, x) + bias.double()
    out, added = linear(x), linear.add_to(residual, x)
    assert out.dtype == added.dtype == dtype
    torch.testing.assert_close(out.double(), expected, **CLOSE[dtype])
    torch.testing.assert_close(added.double(), expected + residual.double(), **CLOSE[dtype])
    for row in {0, rows // 2, rows - 1} if kernels is not None else ():
        assert torch.equal(linear(x[row : row + 1])[0], out[row])
    if rows > 9 and kernels is not None:  # neither does it depend on how many there are
        assert torch.equal(linear(x[3:8]), out[3:8])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("in_features", "outputs"), [(576, 96), (32, 1), (64, 33), (1536, 48), (2048, 16)])
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 16, 97, 200])
def test_products(kernels: Library, dtype: torch.dtype, kind: str, in_features: int, outputs: int, rows: int) -> None:
    check_products(kernels, dtype, kind, outputs, in_features, rows)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("in_features", [1, 3, 7, 33, 577])
@pytest.mark.parametrize("rows", [1, 5, 70])
def test_int8_rows_of_any_length(kernels: Library, dtype: torch.dtype, in_features: int, rows: int) -> None:
    check_products(kernels, dtype, "int8", 19, in_features, rows)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 5])
def test_the_same_without_kernels(dtype: torch.dtype, kind: str, rows: int) -> None:
    check_products(None, dtype, kind, 4097, 64, rows)


def whole_case(kind: str, numbers: torch.Tensor) -> QuantisedMatrix:
    """Scales of 1: the matrix is these whole numbers, of a multiple of 32 columns."""
    rows, columns = numbers.shape
    if kind == "int8":
        padded = torch.zeros(-(-rows // 16) * 16, columns, dtype=torch.int8)
        padded[:rows] = numbers
        values = padded.view(-1, 16, columns // 4, 4).transpose(1, 2).contiguous().view(torch.uint8)
        return QuantisedMatrix(Format.INT8_ROWS, rows, columns, values, torch.ones(len(values), 16))
    one = torch.tensor([1.0], dtype=torch.float16).view(torch.uint8).expand(rows, columns // 32, 2)
    groups = numbers.view(rows, -1, 32)
    if kind == "Q8_0":
        body = groups.to(torch.int8).view(torch.uint8)
    else:
        stored = (groups + (8 if kind == "Q4_0" else 0)).to(torch.uint8)
        body = stored[..., :16] | stored[..., 16:] << 4
    least = [torch.zeros_like(one)] if kind == "Q4_1" else []
    return kept(kind, torch.cat((one, *least, body), 2).flatten(1).contiguous(), columns).matrix


@pytest.mark.parametrize(
    ("kind", "least", "most"), [("int8", -127, 127), ("Q8_0", -128, 127), ("Q4_0", -8, 7), ("Q4_1", 0, 15)]
)
@pytest.mark.parametrize("sign", [-1, 1])
def test_the_largest_sums_are_exact(kernels: Library, kind: str, least: int, most: int, sign: int) -> None:
    """Nothing is clipped on the way: every number at its end, and random ones, against 64-bit integers."""
    torch.manual_seed(0)
    numbers = torch.randint(least, most + 1, (40, 512))
    numbers[0], numbers[1], numbers[2, ::2], numbers[2, 1::2] = least, most, least, most
    x = torch.randint(-127, 128, (6, 512))
    x[:, ::32] = 127  # scales of 1
    x[0], x[1], x[2, ::2], x[2, 1::2] = 127 * sign, -127 * sign, 127, -127
    out = QuantisedLinear(whole_case(kind, numbers), None, kernels)(x.float())
    assert torch.equal(out.long(), x @ numbers.T)


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_that_are_not_numbers(kernels: Library, kind: str) -> None:
    """They reach their own row only; zeros and the smallest numbers give the bias."""
    torch.manual_seed(1)
    case = quantised(kind, torch.randn(20, 64))
    x = torch.randn(6, 64)
    expected = QuantisedLinear(case.matrix, torch.ones(20), kernels)(x)
    x[1, 5], x[2, 40], x[3, 63] = math.nan, math.inf, -math.inf
    x[4], x[5] = 0, 1e-39
    for linear in (
        QuantisedLinear(case.matrix, torch.ones(20), kernels), QuantisedLinear(case.matrix, torch.ones(20), None)
    ):  # fmt: skip
        out = linear(x)
        torch.testing.assert_close(out[0], expected[0], rtol=1e-5, atol=1e-5)
        assert out[1:4].isnan().all()
        assert torch.equal(out[4:], torch.ones(2, 20))


def test_rounding_of_inputs_is_to_even_and_within_half_a_step() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5, 126.5]])
    assert rounded_to_int8(x).tolist() == [[127, 0, 2, 2, 0, -2, -126, 126]]
    torch.manual_seed(0)
    x = torch.randn(50, 96) * 7
    error = (rounded_to_int8(x) - x).view(50, 3, 32).abs().amax(-1)
    assert bool((error <= x.view(50, 3, 32).abs().amax(-1) / 127 * 0.5001).all())


@pytest.mark.parametrize("value", [0.5, 1.5, -2.5, 126.5, -126.5])
def test_kernels_round_inputs_as_torch_does(kernels: Library, value: float) -> None:
    """Ties to even, on every instruction set: a multiplication and an addition in one rounding would not."""
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 1] = 127, value
    out = QuantisedLinear(whole_case("int8", torch.eye(32).long()), None, kernels)(x)
    assert torch.equal(out, x.round())
    torch.manual_seed(2)
    x = torch.randn(300, 32) * 3
    case = whole_case("Q8_0", torch.eye(32).long())
    torch.testing.assert_close(QuantisedLinear(case, None, kernels)(x), rounded_to_int8(x), rtol=1e-6, atol=0)
