"""Reads the header of a GGUF file: metadata and where each tensor lies. No tensor data is read or copied.

The file may be hostile: every count and length is held against a cap and against the bytes that are left before
anything is allocated, and every tensor must lie inside the file. Whatever is wrong raises `GgufError` with one line.

Format: GGUF versions 2 and 3, little endian (ggml's docs/gguf.md). Metadata values come back as Python values: bool,
int, float, str, or a list of one of these. Shapes are outermost first, as torch and Hugging Face write them (the file
has them innermost first).
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAGIC = b"GGUF"
MAX_METADATA = 65_536
MAX_TENSORS = 65_536
MAX_KEY_BYTES = 65_535
MAX_STRING_BYTES = 16 * 1024 * 1024
MAX_ARRAY_ITEMS = 4 * 1024 * 1024
"""Items over all arrays of one file; the largest vocabularies have 0.3 M tokens and 0.6 M merges."""
MAX_NAME_BYTES = 256
MAX_DIMS = 4
MAX_ALIGNMENT = 1 << 20

MetadataValue = Any


class GgufError(ValueError):
    """The file is no GGUF file that this reader accepts; the text is one line for the operator."""


@dataclass(frozen=True, slots=True)
class GgmlType:
    """How tensor values are stored: `block_size` values take `block_bytes` bytes."""

    name: str
    type_id: int
    block_size: int
    block_bytes: int


_TYPES = (
    ("F32", 0, 1, 4),
    ("F16", 1, 1, 2),
    ("Q4_0", 2, 32, 18),
    ("Q4_1", 3, 32, 20),
    ("Q5_0", 6, 32, 22),
    ("Q5_1", 7, 32, 24),
    ("Q8_0", 8, 32, 34),
    ("Q2_K", 10, 256, 84),
    ("Q3_K", 11, 256, 110),
    ("Q4_K", 12, 256, 144),
    ("Q5_K", 13, 256, 176),
    ("Q6_K", 14, 256, 210),
    ("IQ2_XXS", 16, 256, 66),
    ("IQ2_XS", 17, 256, 74),
    ("IQ3_XXS", 18, 256, 98),
    ("IQ1_S", 19, 256, 50),
    ("IQ4_NL", 20, 32, 18),
    ("IQ3_S", 21, 256, 110),
    ("IQ2_S", 22, 256, 82),
    ("IQ4_XS", 23, 256, 136),
    ("I8", 24, 1, 1),
    ("I16", 25, 1, 2),
    ("I32", 26, 1, 4),
    ("I64", 27, 1, 8),
    ("F64", 28, 1, 8),
    ("IQ1_M", 29, 256, 56),
    ("BF16", 30, 1, 2),
    ("TQ1_0", 34, 256, 54),
    ("TQ2_0", 35, 256, 66),
    ("MXFP4", 39, 32, 17),
)
GGML_TYPES = {type_id: GgmlType(name, type_id, size, nbytes) for name, type_id, size, nbytes in _TYPES}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies in the file."""

    name: str
    shape: tuple[int, ...]
    """Outermost first."""
    type: GgmlType
    offset: int
    """Bytes from the start of the file."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Everything of a GGUF file but its tensor data."""

    path: Path
    version: int
    metadata: dict[str, MetadataValue]
    tensors: dict[str, TensorInfo]
    file_bytes: int


