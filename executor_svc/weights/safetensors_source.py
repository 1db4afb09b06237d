"""Weights from safetensors files, mapped into memory."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch

from executor_svc.weights.source import Blocks, WeightError, check_rows
from pagemill.safetensors_header import SafetensorInfo

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class SafetensorsSource:
    """`WeightSource` over one checkpoint's files; offsets were checked when the headers were read."""

    def __init__(self, tensors: dict[str, SafetensorInfo]) -> None:
        self._tensors = tensors
        self._maps: dict[Path, mmap.mmap] = {}

    def shape(self, name: str) -> tuple[int, ...] | None:
        """As `WeightSource.shape`."""
        info = self._tensors.get(name)
        return info.shape if info else None

    def read_into(self, name: str, out: torch.Tensor, first_row: int = 0) -> None:
        """As `WeightSource.read_into`."""
        check_rows(name, self.shape(name), tuple(out.shape), first_row)
        info = self._tensors[name]
        dtype = _DTYPES.get(info.dtype)
        if dtype is None:
            raise WeightError(f"tensor {name!r} has dtype {info.dtype}; {', '.join(_DTYPES)} are supported")
        skipped = first_row * (out.numel() // len(out)) * dtype.itemsize
        stored = torch.frombuffer(self._map(info.path), dtype=dtype, count=out.numel(), offset=info.offset + skipped)
        out.copy_(stored.view(out.shape))

    def blocks(self, name: str) -> Blocks | None:
        """As `WeightSource.blocks`: this format has none."""
        return None

    def close(self) -> None:
        """As `WeightSource.close`: there are none."""

    def _map(self, path: Path) -> mmap.mmap:
        if path not in self._maps:
            with path.open("rb") as file:
                # A private writable mapping, because torch warns about read-only memory; nothing is written.
                self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._maps[path]
