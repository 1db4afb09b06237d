"""The compiled kernels, once per instruction set that this machine runs, and once as AVX-512 would compute."""

from __future__ import annotations

import pytest

from executor_svc.native.library import Library, load, open_library
from tests.unit.models.backends import NAMES, make_backend
from tests.unit.native.builds import build


@pytest.fixture(params=[*(name for name in NAMES if name != "sdpa"), "wide"])
def kernels(request: pytest.FixtureRequest) -> Library:
    """ "wide": vectors of 16 floats, the products of bf16 and of u8 with s8 emulated."""
    if request.param == "wide":
        return open_library(build("-O2", "-DVW=16", "-DPM_EMULATE_DOT"))
    make_backend(request.param)
    return load()
