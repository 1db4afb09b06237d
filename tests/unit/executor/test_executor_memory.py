from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from executor_svc.memory import (
    DoesNotFitError,
    MemoryLimit,
    PoolRequest,
    measure_peak,
    read_limit,
    resident_bytes,
    size_pool,
)

GIB = 1 << 30
MEMINFO = f"MemTotal: {8 * GIB // 1024} kB\nMemFree: 1 kB\nMemAvailable: {6 * GIB // 1024} kB\n"


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (8 * GIB, "machine", 6 * GIB)),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}, (8 * GIB, "machine", 6 * GIB)),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{2 * GIB}\n"}, (2 * GIB, "cgroup", 2 * GIB)),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{7 * GIB}\n"}, (7 * GIB, "cgroup", 6 * GIB)),
        (
            # A limit on a level above counts as well.
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/memory.max": f"{3 * GIB}\n",
                "sys/fs/cgroup/a/b/memory.max": f"{5 * GIB}\n",
            },
            (3 * GIB, "cgroup", 3 * GIB),
        ),
        (
            # In a container the path may be the host's while only the root is mounted.
            {"proc/self/cgroup": "0::/docker/abc\n", "sys/fs/cgroup/memory.max": f"{GIB}\n"},
            (GIB, "cgroup", GIB),
        ),
        (
            {
                "proc/self/cgroup": "5:cpu:/x\n9:memory:/docker/abc\n0::/\n",
                "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": f"{4 * GIB}\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
            (4 * GIB, "cgroup", 4 * GIB),
        ),
        (
            {"proc/self/cgroup": "9:memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"},
            (8 * GIB, "machine", 6 * GIB),
        ),
        (
            {"proc/self/cgroup": "0::/../..\n", "sys/fs/cgroup/memory.max": "not a number\n"},
            (8 * GIB, "machine", 6 * GIB),
        ),
    ],
)
def test_the_tightest_limit_counts(tmp_path: Path, files: dict[str, str], expected: tuple[int, str, int]) -> None:
    limit = read_limit(tree(tmp_path, files))
    assert (limit.num_bytes, limit.source, limit.available_bytes) == expected


def request(**changes: Any) -> PoolRequest:
    values: dict[str, Any] = {
        "block_size": 16,
        "bytes_per_block": 1 << 20,
        "max_num_seqs": 64,
        "max_model_len": 2048,
        "max_model_len_is_explicit": False,
        "utilization": 0.5,
        **changes,
    }
    return PoolRequest(**values)


LIMIT = MemoryLimit(4 * GIB, "cgroup", 4 * GIB)


def blocks(request_: PoolRequest, limit: MemoryLimit = LIMIT, resident: int = GIB, activations: int = GIB // 2) -> int:
    return size_pool(request_, limit, resident_bytes=resident, activation_bytes=activations).num_blocks


def test_the_pool_is_what_is_left() -> None:
    assert blocks(request()) == 512  # 4 GiB / 2 - 1 - 0.5
    pool = size_pool(request(), LIMIT, resident_bytes=GIB, activation_bytes=GIB // 2)
    for part in ("cgroup 4.00 GiB x 0.5", "resident 1.00 GiB", "activations 0.50 GiB", "512 blocks", "8192 tokens"):
        assert part in pool.arithmetic
    assert "\n" not in pool.arithmetic


def test_no_more_than_is_free_now_or_than_could_be_used() -> None:
    assert blocks(request(), MemoryLimit(64 * GIB, "machine", 2 * GIB)) == 512
    assert blocks(request(max_num_seqs=2)) == 256


def test_what_the_operator_asked_for_comes_first() -> None:
    assert blocks(request(num_device_blocks=49)) == 49
    assert blocks(request(kv_memory_bytes=300 << 20)) == 300
    assert blocks(request(kv_memory_bytes=1 << 50, max_num_seqs=16)) == 16 * 128  # no more than could be used


@pytest.mark.parametrize(
    ("option", "request_"),
    [
        ("--num-device-blocks: 2.50 GiB", request(num_device_blocks=2561)),
        ("--num-device-blocks: 1024.00 GiB", request(num_device_blocks=1 << 20, kv_memory_bytes=1)),
        ("--kv-memory-bytes: 8.00 GiB", request(kv_memory_bytes=1 << 63)),
    ],
)
def test_more_than_the_limit_leaves_is_refused_in_one_line(option: str, request_: PoolRequest) -> None:
    assert blocks(request(num_device_blocks=2560)) == 2560
    with pytest.raises(DoesNotFitError) as caught:
        blocks(request_)
    assert str(caught.value) == (
        f"{option} do not fit, cgroup 4.00 GiB - resident 1.00 GiB - activations 0.50 GiB = 2.50 GiB"
    )


@pytest.mark.parametrize(
    "request_",
    [
        request(utilization=0.4),
        request(max_model_len=100_000),
        request(kv_memory_bytes=100 << 20),
        request(num_device_blocks=100, max_model_len_is_explicit=True),
    ],
)
def test_not_even_one_sequence_is_refused_in_one_line(request_: PoolRequest) -> None:
    with pytest.raises(DoesNotFitError, match="not even one sequence") as caught:
        blocks(request_)
    assert "\n" not in str(caught.value)


def test_a_model_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(DoesNotFitError, match="pool 0 blocks"):
        blocks(request(), resident=3 * GIB)


def test_the_peak_of_an_action_is_seen() -> None:
    def action() -> None:
        data = bytearray(64 << 20)
        data[::4096] = b"x" * len(data[::4096])

    assert 60 << 20 <= measure_peak(action) <= 90 << 20
    assert resident_bytes() > 10 << 20
