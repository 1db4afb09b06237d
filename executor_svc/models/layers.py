"""The small parts that own models are made of: linear layers with weights packed for oneDNN, RMSNorm, SiLU.

With compiled kernels where there are some, else in plain torch.
"""

from __future__ import annotations

import functools

import torch
from torch.nn import functional

from executor_svc.native.library import CODES, Library


@functools.cache
def packs_bfloat16() -> bool:
    """Whether this CPU computes bfloat16 natively, so that bfloat16 is the default and oneDNN packing pays."""
    return bool(torch._C._has_mkldnn) and any(
        check() for check in (torch.cpu._is_avx512_bf16_supported, torch.cpu._is_amx_tile_supported)
    )


class Linear:
    """y = x Wᵀ + b.

    On bfloat16 CPUs the weight is kept only in oneDNN's own blocked layout, reordered once: 2 x faster at 1 to 4 rows,
    1.3 x at 16, equal from 64 on (measured, torch 2.13). Elsewhere it is an ordinary dense weight.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.nbytes = weight.nbytes + (bias.nbytes if bias is not None else 0)
        self._packed = weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and packs_bfloat16()
        self.packed_nbytes = weight.nbytes if self._packed else 0
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None) if self._packed else weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, in_features) to (rows, out_features)."""
        if self._packed:
            out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return out
        return functional.linear(x, self._weight, self._bias)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + y, the sum taken before rounding where weights are packed."""
        if self._packed:
            out: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._weight, self._bias, "add")
            return out
        return residual + functional.linear(x, self._weight, self._bias)


class RmsNorm:
    """x / rms(x) * weight, computed in float32."""

    def __init__(self, weight: torch.Tensor, eps: float, kernels: Library | None) -> None:
        self._weight = weight
        self._shape = tuple(weight.shape)
        self._eps = eps
        self._kernels = kernels

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, size), rows contiguous; same shape and dtype as `x`."""
        if self._kernels is None:
            return functional.rms_norm(x, self._shape, self._weight, self._eps)
        rows, size = x.shape
        out = torch.empty(rows, size, dtype=x.dtype)
        self._kernels.rms_norm(
            x.data_ptr(), x.stride(0), self._weight.data_ptr(), out.data_ptr(), rows, size, self._eps, CODES[x.dtype]
        )
        return out


class SiluMul:
    """silu(gate) * up."""

    def __init__(self, kernels: Library | None) -> None:
        self._kernels = kernels

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """(rows, 2 * size) contiguous, gate and up side by side, to (rows, size). May overwrite `gate_up`."""
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        if self._kernels is None:
            return functional.silu(gate_up[:, :size]).mul_(gate_up[:, size:])
        out = torch.empty(rows, size, dtype=gate_up.dtype)
        self._kernels.silu_mul(gate_up.data_ptr(), out.data_ptr(), rows, size, CODES[gate_up.dtype])
        return out
