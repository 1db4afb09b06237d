"""Whether the kernels of this CPU's instruction set compute what the portable ones do, asked once at start.

A compiler or a virtual machine that gets an instruction wrong gives wrong tokens and no error. The question costs
under 0.1 s; an instruction set that fails it is not used.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch

from executor_svc.attention.native import NativeBackend
from executor_svc.attention.rotation import HeadNorms, Rotation
from executor_svc.batch import Batch
from executor_svc.kv.geometry import KvGeometry
from executor_svc.kv.pool import KvPool
from executor_svc.models.layers import Linear, RmsNorm, SiluMul
from executor_svc.models.quantised import QuantisedLinear
from executor_svc.native.library import Library
from executor_svc.weights.quantised import GROUP, PANEL, Format, QuantisedMatrix
from pagemill.logs import kv

log = logging.getLogger(__name__)

PORTABLE = "portable"
_HEADS, _KV_HEADS, _HEAD_DIM, _BLOCK_SIZE, _CONTEXT, _NEW = 6, 2, 64, 16, 170, 7
_MOST_ERROR = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""Of results around 1. Summing in another order moves float32 by 1e-6; bf16 results differ by a unit in the last place
or two. A wrong lane or a skipped position moves them by far more."""


def use_only_what_agrees(library: Library) -> None:
    """Keep the chosen instruction set if it agrees with the portable kernels, else use those, with a warning."""
    chosen = library.isa
    if chosen == PORTABLE:
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a hundred tiny calls: beside other processes threads would wait for each other
    try:
        error = _disagreement(library, chosen)
    finally:
        torch.set_num_threads(threads)
    if error is not None:
        log.warning("kernels disagree, the portable ones are used", extra=kv(isa=chosen, error=error))
        library.use_isa(PORTABLE)


def _disagreement(library: Library, chosen: str) -> float | None:
    """The first error too large, NaN included; None if there is none. Leaves the chosen instruction set in use."""
    for dtype, most in _MOST_ERROR.items():
        for kv_dtype in (torch.float32, torch.bfloat16, torch.int8):
            library.use_isa(PORTABLE)
            expected = _results(library, dtype, kv_dtype)
            library.use_isa(chosen)
            error = float((_results(library, dtype, kv_dtype) - expected).abs().max())
            if not error <= most:
                return error
    return None


def _results(library: Library, dtype: torch.dtype, kv_dtype: torch.dtype) -> torch.Tensor:
    """Of every kernel on one small problem, end to end, flat in float32."""
    random = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(dtype)

    num_blocks = -(-_CONTEXT // _BLOCK_SIZE)
    pool = KvPool(KvGeometry(1, _KV_HEADS, _HEAD_DIM, _BLOCK_SIZE, kv_dtype), num_blocks)
    table = torch.randperm(num_blocks, generator=random).to(torch.int32)[None]
    angles = torch.randn(_CONTEXT, _HEAD_DIM // 2, generator=random)
    norms = HeadNorms(normal(_HEAD_DIM), normal(_HEAD_DIM), 1e-5)
    out: list[torch.Tensor] = []
    for first, end in ((0, _CONTEXT - _NEW), (_CONTEXT - _NEW, _CONTEXT)):
        positions = torch.arange(first, end)
        slots = table[0, positions // _BLOCK_SIZE].long() * _BLOCK_SIZE + positions % _BLOCK_SIZE
        batch = Batch(torch.zeros_like(positions), positions, slots, [end - first], [end], table, [])
        step = NativeBackend(library).begin(batch, pool)
        heads = normal(end - first, _HEADS + 2 * _KV_HEADS, _HEAD_DIM)
        query = step.rotate_and_write(0, heads, Rotation(angles.cos(), angles.sin(), positions), norms)
        out += [query, step.attend(0, query)]
    x, weight = normal(9, 214), normal(214)
    out += [RmsNorm(weight, 1e-5, library)(x), SiluMul(library)(x)]
    # 7 panels, so that 4, 2 and 1 are taken at once, and more inputs than are multiplied in one go.
    dense, bias = normal(101, 300).to(torch.bfloat16) / 18, normal(101).to(torch.bfloat16)
    linear = Linear(dense, bias, library, pack=True)
    for rows in (2, 40):  # panels widened on the way, and once for all
        out.append(linear.add_to(normal(rows, 101), normal(rows, 300)))
    for matrix in _matrices(random):
        quantised = QuantisedLinear(matrix, bias[:37], library)
        out += [quantised.add_to(normal(rows, 37), normal(rows, 224)) for rows in (1, 11)]
    return torch.cat([result.float().flatten() for result in out])


def _matrices(random: torch.Generator) -> Iterator[QuantisedMatrix]:
    """(37, 224) in each format, with all numbers that a format has."""
    panels, groups = 3, 224 // GROUP
    for form, words in ((Format.INT8_ROWS, 56), (Format.INT8_GROUPS, 56), (Format.INT4_GROUPS, 28)):
        values = torch.randint(0, 256, (panels, words, PANEL, 4), generator=random, dtype=torch.uint8)
        if form == Format.INT8_ROWS:
            yield QuantisedMatrix(form, 37, 224, values, torch.rand(panels, PANEL, generator=random) / 1000)
            continue
        scales, mins = (torch.rand(panels, groups, PANEL, generator=random).half() / 500 for _ in range(2))
        yield QuantisedMatrix(form, 37, 224, values, scales)
        if form == Format.INT4_GROUPS:
            yield QuantisedMatrix(form, 37, 224, values, scales, mins)
