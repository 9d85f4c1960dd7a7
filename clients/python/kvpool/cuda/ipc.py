"""GPU memory and events of other processes, by CUDA IPC, as plain values that fit into messages."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from kvpool.core.errors import InvalidRequest
from kvpool.core.ipc import IpcEvent as IpcEvent
from kvpool.core.ipc import IpcMemory as IpcMemory
from kvpool.cuda.driver import EVENT_DISABLE_TIMING, EVENT_INTERPROCESS, CudaError, Driver


def export_memory(driver: Driver, device_uuid: str, address: int, size_bytes: int) -> IpcMemory:
    """What another process needs to map [address, address + size_bytes) of the current device.

    Raises InvalidRequest for memory that cannot be exported, saying what to set.
    """
    try:
        start, allocation_bytes = driver.address_range(address)
        handle = driver.ipc_memory_handle(start)
    except CudaError as error:
        raise InvalidRequest(
            f"GPU memory at {address:#x} cannot be shared with the agent ({error.message}): it does not come from "
            f"cudaMalloc. Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False (PYTORCH_ALLOC_CONF in newer torch) "
            f"and use no pool allocator (cudaMallocAsync, VMM) for the KV cache"
        ) from error
    if address + size_bytes > start + allocation_bytes:
        raise InvalidRequest(
            f"{size_bytes} bytes at {address:#x} reach beyond their allocation of {allocation_bytes} at {start:#x}"
        )
    return IpcMemory(device_uuid, handle, address - start, allocation_bytes)


@dataclass(slots=True)
class _Opened:
    address: int
    users: int


class IpcMappings:
    """Allocations of other processes that this one maps, each once however many tensors lie in it. Thread-safe."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._opened: dict[tuple[int, bytes], _Opened] = {}

    def open(self, memory: IpcMemory, size_bytes: int, *, ordinal: int) -> int:
        """Address of the memory on device `ordinal`, which is made current. Pair it with `close`.

        ordinal: the device whose kernels and copies use the memory; if it lies on another one, peer access is enabled.
        Raises InvalidRequest if the device is not visible here, the allocation is not what it claims, or is gone.
        """
        home = self._driver.ordinal_of(memory.device_uuid)
        key = (ordinal, memory.handle)
        with self._lock:
            self._driver.use_device(ordinal)
            if home != ordinal:
                self._driver.enable_peer_access(ordinal, home)
            opened = self._opened.get(key)
            if opened is None:
                opened = self._opened[key] = _Opened(self._open(memory), 0)
            opened.users += 1
        try:
            self._check(memory, size_bytes, opened.address)
        except BaseException:
            self.close(memory, ordinal=ordinal)
            raise
        return opened.address + memory.allocation_offset

    def close(self, memory: IpcMemory, *, ordinal: int) -> None:
        """End one use; the last one unmaps. No work on the memory may run any more."""
        key = (ordinal, memory.handle)
        with self._lock:
            opened = self._opened[key]
            opened.users -= 1
            if opened.users:
                return
            del self._opened[key]
            self._driver.use_device(ordinal)
            self._driver.close_ipc_memory(opened.address)

    def _open(self, memory: IpcMemory) -> int:
        try:
            return self._driver.open_ipc_memory(memory.handle)
        except CudaError as error:
            raise InvalidRequest(
                f"the engine's GPU memory on {memory.device_uuid} cannot be mapped ({error.message}); engine and agent "
                f"must see the same device and share a PID namespace, and the engine must still run"
            ) from error

    def _check(self, memory: IpcMemory, size_bytes: int, address: int) -> None:
        # What lies behind the mapping decides, not what the peer says of it.
        _, mapped_bytes = self._driver.address_range(address)
        if memory.allocation_offset + size_bytes > mapped_bytes:
            raise InvalidRequest(
                f"{size_bytes} bytes at allocation_offset {memory.allocation_offset} reach beyond the allocation, "
                f"which has {mapped_bytes}"
            )


class EngineEvents:
    """Interprocess events of this process, on the current device, for a peer to wait on."""

    def __init__(self, driver: Driver, device_uuid: str, count: int) -> None:
        self._driver = driver
        self._events: list[int] = []
        try:
            for _ in range(count):
                self._events.append(driver.event_create(EVENT_DISABLE_TIMING | EVENT_INTERPROCESS))
            self.handles = tuple(IpcEvent(device_uuid, driver.ipc_event_handle(event)) for event in self._events)
        except BaseException:
            self.close()
            raise

    def record(self, slot: int, stream: int) -> None:
        """Event `slot` stands for the work of `stream` so far. Notify the peer only after this."""
        self._driver.event_record(self._events[slot], stream)

    def close(self) -> None:
        """Free the events; idempotent."""
        while self._events:
            self._driver.event_destroy(self._events.pop())


def open_event(driver: Driver, event: IpcEvent) -> int:
    """Another process's event in the current context; `driver.event_destroy` frees it."""
    try:
        return driver.open_ipc_event(event.handle)
    except CudaError as error:
        raise InvalidRequest(
            f"the engine's CUDA event cannot be opened ({error.message}); engine and agent must share a PID namespace"
        ) from error
