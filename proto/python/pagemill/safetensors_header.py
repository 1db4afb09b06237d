"""Reads the header of safetensors files: which tensors there are and where they lie. No tensor data is read.

The file may be hostile: sizes are checked before anything is allocated, every tensor must lie inside the file and have
exactly the bytes that its dtype and shape ask for. Whatever is wrong raises `SafetensorsError` with one line.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_HEADER_BYTES = 100_000_000
"""The format's own cap."""
MAX_TENSORS = 1_000_000
MAX_SHARDS = 4_096

DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
    "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip


class SafetensorsError(ValueError):
    """The file or index is not acceptable; the text is one line for the operator."""


@dataclass(frozen=True, slots=True)
class SafetensorInfo:
    """Where one tensor lies."""

    name: str
    dtype: str
    """As in the file: F32, BF16, …"""
    shape: tuple[int, ...]
    path: Path
    offset: int
    """Bytes from the start of the file."""
    nbytes: int


def read_header(path: Path) -> dict[str, SafetensorInfo]:
    """The tensors of one safetensors file by name. Raises SafetensorsError, or OSError."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
            raise SafetensorsError(f"{path.name}: a header of {length} bytes does not fit (file: {size} bytes)")
        raw = file.read(length)
    try:
        header = json.loads(raw, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError):
        raise SafetensorsError(f"{path.name}: the header is not the JSON of a safetensors file") from None
    if not isinstance(header, dict) or len(header) > MAX_TENSORS:
        raise SafetensorsError(f"{path.name}: the header is not an object of at most {MAX_TENSORS} tensors")
    header.pop("__metadata__", None)
    return {name: _entry(path, name, entry, 8 + length, size) for name, entry in header.items()}


def read_checkpoint(directory: Path) -> dict[str, SafetensorInfo]:
    """The tensors of a Hugging Face directory: model.safetensors, or the shards of its index.

    Raises SafetensorsError when there is neither, naming pickle files if these are all there is (never loaded).
    """
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file() and not index.is_file():
        return read_header(single)
    if not index.is_file():
        pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in directory.glob(pattern))
        if pickles:
            raise SafetensorsError(
                f"{directory.name}: only pickle weights ({pickles[0]}), which can run code when they are loaded; "
                "convert them to safetensors"
            )
        raise SafetensorsError(f"{directory.name}: no model.safetensors and no model.safetensors.index.json")
    return _read_shards(directory, index)


def _read_shards(directory: Path, index: Path) -> dict[str, SafetensorInfo]:
    if index.stat().st_size > MAX_HEADER_BYTES:
        raise SafetensorsError(f"{index.name}: larger than {MAX_HEADER_BYTES} bytes")
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        shards = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise SafetensorsError(f"{index.name}: no weight_map") from None
    if len(shards) > MAX_SHARDS:
        raise SafetensorsError(f"{index.name}: {len(shards)} shards, more than the {MAX_SHARDS} allowed")
    tensors: dict[str, SafetensorInfo] = {}
    for shard in shards:
        # A name with a path in it could point outside the model directory.
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise SafetensorsError(f"{index.name}: {shard!r} is not the plain name of a safetensors file")
        if not (directory / shard).is_file():
            raise SafetensorsError(f"{index.name}: shard {shard} is missing")
        tensors.update(read_header(directory / shard))
    missing = [name for name in weight_map if name not in tensors]
    if missing:
        raise SafetensorsError(f"{index.name}: {missing[0]!r} and {len(missing) - 1} others are in no shard")
    return tensors


def _entry(path: Path, name: str, entry: Any, data_start: int, size: int) -> SafetensorInfo:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise SafetensorsError(f"{path.name}: tensor {name!r} lacks dtype, shape or data_offsets") from None
    numbers = (*shape, begin, end)
    if not all(type(n) is int and 0 <= n < 1 << 62 for n in numbers) or dtype not in DTYPE_BYTES or len(shape) > 8:
        raise SafetensorsError(f"{path.name}: tensor {name!r} has bad dtype, shape or offsets")
    nbytes = DTYPE_BYTES[dtype]
    for dim in shape:
        nbytes *= dim
    if end - begin != nbytes or data_start + end > size:
        raise SafetensorsError(
            f"{path.name}: tensor {name!r} of {dtype} {list(shape)} needs {nbytes} bytes, "
            f"offsets {begin}..{end} in a file of {size} bytes give other ones"
        )
    return SafetensorInfo(name, dtype, shape, path, data_start + begin, nbytes)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("duplicate key")
    return result
