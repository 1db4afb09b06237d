"""The small parts that own models are made of: linear layers with packed weights, RMSNorm, SiLU.

With compiled kernels where there are some, else in plain torch.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Protocol

import torch
from torch.nn import functional

from executor_svc.native.library import BFLOAT16_ISA, CODES, PANEL, CallKind, Library, LinearCall, Norm, Silu


@functools.cache
def packs_bfloat16() -> bool:
    """Whether this CPU computes bfloat16 natively, so that weights packed by oneDNN pay."""
    return bool(torch._C._has_mkldnn) and any(
        check() for check in (torch.cpu._is_avx512_bf16_supported, torch.cpu._is_amx_tile_supported)
    )


def computes_linear(kernels: Library | None) -> bool:
    """Whether bfloat16 weights are for the compiled kernels, which need the instructions or nobody else having them.

    They do not know the tiles of AMX, so oneDNN is much faster there.
    """
    if kernels is None:
        return False
    return not packs_bfloat16() or (kernels.isa == BFLOAT16_ISA and not torch.cpu._is_amx_tile_supported())


class Linear:
    """y = x Wᵀ + b.

    bfloat16 weights are kept in one packed layout only: that of the compiled kernels where `computes_linear` says so,
    else oneDNN's where the CPU multiplies bfloat16 (2 x faster than dense at 1 to 4 rows, 1.3 x at 16, equal from 64
    on; measured, torch 2.13). All others stay dense.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        kernels: Library | None = None,
        *,
        pack: bool = False,
    ) -> None:
        """`pack`: for the kernels also where oneDNN would be faster."""
        self.out_features, self.in_features = weight.shape
        self._bias = bias
        is_bfloat16 = weight.dtype == torch.bfloat16 and weight.device.type == "cpu"
        self._kernels = kernels if is_bfloat16 and (pack or computes_linear(kernels)) else None
        self._onednn = is_bfloat16 and packs_bfloat16() and self._kernels is None
        if self._onednn:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        elif self._kernels is not None:
            weight = weight.contiguous()
            self._bias = None if bias is None else bias.to(torch.bfloat16).contiguous()
            panels, pairs = -(-self.out_features // PANEL), -(-self.in_features // 2)
            self._weight = torch.empty(panels, pairs, PANEL, 2, dtype=weight.dtype)
            self._kernels.pack_linear(weight.data_ptr(), self._weight.data_ptr(), self.in_features, self.out_features)
        else:
            self._weight = weight
        self.packed_nbytes = weight.nbytes if self._weight is not weight else 0
        self.nbytes = weight.nbytes + (bias.nbytes if bias is not None else 0)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, in_features) to (rows, out_features)."""
        if self._kernels is not None:
            return self._compute(self._kernels, x, None)
        if self._onednn:
            out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return out
        return functional.linear(x, self._weight, self._bias)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + y, the sum taken before rounding where weights are packed."""
        if self._kernels is not None:
            return self._compute(self._kernels, x, residual)
        if self._onednn:
            out: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._weight, self._bias, "add")
            return out
        return residual + functional.linear(x, self._weight, self._bias)

    def rows(self, outputs: torch.Tensor) -> torch.Tensor:
        """The weights of these outputs, (n,) to (n, in_features). For layers that are one kernel."""
        pairs: torch.Tensor = self._weight[outputs // PANEL, :, outputs % PANEL]
        return pairs.flatten(1)[:, : self.in_features]

    @property
    def is_one_kernel(self) -> bool:
        """As `Projection.is_one_kernel`."""
        return self._kernels is not None

    batch_invariant = is_one_kernel

    def kernel_call(
        self, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor
    ) -> tuple[CallKind, ctypes.Structure]:
        """As `Projection.kernel_call`."""
        return CallKind.LINEAR, self._call(x, residual, out)

    def _call(self, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor) -> LinearCall:
        return LinearCall(
            x.data_ptr(),
            self._weight.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            None if residual is None else residual.data_ptr(),
            out.data_ptr(),
            x.stride(0),
            x.shape[0],
            self.in_features,
            self.out_features,
            CODES[x.dtype],
        )

    def _compute(self, kernels: Library, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        x = x if x.stride(1) == 1 else x.contiguous()
        residual = None if residual is None else residual.to(x.dtype).contiguous()
        out = torch.empty(x.shape[0], self.out_features, dtype=x.dtype)
        call = self._call(x, residual, out)
        if kernels.linear(ctypes.byref(call)) != 0:
            raise MemoryError("no memory for the linear kernel's buffers")
        return out


class Projection(Protocol):
    """A linear layer, whatever its weights are kept in."""

    out_features: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, in_features) to (rows, out_features)."""
        ...

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + y."""
        ...

    @property
    def is_one_kernel(self) -> bool:
        """Whether there is a `kernel_call`."""
        ...

    @property
    def batch_invariant(self) -> bool:
        """Whether the bits of a row's outputs are the same whatever rows are beside it; so it is of our kernels."""
        ...

    def kernel_call(
        self, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor
    ) -> tuple[CallKind, ctypes.Structure]:
        """out = y, or residual + y, for a sequence of calls (`sequence`).

        All contiguous and of the type of activations; `residual` may be `out`. The structure holds bare addresses.
        """
        ...


class SideBySide:
    """Layers with the same input as one; their weights are kept in different forms."""

    def __init__(self, layers: Sequence[Projection]) -> None:
        self._layers = layers
        self.out_features = sum(layer.out_features for layer in layers)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, in_features) to (rows, out_features)."""
        return torch.cat([layer(x) for layer in self._layers], 1)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + y."""
        parts = torch.split(residual, [layer.out_features for layer in self._layers], 1)
        return torch.cat([layer.add_to(part, x) for layer, part in zip(self._layers, parts, strict=True)], 1)

    @property
    def is_one_kernel(self) -> bool:
        """As `Projection.is_one_kernel`."""
        return False

    @property
    def batch_invariant(self) -> bool:
        """As `Projection.batch_invariant`."""
        return all(layer.batch_invariant for layer in self._layers)

    def kernel_call(
        self, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor
    ) -> tuple[CallKind, ctypes.Structure]:
        """Raises TypeError: they are as many calls as layers, and their outputs lie side by side."""
        raise TypeError("layers side by side are not one call of a kernel")


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

    def kernel_call(self, x: torch.Tensor, out: torch.Tensor) -> tuple[CallKind, ctypes.Structure]:
        """As `Projection.kernel_call`."""
        call = Norm(x.data_ptr(), self._weight.data_ptr(), out.data_ptr(), x.shape[1], CODES[x.dtype], self._eps)
        return CallKind.NORM, call


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

    def kernel_call(self, gate_up: torch.Tensor, out: torch.Tensor) -> tuple[CallKind, ctypes.Structure]:
        """As `Projection.kernel_call`."""
        return CallKind.SILU, Silu(gate_up.data_ptr(), out.data_ptr(), out.shape[1], CODES[out.dtype])
