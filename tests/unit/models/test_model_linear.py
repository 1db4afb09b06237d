"""Who multiplies matrices of bfloat16: the compiled kernels or oneDNN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch

from executor_svc.models import layers
from executor_svc.native.library import Library


@dataclass
class Kernels:
    isa: str


@pytest.mark.parametrize(
    ("isa", "has_bfloat16", "has_amx", "ours"),
    [
        (None, False, False, False),
        (None, True, False, False),
        ("avx2", False, False, True),
        ("avx512vnni", False, False, True),
        ("avx512bf16", True, False, True),
        ("avx512bf16", True, True, False),
        ("portable", True, False, False),  # the others disagreed with it at the start
        ("portable", False, False, True),
    ],
)
def test_the_kernels_multiply_unless_onednn_has_better_instructions(
    isa: str | None, has_bfloat16: bool, has_amx: bool, ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "packs_bfloat16", lambda: has_bfloat16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    kernels: Any = None if isa is None else cast(Library, Kernels(isa))
    assert layers.computes_linear(kernels) == ours
