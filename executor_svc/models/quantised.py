"""Linear layers and embeddings whose weights stay in 8 or 4 bits.

Inputs become int8 on the way, each group of 32 inputs of a row with a scale of its own: one scale per row would lose
much more, because a few inputs of a row are far larger than the others. With compiled kernels products are summed as
integers; plain torch computes the same from numbers, a few thousand outputs at a time.
"""

from __future__ import annotations

import ctypes

import torch
from torch.nn import functional

from executor_svc.native.library import CODES, CallKind, Library, QuantisedCall
from executor_svc.weights.quantised import GROUP, QuantisedMatrix

_TORCH_ROWS = 4096
"""Outputs whose weights are numbers at once without kernels."""


class QuantisedLinear:
    """y = x Wᵀ + b."""

    def __init__(self, matrix: QuantisedMatrix, bias: torch.Tensor | None, kernels: Library | None) -> None:
        self.out_features = matrix.out_features
        self._matrix = matrix
        self._bias = None if bias is None else bias.float().contiguous()
        self._kernels = kernels
        self.nbytes = matrix.nbytes + (0 if self._bias is None else self._bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, in_features) to (rows, out_features)."""
        return self._torch(x, None) if self._kernels is None else self._native(self._kernels, x, None)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + y, the sum taken before rounding."""
        return self._torch(x, residual) if self._kernels is None else self._native(self._kernels, x, residual)

    @property
    def is_one_kernel(self) -> bool:
        """As `Projection.is_one_kernel`."""
        return self._kernels is not None

    batch_invariant = is_one_kernel

    def kernel_call(
        self, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor
    ) -> tuple[CallKind, ctypes.Structure]:
        """As `Projection.kernel_call`."""
        return CallKind.QUANTISED, self._call(x, residual, out)

    def _call(self, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor) -> QuantisedCall:
        matrix = self._matrix
        return QuantisedCall(
            x.data_ptr(),
            None if residual is None else residual.data_ptr(),
            out.data_ptr(),
            matrix.values.data_ptr(),
            matrix.scales.data_ptr(),
            None if matrix.mins is None else matrix.mins.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            x.stride(0),
            x.shape[0],
            matrix.in_features,
            matrix.out_features,
            CODES[x.dtype],
            matrix.format,
        )

    def _native(self, kernels: Library, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        x = x if x.stride(1) == 1 else x.contiguous()
        residual = None if residual is None else residual.to(x.dtype).contiguous()
        out = torch.empty(x.shape[0], self.out_features, dtype=x.dtype)
        call = self._call(x, residual, out)
        if kernels.quantised(ctypes.byref(call)) != 0:
            raise MemoryError("no memory for the quantised inputs of a linear kernel")
        return out

    def _torch(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        matrix = self._matrix
        inputs = rounded_to_int8(x.float())
        out = torch.empty(x.shape[0], matrix.out_features)
        for first in range(0, matrix.out_features, _TORCH_ROWS):
            end = min(first + _TORCH_ROWS, matrix.out_features)
            out[:, first:end] = functional.linear(inputs, matrix.rows(torch.arange(first, end)))
        if self._bias is not None:
            out += self._bias
        if residual is not None:
            out += residual
        return out.to(x.dtype)


def rounded_to_int8(x: torch.Tensor) -> torch.Tensor:
    """float32 (rows, in_features) as they come back from int8 with one scale per `GROUP` inputs of a row.

    A group with a number that is not finite comes back as NaN.
    """
    in_features = x.shape[1]
    groups = functional.pad(x, (0, -in_features % GROUP)).view(x.shape[0], -1, GROUP)
    most = groups.abs().amax(-1, keepdim=True)
    inverse = torch.where(most < 1e-36, 0, torch.tensor(127.0) / most)  # 127 / most would be 127 times the reciprocal
    back = (groups * inverse).clamp(-127, 127).round() * (most / 127)
    return torch.where(most.isfinite(), back, torch.nan).flatten(1)[:, :in_features]


class QuantisedEmbedding:
    """Rows of a matrix, as numbers of `dtype`."""

    def __init__(self, matrix: QuantisedMatrix, dtype: torch.dtype) -> None:
        self._matrix = matrix
        self._dtype = dtype

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """(num_tokens,) to (num_tokens, hidden_size)."""
        return self._matrix.rows(token_ids).to(self._dtype)
