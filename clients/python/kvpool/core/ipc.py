"""Memory and events of one process that another one may open, as plain values. Nothing here calls CUDA."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from kvpool.core.errors import InvalidRequest

HOLD_FILE_BYTES = 4096  # of the file that an agent keeps open while it maps an engine's memory
GENERATION_BYTES = 8  # of a block in the table that EngineRegister.block_generations speaks of
HOLD_ENDED = b"\x01"  # what it writes at offset 0 of it after it has let go
IPC_HANDLE_BYTES = 64  # of cudaIpcMemHandle_t and of cudaIpcEventHandle_t

_UUID = re.compile(r"(GPU|MIG)-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True, slots=True)
class IpcMemory:
    """GPU memory: its first byte lies `allocation_offset` bytes into the allocation that `handle` opens.

    Several of these may lie in one allocation; then they have equal handles.
    """

    device_uuid: str  # "GPU-..." as nvidia-smi -L prints it: ordinals differ between processes
    handle: bytes = field(repr=False)
    allocation_offset: int
    allocation_bytes: int

    def check(self, name: str, size_bytes: int) -> None:
        """raises: InvalidRequest naming the argument, unless size_bytes > 0 from the first byte on are inside."""
        _check_device(name, self.device_uuid)
        _check_handle(name, self.handle)
        if self.allocation_offset < 0:
            raise InvalidRequest(f"{name}.allocation_offset must be >= 0, got {self.allocation_offset}")
        if self.allocation_bytes <= 0:
            raise InvalidRequest(f"{name}.allocation_bytes must be > 0, got {self.allocation_bytes}")
        if size_bytes <= 0:
            raise InvalidRequest(f"{name}.size_bytes must be > 0, got {size_bytes}")
        if self.allocation_offset + size_bytes > self.allocation_bytes:
            raise InvalidRequest(
                f"{name} ends at byte {self.allocation_offset + size_bytes} (allocation_offset + size_bytes), "
                f"but allocation_bytes is {self.allocation_bytes}"
            )


@dataclass(frozen=True, slots=True)
class IpcEvent:
    """A CUDA event made for other processes (interprocess, without timing)."""

    device_uuid: str
    handle: bytes = field(repr=False)

    def check(self, name: str) -> None:
        """raises: InvalidRequest naming the argument."""
        _check_device(name, self.device_uuid)
        _check_handle(name, self.handle)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEvent:
    """One recording of an interprocess event: the slot may be recorded again, and then stands for other work."""

    slot: int  # position among the session's events
    generation: int  # from 1 on, growing


def _check_device(name: str, device_uuid: str) -> None:
    if not _UUID.fullmatch(device_uuid):
        raise InvalidRequest(
            f"{name}.device_uuid must be a UUID like GPU-01234567-89ab-cdef-0123-456789abcdef (nvidia-smi -L), "
            f"got {device_uuid[:64]!r}"
        )


def _check_handle(name: str, handle: bytes) -> None:
    if len(handle) != IPC_HANDLE_BYTES:
        raise InvalidRequest(f"{name}.handle must be {IPC_HANDLE_BYTES} bytes, got {len(handle)}")
