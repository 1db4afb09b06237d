"""Weights in each quantised form, made by the gguf package or by hand, and what products with them must give."""

from __future__ import annotations

from dataclasses import dataclass

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize

from executor_svc.weights.quantised import QuantisedMatrix, keep_blocks, quantise_rows
from executor_svc.weights.source import Blocks

KINDS = ["int8", "Q8_0", "Q4_0", "Q4_1"]


@dataclass(frozen=True)
class Case:
    matrix: QuantisedMatrix
    numbers: torch.Tensor
    """float64 (out_features, in_features), what the matrix stands for."""


def blocks_of(kind: str, raw: torch.Tensor, in_features: int) -> Blocks:
    return Blocks(kind, len(raw), in_features, lambda first, end: raw[first:end])


def quantised(kind: str, weight: torch.Tensor) -> Case:
    """`weight`: float32."""
    out_features, in_features = weight.shape
    if kind == "int8":
        scale = weight.abs().amax(1, keepdim=True) / 127
        matrix = quantise_rows(
            lambda first, out: out.copy_(weight[first : first + len(out)]), out_features, in_features
        )
        whole = (weight / scale.clamp_min(1e-36)).round().double()
        assert int(whole.abs().amax()) <= 127
        return Case(matrix, whole * scale.double())
    raw = quantize(weight.numpy(), gguf.GGMLQuantizationType[kind])
    return kept(kind, torch.from_numpy(raw), in_features)


def kept(kind: str, raw: torch.Tensor, in_features: int, cut: int | None = None) -> Case:
    """Blocks of a file, in two parts where `cut` says after which row."""
    parts = [raw] if cut is None else [raw[:cut], raw[cut:]]
    matrix = keep_blocks([blocks_of(kind, part, in_features) for part in parts])
    numbers = torch.from_numpy(np.array(dequantize(raw.numpy(), gguf.GGMLQuantizationType[kind]))).double()
    return Case(matrix, numbers)


def product(case: Case, x: torch.Tensor) -> torch.Tensor:
    """float64 x Wᵀ with inputs as int8: the nearest of 255 numbers up to the largest of 32 inputs, ties to even."""
    groups = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % 32)).view(len(x), -1, 32)
    most = groups.abs().amax(-1, keepdim=True)
    inverse = torch.where(most < 1e-36, torch.zeros(()), torch.tensor(127.0) / most)
    whole = (groups * inverse).round().double()
    return (whole * (most / 127).double()).flatten(1)[:, : x.shape[1]] @ case.numbers.T
