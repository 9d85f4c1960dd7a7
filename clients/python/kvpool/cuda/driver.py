"""The CUDA driver by ctypes: the few calls that torch does not offer, without one more package in an engine's process.

The driver's own library is on every machine that has a GPU and its interface is stable across CUDA releases, while
bindings for it are pinned by each engine to another version. ctypes lets go of the GIL during calls. Addresses, streams
and events are plain ints, as in `tensor.data_ptr()` and `stream.cuda_stream`. Names and numbers: CUDA driver API
reference, release 13.0.
"""

from __future__ import annotations

import ctypes
import uuid
from ctypes import byref, c_int, c_size_t, c_void_p
from functools import lru_cache
from typing import Any

from kvpool.core.errors import InvalidRequest, NotServed
from kvpool.cuda.symbols import IPC_HANDLE_BYTES, IpcHandle, Uuid, declare

SUCCESS = 0
NOT_READY = 600
PEER_ACCESS_ALREADY_ENABLED = 704

EVENT_DISABLE_TIMING = 0x2
EVENT_INTERPROCESS = 0x4
_HOST_REGISTER_PORTABLE = 0x1
_IPC_LAZY_ENABLE_PEER_ACCESS = 0x1


class CudaError(RuntimeError):
    """A driver call failed: `code` is its CUresult. The caller, which knows the purpose, wraps it."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.message, self.code = message, code


class Driver:
    """The loaded library. Calls raise CudaError naming the call and the driver's own text.

    Except for the queries about devices they want a current context: see `use_device`.
    """

    def __init__(self, library: Any) -> None:
        """See `load`."""
        self._library = library
        self._contexts: dict[int, c_void_p] = {}
        declare(library)
        self.call("cuInit", 0)
        self.batched_copies = next(
            (name for name in ("cuMemcpyBatchAsync_v2", "cuMemcpyBatchAsync") if hasattr(library, name)), None
        )

    @staticmethod
    @lru_cache(maxsize=1)
    def load() -> Driver:
        """The driver of this process. Raises NotServed where there is none."""
        try:
            library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise NotServed(f"there is no CUDA driver here ({error}); use device cpu") from error
        return Driver(library)

    def call(self, name: str, *arguments: object) -> None:
        """One driver call. Raises CudaError."""
        code = getattr(self._library, name)(*arguments)
        if code != SUCCESS:
            raise CudaError(f"{name} failed: {self._describe(code)}", code)

    def _describe(self, code: int) -> str:
        text = ctypes.c_char_p()
        if self._library.cuGetErrorString(code, byref(text)) == SUCCESS and text.value:
            return f"{text.value.decode()} ({code})"
        return f"error {code}"

    # Devices

    def device_count(self) -> int:
        """Devices that this process may use (CUDA_VISIBLE_DEVICES counts)."""
        count = c_int()
        self.call("cuDeviceGetCount", byref(count))
        return count.value

    def device_uuid(self, ordinal: int) -> str:
        """ "GPU-..." of a device; the same in every process, whatever its CUDA_VISIBLE_DEVICES."""
        device, found = c_int(), Uuid()
        self.call("cuDeviceGet", byref(device), ordinal)
        self.call("cuDeviceGetUuid_v2", byref(found), device)
        return f"GPU-{uuid.UUID(bytes=ctypes.string_at(byref(found), 16))}"

    def ordinal_of(self, device_uuid: str) -> int:
        """Raises InvalidRequest if this process does not see the device."""
        here = [self.device_uuid(ordinal) for ordinal in range(self.device_count())]
        try:
            return here.index(device_uuid)
        except ValueError:
            raise InvalidRequest(
                f"device {device_uuid} is not visible to this process, which sees {', '.join(here) or 'none'}; "
                f"share the device (CUDA_VISIBLE_DEVICES, or the pod's device claim)"
            ) from None

    def use_device(self, ordinal: int) -> None:
        """Make the device's primary context (torch's own) current in this thread."""
        context = self._contexts.get(ordinal)
        if context is None:
            context = c_void_p()
            self.call("cuDevicePrimaryCtxRetain", byref(context), ordinal)
            self._contexts[ordinal] = context
        self.call("cuCtxSetCurrent", context)

    def enable_peer_access(self, ordinal: int, peer: int) -> None:
        """Let kernels of `ordinal` read and write memory of `peer`. Raises NotServed if the machine cannot."""
        can = c_int()
        self.call("cuDeviceCanAccessPeer", byref(can), ordinal, peer)
        if not can.value:
            raise NotServed(f"device {ordinal} cannot reach the memory of device {peer} on this machine")
        self.use_device(peer)
        context = self._contexts[peer]
        self.use_device(ordinal)
        try:
            self.call("cuCtxEnablePeerAccess", context, 0)
        except CudaError as error:
            if error.code != PEER_ACCESS_ALREADY_ENABLED:
                raise

    # Memory

    def address_range(self, address: int) -> tuple[int, int]:
        """(start, bytes) of the allocation that a device address lies in."""
        start, size_bytes = c_size_t(), c_size_t()
        self.call("cuMemGetAddressRange_v2", byref(start), byref(size_bytes), address)
        return start.value, size_bytes.value

    def ipc_memory_handle(self, address: int) -> bytes:
        """64 bytes for the whole allocation that an address lies in."""
        handle = IpcHandle()
        self.call("cuIpcGetMemHandle", byref(handle), address)
        return ctypes.string_at(byref(handle), IPC_HANDLE_BYTES)

    def open_ipc_memory(self, handle: bytes) -> int:
        """Start of another process's allocation, mapped into the current context."""
        address = c_size_t()
        self.call("cuIpcOpenMemHandle_v2", byref(address), _handle(handle), _IPC_LAZY_ENABLE_PEER_ACCESS)
        return address.value

    def close_ipc_memory(self, address: int) -> None:
        """Unmap what open_ipc_memory returned."""
        self.call("cuIpcCloseMemHandle", address)

    def register_host(self, address: int, size_bytes: int) -> None:
        """Pin host memory: 1 GiB takes about 50 ms."""
        self.call("cuMemHostRegister_v2", address, size_bytes, _HOST_REGISTER_PORTABLE)

    def unregister_host(self, address: int) -> None:
        """Undo register_host."""
        self.call("cuMemHostUnregister", address)

    # Events

    def event_create(self, flags: int = EVENT_DISABLE_TIMING) -> int:
        """An event; EVENT_INTERPROCESS makes one that can be exported."""
        event = c_void_p()
        self.call("cuEventCreate", byref(event), flags)
        return event.value or 0

    def event_destroy(self, event: int) -> None:
        """Free an event; waits for it that were enqueued stay."""
        self.call("cuEventDestroy_v2", event)

    def event_record(self, event: int, stream: int) -> None:
        """The event stands for the stream's work so far."""
        self.call("cuEventRecord", event, stream)

    def event_query(self, event: int) -> bool:
        """Whether what the event recorded has ended."""
        code = self._library.cuEventQuery(event)
        if code not in (SUCCESS, NOT_READY):
            raise CudaError(f"cuEventQuery failed: {self._describe(code)}", code)
        return bool(code == SUCCESS)

    def ipc_event_handle(self, event: int) -> bytes:
        """64 bytes for an interprocess event."""
        handle = IpcHandle()
        self.call("cuIpcGetEventHandle", byref(handle), event)
        return ctypes.string_at(byref(handle), IPC_HANDLE_BYTES)

    def open_ipc_event(self, handle: bytes) -> int:
        """Another process's event; destroy it when done."""
        event = c_void_p()
        self.call("cuIpcOpenEventHandle", byref(event), _handle(handle))
        return event.value or 0

    # Copies

    def copy(self, destination: int, source: int, size_bytes: int, stream: int) -> None:
        """Enqueue a copy between any two addresses, host (pinned, or it blocks) or device."""
        self.call("cuMemcpyAsync", destination, source, size_bytes, stream)


def _handle(octets: bytes) -> IpcHandle:
    if len(octets) != IPC_HANDLE_BYTES:
        raise InvalidRequest(f"a CUDA IPC handle has {IPC_HANDLE_BYTES} bytes, got {len(octets)}")
    return IpcHandle.from_buffer_copy(octets)
