"""Layers with their weights, read from a source in the form that `--weight-dtype` says; counts the bytes.

`auto`: all in the type of activations. `int8`: matrices of linear layers, and an embedding that is the output matrix
too, become int8 with a scale per row. `gguf`: what the file has in Q4_0, Q4_1 or Q8_0 stays as it is, embeddings too.
What is left (norms, biases, other matrices) is in the type of activations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import groupby

import torch

from executor_svc.models.layers import Linear, Projection, RmsNorm, SideBySide, SiluMul
from executor_svc.models.quantised import QuantisedEmbedding, QuantisedLinear
from executor_svc.native.library import Library
from executor_svc.weights.quantised import KEPT_TYPES, QuantisedMatrix, keep_blocks, quantise_rows
from executor_svc.weights.source import WeightError, WeightSource, check_shape

WEIGHT_DTYPES = ("auto", "int8", "gguf")

Embedding = Callable[[torch.Tensor], torch.Tensor]
"""(num_tokens,) ids to (num_tokens, hidden_size)."""
Parts = list[tuple[str, int]]
"""Names without ".weight", and how many outputs each has."""


class WeightLoader:
    """Reads weights straight into the memory they will stay in. Raises WeightError from every method."""

    def __init__(
        self,
        source: WeightSource,
        dtype: torch.dtype,
        kernels: Library | None,
        weight_dtype: str = "auto",
        *,
        deterministic: bool = False,
    ) -> None:
        """`deterministic`: give products to the kernels also where oneDNN would be faster."""
        self._source = source
        self._dtype = dtype
        self.kernels = kernels
        """None: plain torch."""
        self._weight_dtype = weight_dtype
        self._pack = deterministic and kernels is not None
        self.silu_mul = SiluMul(kernels)
        self.nbytes = 0

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """In the type of activations."""
        check_shape(name, self._source.shape(name), shape)  # before memory is taken for it
        out = torch.empty(shape, dtype=self._dtype)
        self._source.read_into(name, out)
        self.nbytes += out.nbytes
        return out

    def rope_factors(self) -> torch.Tensor | None:
        """Divisors of the rotary frequencies that come with the weights, if any do."""
        factors: torch.Tensor | None = getattr(self._source, "rope_factors", lambda: None)()
        return factors

    def norm(self, name: str, size: int, eps: float) -> RmsNorm:
        """The norm of this name, without ".weight"."""
        return RmsNorm(self.tensor(f"{name}.weight", (size,)), eps, self.kernels)

    def linear(self, parts: Parts, in_features: int, *, bias: bool) -> Projection:
        """One layer of the named projections, one below the other."""
        for name, size in parts:
            check_shape(f"{name}.weight", self._source.shape(f"{name}.weight"), (size, in_features))
        biases = [self.tensor(f"{name}.bias", (size,)) for name, size in parts] if bias else None
        runs = [list(run) for _, run in groupby(parts, key=lambda part: self._kept_type(part[0]))]
        layers: list[Projection] = []
        for run in runs:
            taken = [biases.pop(0) for _ in run] if biases is not None else None
            layers.append(self._run(run, in_features, torch.cat(taken) if taken else None))
        return layers[0] if len(layers) == 1 else SideBySide(layers)

    def embedding(self, name: str, vocab_size: int, hidden_size: int) -> Embedding:
        """Of a model with an output matrix of its own."""
        check_shape(f"{name}.weight", self._source.shape(f"{name}.weight"), (vocab_size, hidden_size))
        if self._kept_type(name) is None:
            return self.tensor(f"{name}.weight", (vocab_size, hidden_size)).__getitem__
        return QuantisedEmbedding(self._quantised([(name, vocab_size)], hidden_size), self._dtype)

    def tied(self, name: str, vocab_size: int, hidden_size: int) -> tuple[Embedding, Projection]:
        """An embedding, and the output layer with the same weights."""
        check_shape(f"{name}.weight", self._source.shape(f"{name}.weight"), (vocab_size, hidden_size))
        if self._weight_dtype == "int8" or self._kept_type(name) is not None:
            matrix = self._quantised([(name, vocab_size)], hidden_size)
            return QuantisedEmbedding(matrix, self._dtype), QuantisedLinear(matrix, None, self.kernels)
        table = self.tensor(f"{name}.weight", (vocab_size, hidden_size))
        head = Linear(table, kernels=self.kernels, pack=self._pack)
        if head.is_one_kernel:
            return head.rows, head
        # Looking up rows needs the dense matrix, oneDNN wants one of its own: the one weight held twice.
        self.nbytes += head.packed_nbytes
        return table.__getitem__, head

    def _run(self, parts: Parts, in_features: int, bias: torch.Tensor | None) -> Projection:
        """Of parts that are stored alike."""
        if self._weight_dtype == "int8" or self._kept_type(parts[0][0]) is not None:
            return QuantisedLinear(self._quantised(parts, in_features), bias, self.kernels)
        weight = torch.empty(sum(size for _, size in parts), in_features, dtype=self._dtype)
        self._read_rows(parts, 0, weight)
        self.nbytes += weight.nbytes
        return Linear(weight, bias, self.kernels, pack=self._pack)

    def _quantised(self, parts: Parts, in_features: int) -> QuantisedMatrix:
        try:
            if self._weight_dtype == "int8":
                num_rows = sum(size for _, size in parts)
                matrix = quantise_rows(partial(self._read_rows, parts), num_rows, in_features)
            else:
                kept = [self._source.blocks(f"{name}.weight") for name, _ in parts]
                matrix = keep_blocks([blocks for blocks in kept if blocks is not None])
        except WeightError as error:
            raise WeightError(f"{', '.join(name for name, _ in parts)}: {error}") from error
        self.nbytes += matrix.nbytes
        return matrix

    def _read_rows(self, parts: Parts, first: int, out: torch.Tensor) -> None:
        """Rows of the parts, counted through, from `first` on."""
        start = 0
        for name, size in parts:
            begin, end = max(first, start), min(first + len(out), start + size)
            if begin < end:
                self._source.read_into(f"{name}.weight", out[begin - first : end - first], begin - start)
            start += size

    def _kept_type(self, name: str) -> str | None:
        """The type in which a matrix stays as the file has it, None where it does not."""
        if self._weight_dtype != "gguf":
            return None
        blocks = self._source.blocks(f"{name}.weight")
        return blocks.kind if blocks is not None and blocks.kind in KEPT_TYPES else None
