"""Where a model's weights come from: one interface over safetensors and GGUF files.

A source hands out one tensor at a time under its Hugging Face name, converted into memory of the caller, so that a
checkpoint is never in memory twice. Pickle files are never read (see `pagemill.safetensors_header`).
"""

from __future__ import annotations

from typing import Protocol

import torch

from pagemill.model_files import ModelInfo


class WeightError(ValueError):
    """A tensor is missing or has another shape than the configuration says; the text is one line."""


class WeightSource(Protocol):
    """Named tensors on disk."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a tensor; None if there is none of that name."""
        ...

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Fill `out` (any floating point dtype), whose shape must be the tensor's. Raises WeightError."""
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
