"""Weight matrices in 8 or 4 bits, as the compiled kernels read them and as torch can: one layout, one copy.

Two ways lead here: rows of numbers are quantised to int8 with one scale per row (`quantise_rows`), and blocks that a
GGUF file already has are kept, number for number and scale for scale (`keep_blocks`).
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

import torch

from executor_svc.weights.source import Blocks, WeightError

PANEL = 16
"""Rows (outputs) that lie side by side; PM_PANEL."""
GROUP = 32
"""Inputs that share a scale; PM_GROUP, and the block of GGUF's types."""

LARGEST = 127
"""Magnitude of int8 weights."""

_CHUNK_VALUES = 1 << 22
"""Values converted at once: bounds the memory that loading takes on top."""


class Format(enum.IntEnum):
    """How numbers and scales lie; PM_INT8_ROWS and so on."""

    INT8_ROWS = 0
    INT8_GROUPS = 1
    INT4_GROUPS = 2


_OF_GGUF = {"Q8_0": Format.INT8_GROUPS, "Q4_0": Format.INT4_GROUPS, "Q4_1": Format.INT4_GROUPS}
KEPT_TYPES = tuple(_OF_GGUF)
"""Types of GGUF tensors that `keep_blocks` takes."""


@dataclass(frozen=True, slots=True)
class QuantisedMatrix:
    """(out_features, in_features) numbers. Rows behind out_features, up to a whole panel, are zero."""

    format: Format
    out_features: int
    in_features: int
    values: torch.Tensor
    """uint8 (panels, words, 16, 4), a word being 4 int8 inputs, or 4 bytes of two 4-bit inputs each, 16 apart; whole
    groups, zeros behind in_features."""
    scales: torch.Tensor
    """float32 (panels, 16), or float16 (panels, groups, 16)."""
    mins: torch.Tensor | None = None
    """float16 (panels, groups, 16), added to number times scale; None for INT4_GROUPS: -8 scales."""

    @property
    def nbytes(self) -> int:
        """Of numbers and scales."""
        return self.values.nbytes + self.scales.nbytes + (0 if self.mins is None else self.mins.nbytes)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """float32 (len(ids), in_features): these rows as numbers."""
        panel, lane = ids // PANEL, ids % PANEL
        stored = self.values[panel, :, lane].flatten(1)
        if self.format == Format.INT8_ROWS:
            return stored.view(torch.int8)[:, : self.in_features] * self.scales.view(-1)[ids, None]
        scales = self.scales[panel, :, lane].float()[..., None]
        if self.format == Format.INT8_GROUPS:
            return (stored.view(torch.int8).view(*scales.shape[:2], GROUP) * scales).flatten(1)
        packed = stored.view(*scales.shape[:2], GROUP // 2)
        mins = scales * -8 if self.mins is None else self.mins[panel, :, lane].float()[..., None]
        return (torch.cat((packed & 15, packed >> 4), 2) * scales + mins).flatten(1)


def quantise_rows(read: Callable[[int, torch.Tensor], object], out_features: int, in_features: int) -> QuantisedMatrix:
    """int8, symmetric, one scale per row. `read(first, out)` fills float32 `out` with the rows from `first` on.

    Raises WeightError for numbers that are not finite.
    """
    panels, words = -(-out_features // PANEL), -(-in_features // GROUP) * (GROUP // 4)
    values = torch.zeros(panels, words, PANEL, 4, dtype=torch.uint8)
    scales = torch.zeros(panels, PANEL)
    for first, end in _chunks(out_features, in_features):
        numbers = torch.empty(end - first, in_features)
        read(first, numbers)
        most = numbers.abs().amax(1)
        if not bool(most.isfinite().all()):
            raise WeightError("a weight is not finite")
        scale = most / LARGEST
        rows = torch.zeros(-(-len(numbers) // PANEL) * PANEL, words * 4, dtype=torch.int8)
        rows[: len(numbers), :in_features] = (numbers / scale.clamp_min(1e-36)[:, None]).round_()
        _put(values, first, rows.view(torch.uint8))
        scales.view(-1)[first:end] = scale
    return QuantisedMatrix(Format.INT8_ROWS, out_features, in_features, values, scales)


def keep_blocks(parts: list[Blocks]) -> QuantisedMatrix:
    """Blocks of one type of `KEPT_TYPES`, the rows of the parts one below the other. Raises WeightError."""
    kind, in_features = parts[0].kind, parts[0].in_features
    form = _OF_GGUF[kind]
    out_features = sum(part.num_rows for part in parts)
    panels, groups = -(-out_features // PANEL), in_features // GROUP
    block_words = 8 if form == Format.INT8_GROUPS else 4
    values = torch.zeros(panels, groups * block_words, PANEL, 4, dtype=torch.uint8)
    halves = [torch.zeros(panels, groups, PANEL, dtype=torch.float16) for _ in range(2 if kind == "Q4_1" else 1)]
    for first, end in _chunks(out_features, in_features):
        blocks = _stacked(parts, first, end).view(-1, groups, 2 * len(halves) + block_words * 4)
        rows = -(-len(blocks) // PANEL) * PANEL
        numbers = torch.zeros(rows, groups, block_words * 4, dtype=torch.uint8)
        numbers[: len(blocks)] = blocks[..., 2 * len(halves) :]
        _put(values, first, numbers.flatten(1))
        for i, half in enumerate(halves):  # in the order of the file: scale, least
            found = torch.zeros(rows, groups, dtype=torch.float16)
            found[: len(blocks)] = blocks[..., 2 * i : 2 * i + 2].contiguous().view(torch.float16)[..., 0]
            if not bool(found.isfinite().all()):
                raise WeightError(f"a scale of its {kind} blocks is not finite")
            panel = first // PANEL
            half[panel : panel + rows // PANEL] = found.view(-1, PANEL, groups).transpose(1, 2)
    return QuantisedMatrix(form, out_features, in_features, values, *halves)


def _chunks(num_rows: int, in_features: int) -> list[tuple[int, int]]:
    """Ranges of rows, each but the last of whole panels."""
    step = max(1, _CHUNK_VALUES // (in_features * PANEL)) * PANEL
    return [(first, min(first + step, num_rows)) for first in range(0, num_rows, step)]


def _put(values: torch.Tensor, first: int, rows: torch.Tensor) -> None:
    """uint8 (rows, words * 4), whole panels of them, from row `first` on."""
    panels = rows.view(torch.int32).view(-1, PANEL, values.shape[1]).transpose(1, 2)
    values.view(torch.int32)[first // PANEL : first // PANEL + len(panels)] = panels[..., None]


def _stacked(parts: list[Blocks], first: int, end: int) -> torch.Tensor:
    """uint8 (end - first, bytes of a row) of the parts' rows counted through."""
    found, start = [], 0
    for part in parts:
        begin, stop = max(first - start, 0), min(end - start, part.num_rows)
        if begin < stop:
            found.append(part.rows(begin, stop))
        start += part.num_rows
    return torch.cat(found)
