"""How much memory there is, and how many KV blocks that makes. Reads files of the kernel; changes nothing."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

NO_LIMIT = 1 << 60
"""cgroup v1 writes "no limit" as a number near 2**63; nothing this large is a limit."""

_GIB = 1024**3


class DoesNotFitError(RuntimeError):
    """The model or a single sequence does not fit; the text is one line for the operator."""


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The most this process may use, in bytes, and where that is from."""

    num_bytes: int
    source: str
    available_bytes: int
    """What the machine could give now without swapping; more than that is never planned with."""


@dataclass(frozen=True, slots=True)
class PoolRequest:
    """What the pool must serve, and what the operator asked for."""

    block_size: int
    bytes_per_block: int
    max_num_seqs: int
    max_model_len: int
    max_model_len_is_explicit: bool
    utilization: float
    kv_memory_bytes: int | None = None
    num_device_blocks: int | None = None


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The answer, with its arithmetic in one line."""

    num_blocks: int
    arithmetic: str


def read_limit(root: Path = Path("/")) -> MemoryLimit:
    """The tightest of the cgroup's limits (v2 or v1, at any level above this process) and the machine's memory."""
    machine, available = _read_meminfo(root)
    limit = MemoryLimit(machine, "machine", available)
    for path in _cgroup_files(root):
        value = _read_number(path)
        if value is not None and value < min(limit.num_bytes, NO_LIMIT):
            limit = MemoryLimit(value, "cgroup", min(available, value))
    return limit


def size_pool(request: PoolRequest, limit: MemoryLimit, *, resident_bytes: int, activation_bytes: int) -> PoolSize:
    """Blocks of the pool. Raises DoesNotFitError if it cannot hold one sequence, or if more is asked for than there is.

    `resident_bytes` is what the process holds now, weights included and no pool; `activation_bytes` what the largest
    step needs on top for a moment.
    """
    size = request.bytes_per_block
    cap = request.max_num_seqs * _blocks_for(request, request.max_model_len)
    if request.num_device_blocks is not None:
        found = request.num_device_blocks
        words = f"{found} blocks asked for"
    elif request.kv_memory_bytes is not None:
        found = min(request.kv_memory_bytes // size, cap)
        words = f"{_gib(request.kv_memory_bytes)} asked for"
    else:
        budget = int(limit.num_bytes * request.utilization) - resident_bytes - activation_bytes
        free = int(limit.available_bytes * request.utilization) - activation_bytes
        found = min(max(0, min(budget, free)) // size, cap)
        words = (
            f"{limit.source} {_gib(limit.num_bytes)} x {request.utilization:g} - resident {_gib(resident_bytes)}"
            f" - activations {_gib(activation_bytes)} = {_gib(budget)}; {_gib(free)} of that is free now"
        )
    if request.num_device_blocks is not None or request.kv_memory_bytes is not None:
        option = "--kv-memory-bytes" if request.num_device_blocks is None else "--num-device-blocks"
        _require_room(option, found * size, limit, {"resident": resident_bytes, "activations": activation_bytes})
    words = (
        f"{words}; block {size} bytes; cap {request.max_num_seqs} sequences x {request.max_model_len} tokens"
        f" = {cap} blocks; pool {found} blocks = {found * request.block_size} tokens = {_gib(found * size)}"
    )
    _require_one_sequence(request, found, words)
    return PoolSize(found, words)


HOST_SHARE = 0.5
"""Of what the device pool leaves. The rest stays free: the host tier fills up in time, the machine's cache must not."""
HOST_BLOCKS_PER_DEVICE_BLOCK = 2
"""Most host blocks by default. Beyond that a hit becomes rare, and registering memory with a driver takes seconds per
10 GiB."""


