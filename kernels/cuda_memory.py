"""The driver's calls for virtual memory on one device: addresses apart from the physical memory behind them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from moebius.kernels.cuda_calls import CudaError, checked, driver


class MemoryCalls:
    """Calls of one device. Sizes and addresses are bytes and multiples of `granularity`; errors raise CudaError.

    A handle names physical memory, which lives as long as a handle, a mapping or a file descriptor of it exists, in
    whatever process.
    """

    def __init__(self, device: int) -> None:
        self.device = device

    @contextmanager
    def idle(self) -> Iterator[None]:
        """With the device current, its context made, and all its work done before and after."""
        with torch.cuda.device(self.device):
            self.synchronize()
            yield
            self.synchronize()

    def synchronize(self) -> None:
        """Wait for all work of the device."""
        torch.cuda.synchronize(self.device)

    def drop_caches(self) -> None:
        """Give what torch's allocator keeps for later back to the device."""
        torch.cuda.empty_cache()

    def name(self) -> str:
        """Of the device, for messages."""
        properties = torch.cuda.get_device_properties(self.device)
        return f"cuda:{self.device} ({properties.name}, {properties.uuid})"

    def unsupported(self) -> str | None:
        """What this device lacks for memory that can be mapped, unmapped and shared; None if nothing."""
        cuda = driver()
        attributes = cuda.CUdevice_attribute
        for attribute, what in (
            (attributes.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, "virtual memory management"),
            (attributes.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, "memory as file descriptors"),
        ):
            if not checked(cuda.cuDeviceGetAttribute(attribute, self.device), "asking what the device supports"):
                return f"cuda:{self.device} does not support {what}"
        return None

    def granularity(self) -> int:
        """Bytes of which all sizes and addresses must be multiples."""
        cuda = driver()
        least = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(checked(cuda.cuMemGetAllocationGranularity(self._properties(), least), "asking for the granularity"))

    def reserve(self, nbytes: int) -> int:
        """A range of addresses with nothing behind it."""
        return int(checked(driver().cuMemAddressReserve(nbytes, 0, 0, 0), f"reserving {nbytes} bytes of addresses"))

    def unreserve(self, address: int, nbytes: int) -> None:
        """Give a whole range back."""
        checked(driver().cuMemAddressFree(address, nbytes), "freeing addresses")

    def create(self, nbytes: int) -> Any:
        """A handle of new physical memory."""
        return checked(driver().cuMemCreate(nbytes, self._properties(), 0), f"allocating {nbytes} bytes")

    def drop(self, handle: Any) -> None:
        """Give a handle back."""
        checked(driver().cuMemRelease(handle), "giving a memory handle back")

    def map(self, address: int, nbytes: int, handle: Any) -> None:
        """Put all of a handle's memory behind an address; nobody may touch it before `allow`."""
        checked(driver().cuMemMap(address, nbytes, 0, handle, 0), "mapping memory")

    def allow(self, address: int, nbytes: int) -> None:
        """Let this device read and write a range that is mapped throughout."""
        cuda = driver()
        access = cuda.CUmemAccessDesc()
        access.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self.device
        access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        checked(cuda.cuMemSetAccess(address, nbytes, [access], 1), "getting access to memory")

    def unmap(self, address: int, nbytes: int) -> None:
        """Take away what is behind a range that consists of whole mappings; the addresses stay reserved."""
        checked(driver().cuMemUnmap(address, nbytes), "unmapping memory")

    def zero(self, address: int, nbytes: int) -> None:
        """Fill with zeros, and wait for it."""
        checked(driver().cuMemsetD8(address, 0, nbytes), "zeroing memory")
        self.synchronize()  # the call's stream is none of torch's, which do not wait for it

    def export(self, handle: Any) -> int:
        """A new file descriptor of the memory of `handle`, to be closed by the caller."""
        return int(checked(driver().cuMemExportToShareableHandle(handle, self._fd_type(), 0), "exporting memory"))

    def take(self, fd: int) -> Any:
        """A handle of the memory of another process; `fd` stays open."""
        return checked(driver().cuMemImportFromShareableHandle(fd, self._fd_type()), "importing a peer's memory")

    def _fd_type(self) -> Any:
        return driver().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def _properties(self) -> Any:
        cuda = driver()
        properties = cuda.CUmemAllocationProp()
        properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = self.device
        properties.requestedHandleTypes = self._fd_type()
        return properties


def out_of_memory(error: CudaError) -> bool:
    """Whether the device had too little memory."""
    return "OUT_OF_MEMORY" in str(error)
