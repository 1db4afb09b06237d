"""The host tier's memory: how large, lazily given, and registered with a driver (of which there is a fake here)."""

from __future__ import annotations

import mmap
from typing import Any

import pytest

from executor_svc.kv.copy_cuda import HostRegistration
from executor_svc.kv.host import HostPool
from executor_svc.memory import DoesNotFitError, MemoryLimit, PoolRequest, resident_bytes, size_host_pool

GIB, MIB = 1 << 30, 1 << 20
LIMIT = MemoryLimit(8 * GIB, "cgroup", 8 * GIB)
REQUEST = PoolRequest(
    block_size=16,
    bytes_per_block=MIB,
    max_num_seqs=64,
    max_model_len=2048,
    max_model_len_is_explicit=False,
    utilization=0.75,
)


def host_blocks(limit: MemoryLimit = LIMIT, num_device_blocks: int = 2048, **more: Any) -> int:
    size = size_host_pool(
        REQUEST, limit, num_device_blocks=num_device_blocks, resident_bytes=GIB, activation_bytes=GIB // 2, **more
    )
    assert "\n" not in size.arithmetic
    return size.num_blocks


def test_the_host_tier_gets_half_of_what_the_pool_leaves() -> None:
    assert host_blocks() == (6 - 1 - 0.5 - 2) * 1024 / 2
    assert host_blocks(MemoryLimit(64 * GIB, "machine", 8 * GIB)) == (6 - 0.5 - 2) * 1024 / 2
    assert host_blocks(num_device_blocks=100) == 200
    assert host_blocks(num_device_blocks=8192) == 0


def test_what_the_operator_asked_for_comes_first() -> None:
    assert host_blocks(host_kv_memory_bytes=3 * MIB + 5) == 3
    assert host_blocks(host_kv_memory_bytes=0) == 0
    left = int((8 - 1 - 0.5 - 2) * GIB)  # of the whole limit: who sets a size has chosen the share as well
    assert host_blocks(host_kv_memory_bytes=left) == left // MIB


@pytest.mark.parametrize("asked", [int(4.5 * GIB) + MIB, 1 << 50, (1 << 63) - 1, 1 << 63, 1 << 80])
def test_more_than_the_limit_leaves_is_refused_in_one_line(asked: int) -> None:
    with pytest.raises(DoesNotFitError) as caught:
        host_blocks(host_kv_memory_bytes=asked)
    line = str(caught.value)
    assert line.startswith("--host-kv-memory-bytes: ")
    arithmetic = "cgroup 8.00 GiB - resident 1.00 GiB - activations 0.50 GiB - device pool 2.00 GiB = 4.50 GiB"
    assert line.endswith(arithmetic)
    assert "\n" not in line


def test_the_pages_of_the_machine_that_are_busy_now_do_not_refuse_a_size() -> None:
    assert host_blocks(MemoryLimit(8 * GIB, "machine", GIB), host_kv_memory_bytes=GIB) == 1024


def test_the_arithmetic_is_in_the_line() -> None:
    line = size_host_pool(
        REQUEST, LIMIT, num_device_blocks=2048, resident_bytes=GIB, activation_bytes=GIB // 2
    ).arithmetic
    for part in ("cgroup 8.00 GiB x 0.75", "device pool 2.00 GiB", "x 0.5", "host tier 1280 blocks"):
        assert part in line


def test_memory_is_taken_when_a_block_is_written() -> None:
    before = resident_bytes()
    pool = HostPool(4096, MIB)
    blocks = pool.block_bytes()
    assert blocks.shape == (4096, MIB)
    blocks[7] = 1
    assert resident_bytes() - before < 64 * MIB
    assert blocks[7, -1] == 1
    assert HostPool(0, 100).block_bytes().shape == (0, 100)


@pytest.mark.parametrize("num_blocks", [1 << 42, 1 << 43, 1 << 60])
def test_a_tier_beyond_the_address_space_is_an_os_error(num_blocks: int) -> None:
    with pytest.raises(OSError, match="Cannot allocate memory"):
        HostPool(num_blocks, MIB)


class FakeDriver:
    def __init__(self, refuses_at: int = -1) -> None:
        self.refuses_at = refuses_at
        self.registered: dict[int, int] = {}
        self.num_calls = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.num_calls += 1
        if self.num_calls - 1 == self.refuses_at:
            return 2
        assert flags == 0
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


@pytest.mark.parametrize("bytes_per_block", [368_640, 3000, 4096, 2 * MIB])
def test_memory_is_registered_in_chunks_on_borders_of_blocks_and_pages(bytes_per_block: int) -> None:
    driver, base = FakeDriver(), 1 << 40
    num_blocks = 150 * GIB // bytes_per_block
    registration = HostRegistration(base, num_blocks, bytes_per_block, cudart=driver)
    assert registration.is_pinned
    assert len(driver.registered) == 3
    end = base
    for address, size in driver.registered.items():
        assert address == end
        assert size <= 64 * GIB
        assert (address - base) % bytes_per_block == 0
        assert address % mmap.PAGESIZE == 0
        assert (address - base) // bytes_per_block % registration.chunk_blocks == 0
        end += size
    assert end == base + num_blocks * bytes_per_block
    registration.close()
    assert not driver.registered


def test_memory_that_cannot_be_registered_stays_pageable_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    driver = FakeDriver(refuses_at=1)
    registration = HostRegistration(1 << 40, 150 * 1024, MIB, cudart=driver)
    assert not registration.is_pinned
    assert not driver.registered
    assert "host memory stays pageable" in caplog.text
