"""A driver module for tests of virtual memory without a GPU: bookkeeping that is as strict as the real one.

All devices of a `FakeMachine` are one process here, each rank with a `FakeDriver` of its own, whose addresses differ.
Physical memory is a file in memory, so that file descriptors of it can really be passed and compared.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

from moebius.kernels.cuda_memory import MemoryCalls

OK, INVALID = IntEnum("Status", {"CUDA_SUCCESS": 0, "CUDA_ERROR_INVALID_VALUE": 1})
OUT_OF_MEMORY = IntEnum("Status", {"CUDA_ERROR_OUT_OF_MEMORY": 2})(2)
NO_PEER = IntEnum("Status", {"CUDA_ERROR_PEER_ACCESS_UNSUPPORTED": 217})(217)


@dataclass
class Physical:
    """Physical memory: its size, what keeps it, and one byte of content."""

    nbytes: int
    fd: int
    handles: int = 1
    mappings: int = 0
    content: int = 0xAA  # not zero: new memory holds anything

    def kept(self) -> bool:
        return bool(self.handles or self.mappings)


@dataclass
class FakeMachine:
    """Memory that all ranks share. `capacity` is in bytes."""

    capacity: int = 1 << 40
    memory: list[Physical] = field(default_factory=list)

    def used(self) -> int:
        return sum(physical.nbytes for physical in self.memory if physical.kept())

    def of_fd(self, fd: int) -> Physical | None:
        inode = os.fstat(fd).st_ino
        return next((p for p in self.memory if p.kept() and os.fstat(p.fd).st_ino == inode), None)

    def close(self) -> None:
        for physical in self.memory:
            os.close(physical.fd)


class FakeDriver:
    """The calls of `cuda.bindings.driver` that `MemoryCalls` makes. `fail` names one that fails after some calls."""

    def __init__(self, machine: FakeMachine, rank: int = 0, granularity: int = 2 << 20) -> None:
        self.machine, self.step = machine, granularity
        self.next_address = (rank + 1) << 44
        self.reserved: dict[int, int] = {}
        self.maps: dict[int, tuple[int, Physical]] = {}  # address -> bytes, memory
        self.allowed: set[int] = set()
        self.calls: list[str] = []
        self.fail: dict[str, tuple[int, Any]] = {}  # call -> (how many succeed first, status)
        self.supported = 1
        names = SimpleNamespace
        self.CUmemAllocationHandleType = names(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR="fd")
        self.CUmemAllocationType = names(CU_MEM_ALLOCATION_TYPE_PINNED="pinned")
        self.CUmemLocationType = names(CU_MEM_LOCATION_TYPE_DEVICE="device")
        self.CUmemAccess_flags = names(CU_MEM_ACCESS_FLAGS_PROT_READWRITE="rw")
        self.CUmemAllocationGranularity_flags = names(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
        self.CUdevice_attribute = names(
            CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED="vmm",
            CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED="fd",
        )
        self.CUmemAllocationProp = lambda: names(location=names())
        self.CUmemAccessDesc = lambda: names(location=names())

    def _begin(self, name: str) -> Any:
        self.calls.append(name)
        if name in self.fail:
            left, status = self.fail[name]
            self.fail[name] = (left - 1, status)
            return status if left <= 0 else OK
        return OK

    def cuDeviceGetAttribute(self, attribute: str, device: int) -> tuple[Any, ...]:  # noqa: N802
        return self._begin("attribute"), self.supported if attribute == "vmm" else 1

    def cuMemGetAllocationGranularity(self, properties: Any, option: int) -> tuple[Any, ...]:  # noqa: N802
        assert properties.type == "pinned" and properties.requestedHandleTypes == "fd"
        return OK, self.step

    def cuMemAddressReserve(self, nbytes: int, alignment: int, address: int, flags: int) -> tuple[Any, ...]:  # noqa: N802
        status = self._begin("reserve")
        address, self.next_address = self.next_address, self.next_address + nbytes + self.step
        if not status:
            self.reserved[address] = nbytes
        return status, address

    def cuMemAddressFree(self, address: int, nbytes: int) -> tuple[Any, ...]:  # noqa: N802
        assert not any(address <= a < address + nbytes for a in self.maps), "freed addresses with memory behind them"
        assert self.reserved.pop(address) == nbytes
        return (self._begin("unreserve"),)

    def cuMemCreate(self, nbytes: int, properties: Any, flags: int) -> tuple[Any, ...]:  # noqa: N802
        assert nbytes > 0 and nbytes % self.step == 0 and properties.location.type == "device"
        status = self._begin("create")
        if self.machine.used() + nbytes > self.machine.capacity:
            status = OUT_OF_MEMORY
        if status:
            return status, None
        physical = Physical(nbytes, os.memfd_create("chunk"))
        self.machine.memory.append(physical)
        return OK, physical

    def cuMemRelease(self, physical: Physical) -> tuple[Any, ...]:  # noqa: N802
        assert physical.handles > 0, "a handle was given back twice"
        physical.handles -= 1
        return (self._begin("drop"),)

    def cuMemMap(self, address: int, nbytes: int, offset: int, physical: Physical, flags: int) -> tuple[Any, ...]:  # noqa: N802
        status = self._begin("map")
        assert any(start <= address and address + nbytes <= start + size for start, size in self.reserved.items())
        assert physical.nbytes == nbytes and physical.handles > 0 and offset == flags == 0
        assert not any(a < address + nbytes and address < a + size for a, (size, _) in self.maps.items()), (
            "mapped twice"
        )
        if not status:
            self.maps[address] = (nbytes, physical)
            physical.mappings += 1
        return (status,)

    def _covering(self, address: int, nbytes: int) -> list[int]:
        """Mappings that make up a range exactly."""
        found = sorted(a for a in self.maps if address <= a < address + nbytes)
        assert sum(self.maps[a][0] for a in found) == nbytes and found[0] == address, "not whole mappings"
        return found

    def cuMemSetAccess(self, address: int, nbytes: int, access: list[Any], count: int) -> tuple[Any, ...]:  # noqa: N802
        status = self._begin("allow")
        assert count == len(access) == 1 and access[0].flags == "rw" and access[0].location.type == "device"
        if not status:
            self.allowed |= set(self._covering(address, nbytes))
        return (status,)

    def cuMemUnmap(self, address: int, nbytes: int) -> tuple[Any, ...]:  # noqa: N802
        for mapped in self._covering(address, nbytes):
            self.maps.pop(mapped)[1].mappings -= 1
            self.allowed.discard(mapped)
        return (self._begin("unmap"),)

    def cuMemsetD8(self, address: int, value: int, nbytes: int) -> tuple[Any, ...]:  # noqa: N802
        for mapped in self._covering(address, nbytes):
            assert mapped in self.allowed, "touched memory without access"
            self.maps[mapped][1].content = value
        return (self._begin("zero"),)

    def cuMemExportToShareableHandle(self, physical: Physical, kind: str, flags: int) -> tuple[Any, ...]:  # noqa: N802
        status = self._begin("export")
        return status, None if status else os.dup(physical.fd)

    def cuMemImportFromShareableHandle(self, fd: int, kind: str) -> tuple[Any, ...]:  # noqa: N802
        status = self._begin("take")
        physical = self.machine.of_fd(fd)
        if status or physical is None:
            return status or INVALID, None
        physical.handles += 1
        return OK, physical


class FakeCalls(MemoryCalls):
    """`MemoryCalls` that needs no device. Tests point `moebius.kernels.cuda_memory.driver` at `current`."""

    def __init__(self, driver: FakeDriver) -> None:
        super().__init__(0)
        self.driver = driver
        self.dropped_caches = 0

    @contextmanager
    def idle(self) -> Any:
        self.driver.calls.append("idle")
        yield

    def synchronize(self) -> None:
        self.driver.calls.append("synchronize")

    def drop_caches(self) -> None:
        self.dropped_caches += 1

    def name(self) -> str:
        return "cuda:0 (fake)"
