"""The compiled kernels behind ctypes: found, checked, and their structures as `src/kernels.h` declares them.

`pip install` compiles them (`[[tool.setuptools.ext-modules]]`); where no compiler was there, `load` says so and the
executor computes with torch alone. Structures hold bare addresses: whoever fills one keeps the memory alive.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import importlib.machinery
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch  # before the kernels: they then find its OpenMP loaded, and share its threads

ABI = 5
CODES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
"""PM_F32, PM_BF16, PM_I8."""
TILE = 128
"""Positions of a context that are computed together; see PM_TILE."""
PANEL = 16
"""Outputs of a panel of packed weights; see `src/linear.h`."""
BFLOAT16_ISA = "avx512bf16"
"""The instruction set whose products take bfloat16 as it is."""

_i32, _i64, _f32, _p = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class NativeError(RuntimeError):
    """The compiled kernels cannot be used; the text is one line that says why."""


class Pool(ctypes.Structure):
    """`pm_pool`."""

    _fields_ = (
        ("base", _p),
        ("bytes_per_block", _i64),
        ("scales_offset", _i64),
        ("num_layers", _i32),
        ("num_kv_heads", _i32),
        ("block_size", _i32),
        ("head_dim", _i32),
        ("dtype", _i32),
    )


class Rows(ctypes.Structure):
    """`pm_rows`."""

    _fields_ = (
        ("num_rows", _i32),
        ("table_width", _i32),
        ("num_heads", _i32),
        ("query_starts", _p),
        ("context_lens", _p),
        ("tables", _p),
    )


class Groups(ctypes.Structure):
    """`pm_groups`."""

    _fields_ = (
        ("num_groups", _i32),
        ("starts", _p),
        ("tokens", _p),
        ("lens", _p),
        ("rows", _p),
        ("shared_lens", _p),
    )


class Item(ctypes.Structure):
    """`pm_item`."""

    _fields_ = (
        ("row", _i32),
        ("kv_head", _i32),
        ("token", _i32),
        ("num_tokens", _i32),
        ("tile", _i32),
        ("num_tiles", _i32),
        ("position", _i32),
        ("flags", _i32),
        ("partials", _i64),
        ("cost", _i64),
    )


class Plan(ctypes.Structure):
    """`pm_plan`."""

    _fields_ = (
        ("items", _p),
        ("capacity", _i32),
        ("num_first", _i32),
        ("num_items", _i32),
        ("workspace_floats", _i64),
    )


class Attention(ctypes.Structure):
    """`pm_attention`."""

    _fields_ = (
        ("pool", ctypes.POINTER(Pool)),
        ("rows", ctypes.POINTER(Rows)),
        ("groups", ctypes.POINTER(Groups)),
        ("plan", ctypes.POINTER(Plan)),
        ("workspace", _p),
        ("query", _p),
        ("out", _p),
        ("query_stride", _i64),
        ("num_tokens", _i32),
        ("query_dtype", _i32),
        ("layer", _i32),
        ("window", _i32),
        ("scale", _f32),
    )


class Rope(ctypes.Structure):
    """`pm_rope`."""

    _fields_ = (
        ("pool", ctypes.POINTER(Pool)),
        ("heads", _p),
        ("stride", _i64),
        ("cos", _p),
        ("sin", _p),
        ("positions", _p),
        ("slots", _p),
        ("query_norm", _p),
        ("key_norm", _p),
        ("eps", _f32),
        ("num_tokens", _i32),
        ("num_heads", _i32),
        ("dtype", _i32),
        ("layer", _i32),
    )


class LinearCall(ctypes.Structure):
    """`pm_linear`."""

    _fields_ = (
        ("x", _p),
        ("weight", _p),
        ("bias", _p),
        ("residual", _p),
        ("out", _p),
        ("x_stride", _i64),
        ("rows", _i64),
        ("in_features", _i64),
        ("out_features", _i64),
        ("dtype", _i32),
    )


class QuantisedCall(ctypes.Structure):
    """`pm_quantised`."""

    _fields_ = (
        ("x", _p),
        ("residual", _p),
        ("out", _p),
        ("values", _p),
        ("scales", _p),
        ("mins", _p),
        ("bias", _p),
        ("x_stride", _i64),
        ("rows", _i64),
        ("in_features", _i64),
        ("out_features", _i64),
        ("dtype", _i32),
        ("format", _i32),
    )


class Norm(ctypes.Structure):
    """`pm_norm`."""

    _fields_ = (("x", _p), ("weight", _p), ("out", _p), ("size", _i64), ("dtype", _i32), ("eps", _f32))


class Silu(ctypes.Structure):
    """`pm_silu`."""

    _fields_ = (("gate_up", _p), ("out", _p), ("size", _i64), ("dtype", _i32))


class HeadNormsOf(ctypes.Structure):
    """`pm_head_norms`."""

    _fields_ = (("query", _p), ("key", _p), ("eps", _f32))


class CallKind(enum.IntEnum):
    """What a call of a sequence runs: PM_CALL_NORM and so on."""

    NORM = 0
    LINEAR = 1
    QUANTISED = 2
    SILU = 3
    ROPE = 4
    ATTEND = 5


class Call(ctypes.Structure):
    """`pm_call`."""

    _fields_ = (("arguments", _p), ("kind", _i32), ("layer", _i32), ("windowed", _i32))


class Step(ctypes.Structure):
    """`pm_step`."""

    _fields_ = (
        ("rows", _i64),
        ("rope", ctypes.POINTER(Rope)),
        ("whole", ctypes.POINTER(Attention)),
        ("windowed", ctypes.POINTER(Attention)),
    )


_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "pm_plan_attention": (_i32, (_p, _p, _p, _i32, _p)),
    "pm_attend": (_i32, (_p,)),
    "pm_rope_store": (None, (_p,)),
    "pm_rms_norm": (None, (_p, _i64, _p, _p, _i64, _i64, _f32, _i32)),
    "pm_silu_mul": (None, (_p, _p, _i64, _i64, _i32)),
    "pm_linear_forward": (_i32, (_p,)),
    "pm_pack_linear": (None, (_p, _p, _i64, _i64)),
    "pm_quantised_forward": (_i32, (_p,)),
    "pm_run": (_i32, (_p, _i32, _p)),
    "pm_abi": (_i32, ()),
    "pm_isa": (ctypes.c_char_p, ()),
    "pm_use_isa": (_i32, (ctypes.c_char_p,)),
    "pm_num_threads": (_i32, ()),
}


@dataclass(frozen=True, slots=True)
class Library:
    """The functions of `src/kernels.h` and `src/sequence.h`; each releases the interpreter's lock while it runs."""

    path: Path
    plan_attention: Callable[..., int]
    attend: Callable[..., int]
    rope_store: Callable[..., None]
    rms_norm: Callable[..., None]
    silu_mul: Callable[..., None]
    linear: Callable[..., int]
    pack_linear: Callable[..., None]
    quantised: Callable[..., int]
    run: Callable[..., int]
    num_threads: Callable[[], int]
    _isa: Callable[[], bytes]
    _use_isa: Callable[[bytes], int]

    @property
    def isa(self) -> str:
        """The instruction set in use: "avx512bf16", "avx512vnni", "avx512", "avx2" or "portable"."""
        return self._isa().decode()

    def use_isa(self, name: str) -> None:
        """Use another instruction set from the next call on. Raises NativeError if this CPU has none of that name."""
        if self._use_isa(name.encode()) != 0:
            raise NativeError(f"this CPU does not run the {name} kernels")


def open_library(path: Path) -> Library:
    """The kernels in this file. Raises NativeError."""
    try:
        dll = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(dll, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise NativeError(f"native kernels: {error}") from error
    if dll.pm_abi() != ABI:
        raise NativeError(f"native kernels: {path} has interface {dll.pm_abi()}, not {ABI}; install again")
    return Library(
        path=path,
        plan_attention=dll.pm_plan_attention,
        attend=dll.pm_attend,
        rope_store=dll.pm_rope_store,
        rms_norm=dll.pm_rms_norm,
        silu_mul=dll.pm_silu_mul,
        linear=dll.pm_linear_forward,
        pack_linear=dll.pm_pack_linear,
        quantised=dll.pm_quantised_forward,
        run=dll.pm_run,
        num_threads=dll.pm_num_threads,
        _isa=dll.pm_isa,
        _use_isa=dll.pm_use_isa,
    )


@functools.cache
def load() -> Library:
    """The kernels that were compiled with this installation. Raises NativeError."""
    folder = Path(__file__).parent
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = folder / f"kernels{suffix}"
        if path.exists():
            return open_library(path)
    raise NativeError("native kernels: not compiled (no C++ compiler when Pagemill was installed)")
