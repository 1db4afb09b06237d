"""The attention backends that this machine can run, by name: "sdpa", and "native" once per instruction set."""

from __future__ import annotations

from executor_svc.attention.base import AttentionBackend
from executor_svc.attention.native import NativeBackend
from executor_svc.attention.sdpa import SdpaBackend
from executor_svc.native.library import NativeError, load


def _instruction_sets() -> list[str]:
    library = load()  # tests run where there is a compiler: that it is missing would be an error
    best = library.isa
    found = []
    for name in ("portable", "avx2", "avx512", "avx512vnni", "avx512bf16"):
        try:
            library.use_isa(name)
        except NativeError:
            continue
        found.append(name)
    library.use_isa(best)
    return found


NAMES = ["sdpa", *(f"native-{isa}" for isa in _instruction_sets())]


def make_backend(name: str) -> AttentionBackend:
    """Of these names. The instruction set holds for all native backends until the next call: make, then use."""
    if name == "sdpa":
        return SdpaBackend()
    library = load()
    library.use_isa(name.removeprefix("native-"))
    return NativeBackend(library)
