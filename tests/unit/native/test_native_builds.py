"""The kernels under the address and undefined-behaviour sanitizers, and what happens when they are missing."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from executor_svc.attention.base import AttentionError
from executor_svc.native import library
from executor_svc.native.library import Library, NativeError, load, open_library
from executor_svc.native.verify import use_only_what_agrees
from executor_svc.runner import load as load_runner
from tests.unit.modelfiles.gguf_writer import LLAMA_TENSORS, gguf, llama_metadata
from tests.unit.native.builds import build

SANITIZE = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
SCRIPT = """
import sys
import torch
from executor_svc.attention.native import NativeBackend
from executor_svc.native.library import open_library
from executor_svc.attention import native
from tests.unit.models.test_model_attention import run_case
from tests.unit.models.test_model_prefixes import make_case
from tests.unit.native.test_native_attention import SHARING
from tests.unit.native.test_native_elementwise import (
    test_int8_is_bit_for_bit_what_torch_stores, test_linear, test_rms_norm, test_rotate_and_write, test_silu_mul)
from tests.unit.native.test_native_quantised import KINDS, check_products, test_inputs_that_are_not_numbers
library = open_library(sys.argv[1])
backend = NativeBackend(library)
native.PREFIX_COST = 0
for kv_dtype in (torch.float32, torch.bfloat16, torch.int8):
    for dtype in (torch.float32, torch.bfloat16):
        case = make_case(SHARING, block_size=16, dtype=dtype, kv_dtype=kv_dtype)
        step = backend.begin(case.batch, case.pool)
        step.write(0, case.kv)
        assert case.error(step.attend(0, case.query)) < 0.04
        rows = [(1, 1), (7, 7), (300, 340)]
        assert run_case(backend, rows, dtype=dtype, kv_dtype=kv_dtype, dim=48, block_size=3) < 0.04
        assert run_case(backend, rows, dtype=dtype, kv_dtype=kv_dtype, heads=130, kv_heads=1) < 0.04
        test_rotate_and_write(library, dtype, kv_dtype, 80, 3, True, 9)
for dtype in (torch.float32, torch.bfloat16):
    test_int8_is_bit_for_bit_what_torch_stores(library, dtype)
    for size in (1, 7, 577):
        test_rms_norm(library, dtype, size, 3)
        test_silu_mul(library, dtype, size, 3)
    for rows in (1, 5, 97):
        test_linear(library, dtype, True, 7, 33, rows)
    test_linear(library, dtype, True, 301, 101, 200)
    for kind in KINDS:
        for rows, in_features in ((1, 32), (5, 96), (97, 64), (7, 7 if kind == "int8" else 32)):
            check_products(library, dtype, kind, 33, in_features, rows)
for kind in KINDS:
    test_inputs_that_are_not_numbers(library, kind)
print("clean")
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("flags", [(), ("-DVW=16", "-DPM_EMULATE_DOT")])
def test_no_read_or_write_out_of_bounds(flags: tuple[str, ...]) -> None:
    path = build(*SANITIZE, *flags)
    runtime = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    env = os.environ | {
        "LD_PRELOAD": runtime.stdout.strip(),
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter's own
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "OMP_NUM_THREADS": "2",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(path)], env=env, capture_output=True, text=True, timeout=280, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "clean"), done.stderr[-3000:]


def test_the_sanitizers_would_see_it() -> None:
    """A control: a row written one vector too far ends the process."""
    path = build(*SANITIZE)
    runtime = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    script = (
        "import ctypes, sys; import torch; dll = ctypes.CDLL(sys.argv[1])\n"
        "libc = ctypes.CDLL(None); libc.malloc.restype = ctypes.c_void_p\n"
        "x = libc.malloc(64)\n"
        "dll.pm_silu_mul(ctypes.c_void_p(x), ctypes.c_void_p(x), ctypes.c_int64(1), ctypes.c_int64(9), 0)\n"
    )
    env = os.environ | {"LD_PRELOAD": runtime.stdout.strip(), "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    assert "ERROR: AddressSanitizer" in done.stderr


def test_a_library_of_another_version_is_refused() -> None:
    path = build("-O0", "-DPM_ABI=99")
    with pytest.raises(NativeError, match="interface 99, not"):
        open_library(path)


def test_without_the_library_torch_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the kernels were asked for: then it is an error, in one line."""
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    load.cache_clear()
    try:
        file = tmp_path / "tiny.gguf"
        file.write_bytes(gguf(llama_metadata(), LLAMA_TENSORS))
        assert load_runner(file, dtype="float32", num_threads=1).attention_name == "sdpa"
        with pytest.raises(AttentionError, match=r"^attention backend native: .*not compiled") as error:
            load_runner(file, attention="native")
        assert "\n" not in str(error.value)
    finally:
        load.cache_clear()


@pytest.mark.parametrize("broken", ["rms_norm", "silu_mul", "rope_store", "attend", "linear", "quantised"])
def test_an_instruction_set_that_computes_wrongly_is_not_used(broken: str, caplog: pytest.LogCaptureFixture) -> None:
    """Each kernel in turn gives zeros, as if by a bug, on all instruction sets but the portable one."""
    library = load()
    best = next(name for name in ("avx512bf16", "avx512vnni", "avx512", "avx2", "portable") if _has(library, name))
    if best == "portable":
        pytest.skip("this CPU has the portable kernels only")
    right = getattr(library, broken)

    def wrong(*arguments: Any) -> Any:
        if library.isa == "portable":
            return right(*arguments)
        match broken:  # zeros, because a result that is not written at all may hold the right one from before
            case "rms_norm":
                ctypes.memset(arguments[3], 0, 2 * arguments[4] * arguments[5])
            case "silu_mul":
                ctypes.memset(arguments[1], 0, 2 * arguments[2] * arguments[3])
            case "attend":
                call = arguments[0]._obj
                ctypes.memset(call.out, 0, 2 * call.num_tokens * call.query_stride)
            case "linear" | "quantised":
                call = arguments[0]._obj
                ctypes.memset(call.out, 0, 2 * call.rows * call.out_features)
        return 0

    library.use_isa(best)
    use_only_what_agrees(library)
    assert library.isa == best
    assert not caplog.records
    parts: dict[str, Any] = {broken: wrong}
    doubtful = dataclasses.replace(library, **parts)
    use_only_what_agrees(doubtful)
    assert library.isa == "portable"
    assert [r.message for r in caplog.records] == ["kernels disagree, the portable ones are used"]
    library.use_isa(best)


def _has(library: Library, name: str) -> bool:
    try:
        library.use_isa(name)
    except NativeError:
        return False
    return True


def test_an_instruction_set_this_cpu_has_not() -> None:
    with pytest.raises(NativeError, match="does not run the z80 kernels"):
        load().use_isa("z80")
