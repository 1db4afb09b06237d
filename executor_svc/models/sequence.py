"""All layers of a model in one call of the compiled kernels.

A kernel called from Python costs some 25 us for its tensors, its structure and the call. A decode step of SmolLM2-135M
makes three hundred of them: a quarter of its time at one row. So the structures are made once, over buffers that stay,
and `pm_run` goes through them; only what differs from step to step is told anew.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import torch

from executor_svc.attention.base import AttentionOptions
from executor_svc.attention.native import NativeStep
from executor_svc.attention.rotation import HeadNorms, Rotation
from executor_svc.models.base import ModelShape
from executor_svc.models.layers import Projection, RmsNorm, SiluMul
from executor_svc.native import library as native
from executor_svc.native.library import CallKind, Library

_ROWS = 64
"""Buffers have room for a multiple of this."""


class Layer(Protocol):
    """The parts of one decoder layer: norm, attention, residual; norm, gated MLP, residual."""

    input_norm: RmsNorm
    qkv: Projection
    norms: HeadNorms | None
    out: Projection
    mlp_norm: RmsNorm
    gate_up: Projection
    down: Projection
    options: AttentionOptions
    silu_mul: SiluMul


class LayerSequence:
    """The layers of one model, one step at a time."""

    def __init__(self, kernels: Library, layers: Sequence[Layer], shape: ModelShape, dtype: torch.dtype) -> None:
        """`layers` are as `are_kernels` asks for."""
        self._kernels = kernels
        self._layers = layers
        self._shape = shape
        self._dtype = dtype
        self._num_rows = 0

    def run(self, x: torch.Tensor, rotation: Rotation, step: NativeStep) -> torch.Tensor:
        """(num_tokens, hidden_size) through all layers, to the bit as through one after the other.

        The result is a view of a buffer that the next step overwrites. Raises MemoryError.
        """
        rows = x.shape[0]
        if rows > self._num_rows:
            self._make(-(-rows // _ROWS) * _ROWS)
        self._x[:rows] = x
        heads = self._heads[:rows]
        rope = step.rope(heads, rotation)
        now = native.Step(rows, ctypes.pointer(rope))
        for options in self._options:
            call = ctypes.pointer(step.attention(heads[:, : self._shape.num_heads], self._attended, options))
            if options.window is None:
                now.whole = call
            else:
                now.windowed = call
        if self._kernels.run(self._calls, len(self._calls), ctypes.byref(now)) != 0:
            raise MemoryError("no memory for the kernels' buffers")
        return self._x[:rows]

    @property
    def bytes_per_token(self) -> int:
        """Of all buffers."""
        s, first = self._shape, self._layers[0]
        heads = (2 * s.num_heads + 2 * s.num_kv_heads) * s.head_dim
        size = 2 * first.out.out_features + heads + first.gate_up.out_features * 3 // 2
        return size * self._dtype.itemsize

    def _make(self, num_rows: int) -> None:
        """Buffers for so many tokens, and the calls over them."""
        self._num_rows = 0  # as long as the calls' addresses are those of buffers before, memory may run out
        s, first = self._shape, self._layers[0]
        inner = first.gate_up.out_features // 2

        def buffer(*size: int) -> torch.Tensor:
            return torch.empty(num_rows, *size, dtype=self._dtype)

        self._x, self._normed = buffer(first.out.out_features), buffer(first.out.out_features)
        self._heads = buffer(s.num_heads + 2 * s.num_kv_heads, s.head_dim)
        self._attended = buffer(s.num_heads * s.head_dim)
        self._gate_up, self._inner = buffer(2 * inner), buffer(inner)
        self._options = {layer.options for layer in self._layers}
        self._held = [self._calls_of(layer) for layer in self._layers]
        calls = [
            native.Call(
                None if arguments is None else ctypes.addressof(arguments),
                kind,
                index,
                self._layers[index].options.window is not None,
            )
            for index, pairs in enumerate(self._held)
            for kind, arguments in pairs
        ]
        self._calls = (native.Call * len(calls))(*calls)
        self._num_rows = num_rows

    def _calls_of(self, layer: Layer) -> list[tuple[CallKind, ctypes.Structure | None]]:
        """Of one layer, in order."""
        x, normed, inner = self._x, self._normed, self._inner
        norms = None
        if layer.norms is not None:
            norms = native.HeadNormsOf(layer.norms.query.data_ptr(), layer.norms.key.data_ptr(), layer.norms.eps)
        return [
            layer.input_norm.kernel_call(x, normed),
            layer.qkv.kernel_call(normed, None, self._heads),
            (CallKind.ROPE, norms),
            (CallKind.ATTEND, None),
            layer.out.kernel_call(self._attended, x, x),
            layer.mlp_norm.kernel_call(x, normed),
            layer.gate_up.kernel_call(normed, None, self._gate_up),
            layer.silu_mul.kernel_call(self._gate_up, inner),
            layer.down.kernel_call(inner, x, x),
        ]


def are_kernels(layers: Sequence[Layer]) -> bool:
    """Whether every projection of these layers is one call of a compiled kernel."""
    return all(
        projection.is_one_kernel for layer in layers for projection in (layer.qkv, layer.out, layer.gate_up, layer.down)
    )