def is_gguf(path: Path) -> bool:
    """Whether `path` is a file that begins like a GGUF file."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == MAGIC


def read_header(path: Path) -> GgufHeader:
    """The header of the GGUF file at `path`. Raises GgufError, or OSError when the file cannot be opened."""
    with path.open("rb") as file:
        size = path.stat().st_size
        if size < 24:
            raise GgufError(f"{path.name}: {size} bytes are too few for a GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _read(_Cursor(data, size), path)
            except GgufError as error:
                raise GgufError(f"{path.name}: {error}") from None


class _Cursor:
    """A position in the file; every read moves it and raises GgufError rather than leave the file."""

    def __init__(self, data: mmap.mmap, size: int) -> None:
        self.data = data
        self.size = size
        self.pos = 0
        self.array_items = 0

    def take(self, nbytes: int) -> int:
        """Move past `nbytes` bytes; returns where they begin."""
        start = self.pos
        if nbytes > self.size - start:
            raise GgufError(f"truncated: {nbytes} bytes wanted at offset {start}, {self.size - start} are left")
        self.pos = start + nbytes
        return start

    def u32(self) -> int:
        value: int = struct.unpack_from("<I", self.data, self.take(4))[0]
        return value

    def u64(self) -> int:
        value: int = struct.unpack_from("<Q", self.data, self.take(8))[0]
        return value

    def count(self, what: str, cap: int, item_bytes: int) -> int:
        """A number of items that takes at least `item_bytes` each, checked before anybody allocates for them."""
        value = self.u64()
        if value > cap:
            raise GgufError(f"{value} {what}, more than the {cap} allowed")
        if value * item_bytes > self.size - self.pos:
            raise GgufError(f"truncated: {value} {what} do not fit into the {self.size - self.pos} bytes left")
        return value

    def text(self, what: str, cap: int) -> str:
        length = self.count(f"bytes of {what}", cap, 1)
        start = self.take(length)
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError:
            raise GgufError(f"{what} at offset {start} is not UTF-8") from None


_STRING = 8
_ARRAY = 9
_BOOL = 7
# value type -> struct code; 7 is a byte that must be 0 or 1
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}


def _read(cursor: _Cursor, path: Path) -> GgufHeader:
    if cursor.data[cursor.take(4) : 4] != MAGIC:
        raise GgufError("not a GGUF file (wrong magic bytes)")
    version = cursor.u32()
    if version not in (2, 3):
        raise GgufError(f"GGUF version {version} is not supported (2 and 3, little endian, are)")
    num_tensors = cursor.count("tensors", MAX_TENSORS, 24)
    num_metadata = cursor.count("metadata entries", MAX_METADATA, 13)
    metadata: dict[str, MetadataValue] = {}
    for _ in range(num_metadata):
        key = cursor.text("a metadata key", MAX_KEY_BYTES)
        if key in metadata:
            raise GgufError(f"metadata key {key!r} appears twice")
        metadata[key] = _value(cursor, cursor.u32(), key)
    tensors = _tensors(cursor, num_tensors, _alignment(metadata))
    return GgufHeader(path, version, metadata, tensors, cursor.size)


def _value(cursor: _Cursor, kind: int, key: str) -> MetadataValue:
    if kind == _STRING:
        return cursor.text(f"the value of {key!r}", MAX_STRING_BYTES)
    if kind == _ARRAY:
        item_kind = cursor.u32()
        return _strings(cursor, key) if item_kind == _STRING else _numbers(cursor, item_kind, key)
    return _scalars(cursor, kind, 1, key)[0]


def _scalars(cursor: _Cursor, kind: int, count: int, key: str) -> list[bool] | list[int] | list[float]:
    code = _SCALARS.get(kind)
    if code is None:
        raise GgufError(f"value type {kind} of {key!r} is not supported")
    layout = struct.Struct(f"<{count}{code}")
    values = layout.unpack_from(cursor.data, cursor.take(layout.size))
    return [value != 0 for value in values] if kind == _BOOL else list(values)


def _array_count(cursor: _Cursor, key: str, item_bytes: int) -> int:
    count = cursor.count(f"items in {key!r}", MAX_ARRAY_ITEMS, item_bytes)
    cursor.array_items += count
    if cursor.array_items > MAX_ARRAY_ITEMS:
        raise GgufError(f"more than {MAX_ARRAY_ITEMS} array items in the metadata")
    return count


def _numbers(cursor: _Cursor, kind: int, key: str) -> list[bool] | list[int] | list[float]:
    code = _SCALARS.get(kind)
    if code is None:
        raise GgufError(f"an array of value type {kind} in {key!r} is not supported")
    return _scalars(cursor, kind, _array_count(cursor, key, struct.calcsize(f"<{code}")), key)


def _strings(cursor: _Cursor, key: str) -> list[str]:
    """An array of strings; written flat because a vocabulary has some 100,000 of them and start-up waits for it."""
    count = _array_count(cursor, key, 8)
    data, size, pos = cursor.data, cursor.size, cursor.pos
    length_at: Callable[..., tuple[int, ...]] = struct.Struct("<Q").unpack_from
    values: list[str] = []
    try:
        for _ in range(count):
            if size - pos < 8:
                raise GgufError(f"truncated inside {key!r}")
            end = pos + 8 + length_at(data, pos)[0]
            if end > size or end - pos - 8 > MAX_STRING_BYTES:
                raise GgufError(f"a string in {key!r} is longer than the file or than {MAX_STRING_BYTES} bytes")
            values.append(data[pos + 8 : end].decode("utf-8"))
            pos = end
    except UnicodeDecodeError:
        raise GgufError(f"a string in {key!r} at offset {pos} is not UTF-8") from None
    cursor.pos = pos
    return values


def _alignment(metadata: dict[str, MetadataValue]) -> int:
    value = metadata.get("general.alignment", 32)
    if not isinstance(value, int) or not 8 <= value <= MAX_ALIGNMENT or value % 8:
        raise GgufError(f"general.alignment must be a multiple of 8 up to {MAX_ALIGNMENT} (got {value!r})")
    return value


def _tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, TensorInfo]:
    found: dict[str, tuple[tuple[int, ...], GgmlType, int]] = {}
    for _ in range(count):
        name = cursor.text("a tensor name", MAX_NAME_BYTES)
        if name in found:
            raise GgufError(f"tensor {name!r} appears twice")
        found[name] = _tensor_entry(cursor, name, alignment)
    data_start = -(-cursor.pos // alignment) * alignment
    tensors = {}
    for name, (shape, kind, offset) in found.items():
        nbytes = _num_values(shape) // kind.block_size * kind.block_bytes
        if data_start + offset + nbytes > cursor.size:
            raise GgufError(f"tensor {name!r} ends at {data_start + offset + nbytes}, the file at {cursor.size}")
        tensors[name] = TensorInfo(name, shape, kind, data_start + offset, nbytes)
    return tensors


def _tensor_entry(cursor: _Cursor, name: str, alignment: int) -> tuple[tuple[int, ...], GgmlType, int]:
    num_dims = cursor.u32()
    if not 1 <= num_dims <= MAX_DIMS:
        raise GgufError(f"tensor {name!r} has {num_dims} dimensions, 1 to {MAX_DIMS} are allowed")
    shape = tuple(cursor.u64() for _ in range(num_dims))[::-1]
    type_id = cursor.u32()
    kind = GGML_TYPES.get(type_id)
    if kind is None:
        raise GgufError(f"tensor {name!r} has the unknown type {type_id}")
    if 0 in shape or shape[-1] % kind.block_size:
        raise GgufError(f"tensor {name!r} of shape {shape} does not hold whole {kind.name} blocks")
    if _num_values(shape) > cursor.size * 64:  # no type packs more than 8 values into a byte
        raise GgufError(f"tensor {name!r} of shape {shape} cannot lie in this file")
    offset = cursor.u64()
    if offset % alignment:
        raise GgufError(f"tensor {name!r} at offset {offset} is not aligned to {alignment}")
    return shape, kind, offset


def _num_values(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