def size_host_pool(
    request: PoolRequest,
    limit: MemoryLimit,
    *,
    num_device_blocks: int,
    resident_bytes: int,
    activation_bytes: int,
    host_kv_memory_bytes: int | None = None,
) -> PoolSize:
    """Blocks of the host tier; 0 if it is off or nothing is left. Raises DoesNotFitError if more is asked for.

    On a CPU both tiers are the same memory: the device pool takes what it can use first, the host tier what is left.
    """
    size = request.bytes_per_block
    pool = num_device_blocks * size
    if host_kv_memory_bytes is not None:
        found = host_kv_memory_bytes // size
        words = f"{_gib(host_kv_memory_bytes)} asked for"
        taken_bytes = {"resident": resident_bytes, "activations": activation_bytes, "device pool": pool}
        _require_room("--host-kv-memory-bytes", found * size, limit, taken_bytes)
    else:
        budget = int(limit.num_bytes * request.utilization) - resident_bytes - activation_bytes - pool
        free = int(limit.available_bytes * request.utilization) - activation_bytes - pool
        left = max(0, min(budget, free))
        found = min(int(left * HOST_SHARE) // size, HOST_BLOCKS_PER_DEVICE_BLOCK * num_device_blocks)
        words = (
            f"{limit.source} {_gib(limit.num_bytes)} x {request.utilization:g} - resident {_gib(resident_bytes)}"
            f" - activations {_gib(activation_bytes)} - device pool {_gib(pool)} = {_gib(budget)}; {_gib(free)} of that"
            f" is free now; x {HOST_SHARE:g}, at most {HOST_BLOCKS_PER_DEVICE_BLOCK} x {num_device_blocks} blocks"
        )
    words = f"{words}; block {size} bytes; host tier {found} blocks = {found * request.block_size} tokens"
    return PoolSize(found, f"{words} = {_gib(found * size)}")


def _require_room(option: str, asked_bytes: int, limit: MemoryLimit, taken_bytes: dict[str, int]) -> None:
    """An explicit size may use the whole limit, but not more: the system gives memory late, and then kills for it."""
    left = limit.num_bytes - sum(taken_bytes.values())
    if asked_bytes > max(0, left):
        terms = "".join(f" - {name} {_gib(value)}" for name, value in taken_bytes.items())
        raise DoesNotFitError(
            f"{option}: {_gib(asked_bytes)} do not fit, {limit.source} {_gib(limit.num_bytes)}{terms} = {_gib(left)}"
        )


def _require_one_sequence(request: PoolRequest, found: int, words: str) -> None:
    """Blocks that the operator counted out may be fewer than the model's own limit needs; long prompts are refused."""
    is_counted = request.num_device_blocks is not None and not request.max_model_len_is_explicit
    needed = 1 if is_counted else _blocks_for(request, request.max_model_len)
    if found < needed:
        tokens = found * request.block_size
        hint = f"set --max-model-len {tokens} or less, or" if tokens > 1 else ""
        raise DoesNotFitError(
            f"not even one sequence of {request.max_model_len} tokens fits the KV pool: {needed} blocks needed,"
            f" {found} there ({words}); {hint} give more memory"
        )


def measure_peak(action: Callable[[], object]) -> int:
    """Bytes by which the process grew at most while `action` ran. 0 if the kernel does not tell or it did not grow."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from what is resident now
        before = _status_bytes("VmRSS")
        action()
        return max(0, _status_bytes("VmHWM") - before)
    except OSError:
        high = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        action()
        return max(0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - high) * _RUSAGE_UNIT


_RUSAGE_UNIT = 1 if sys.platform == "darwin" else 1024


def resident_bytes() -> int:
    """Memory the process holds now; file pages that are only mapped count while they are resident. 0: unknown."""
    try:
        return _status_bytes("VmRSS")
    except OSError:
        return 0


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {key}")


def _blocks_for(request: PoolRequest, num_tokens: int) -> int:
    return -(-num_tokens // request.block_size)


def _read_meminfo(root: Path) -> tuple[int, int]:
    found: dict[str, int] = {}
    for line in (root / "proc/meminfo").read_text().splitlines():
        key, _, rest = line.partition(":")
        if key in ("MemTotal", "MemAvailable"):
            found[key] = int(rest.split()[0]) * 1024
    return found["MemTotal"], found.get("MemAvailable", found["MemTotal"])


def _cgroup_files(root: Path) -> Iterator[Path]:
    """Limit files of this process's cgroup and of every one above it, v2 and v1; some may not exist."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            base, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):  # in a container the path may be the host's: the root is its own then
            yield base.joinpath(*parts[:depth], name)


def _read_number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB"
