"""Where a model's weights come from: one interface over safetensors and GGUF files.

A source hands out one tensor at a time under its Hugging Face name, converted into memory of the caller, so that a
checkpoint is never in memory twice. Pickle files are never read (see `pagemill.safetensors_header`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from pagemill.model_files import ModelInfo


class WeightError(ValueError):
    """A tensor is missing or has another shape than the configuration says; the text is one line."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """A matrix in quantised blocks of a GGUF file."""

    kind: str
    """Name of the type in ggml, such as "Q4_0"."""
    num_rows: int
    in_features: int
    rows: Callable[[int, int], torch.Tensor]
    """uint8 (end - first, bytes of a row) of the rows [first, end)."""


class WeightSource(Protocol):
    """Named tensors on disk."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a tensor; None if there is none of that name."""
        ...

    def read_into(self, name: str, out: torch.Tensor, first_row: int = 0) -> None:
        """Fill `out` (any floating point dtype) with the tensor, or with its len(out) rows from `first_row` on.

        Raises WeightError if the tensor is missing or has another shape; whoever reads a part has asked for the shape.
        """
        ...

    def blocks(self, name: str) -> Blocks | None:
        """A matrix that is stored in quantised blocks, as it is; None if it is not, or if there is none."""
        ...

    def close(self) -> None:
        """Ends threads that read. Nothing is read afterwards."""
        ...


def open_source(info: ModelInfo) -> WeightSource:
    """The weights of a model that `read_model_info` described."""
    if info.gguf is not None:  # the gguf package is imported only for GGUF files
        from executor_svc.weights.gguf_source import GgufSource  # noqa: PLC0415

        return GgufSource(info.gguf, info.config)
    from executor_svc.weights.safetensors_source import SafetensorsSource  # noqa: PLC0415

    assert info.tensors is not None
    return SafetensorsSource(info.tensors)


def check_shape(name: str, found: tuple[int, ...] | None, expected: tuple[int, ...]) -> None:
    """Raise WeightError unless the tensor is there and has the shape that the configuration asks for."""
    if found is None:
        raise WeightError(f"tensor {name!r} is missing from the checkpoint")
    if found != expected:
        raise WeightError(f"tensor {name!r} has shape {list(found)}, the configuration asks for {list(expected)}")


def check_rows(name: str, found: tuple[int, ...] | None, part: tuple[int, ...], first_row: int) -> None:
    """Raise WeightError unless the tensor is there and has rows of this shape, part[0] of them from `first_row` on."""
    if found is None or found[1:] != part[1:]:
        check_shape(name, found, part)
    elif first_row + part[0] > found[0]:
        raise WeightError(f"tensor {name!r} has {found[0]} rows, not {first_row + part[0]}")
