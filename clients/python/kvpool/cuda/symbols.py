"""Types of the driver's functions. Names as in the CUDA driver API reference, release 13.0."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char, c_int, c_size_t, c_uint, c_void_p
from typing import Any

from kvpool.core.errors import NotServed

IPC_HANDLE_BYTES = 64


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle and CUipcEventHandle: opaque bytes."""

    _fields_ = [("reserved", c_char * IPC_HANDLE_BYTES)]


class Uuid(ctypes.Structure):
    """CUuuid."""

    _fields_ = [("octets", c_char * 16)]


class CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes. hints: two locations, needed for managed memory only."""

    _fields_ = [("source_access_order", c_int), ("hints", c_int * 4), ("flags", c_uint)]


def declare(library: Any) -> None:
    """Argument types: without them ctypes would cut addresses to 32 bits."""
    out, size, pointer = c_void_p, c_size_t, c_void_p
    table: dict[str, tuple[Any, ...]] = {
        "cuInit": (c_uint,),
        "cuGetErrorString": (c_int, out),
        "cuDeviceGetCount": (out,),
        "cuDeviceGet": (out, c_int),
        "cuDeviceGetUuid_v2": (out, c_int),
        "cuDeviceCanAccessPeer": (out, c_int, c_int),
        "cuDevicePrimaryCtxRetain": (out, c_int),
        "cuCtxSetCurrent": (pointer,),
        "cuCtxEnablePeerAccess": (pointer, c_uint),
        "cuMemGetAddressRange_v2": (out, out, size),
        "cuIpcGetMemHandle": (out, size),
        "cuIpcOpenMemHandle_v2": (out, IpcHandle, c_uint),
        "cuIpcCloseMemHandle": (size,),
        "cuMemHostRegister_v2": (size, size, c_uint),
        "cuMemHostUnregister": (size,),
        "cuEventCreate": (out, c_uint),
        "cuEventDestroy_v2": (pointer,),
        "cuEventRecord": (pointer, pointer),
        "cuEventQuery": (pointer,),
        "cuIpcGetEventHandle": (out, pointer),
        "cuIpcOpenEventHandle": (out, IpcHandle),
        "cuMemcpyAsync": (size, size, size, pointer),
    }
    attributes, indexes = POINTER(CopyAttributes), POINTER(size)
    batch = (pointer, pointer, pointer, size, attributes, indexes, size)
    table["cuMemcpyBatchAsync"] = (*batch, POINTER(size), pointer)  # the older one also says which copy failed
    table["cuMemcpyBatchAsync_v2"] = (*batch, pointer)
    for name, arguments in table.items():
        function = getattr(library, name, None)
        if function is None:
            if name.startswith("cuMemcpyBatchAsync"):
                continue  # since CUDA 12.8
            raise NotServed(f"the CUDA driver has no {name}; install one for CUDA 12.0 or later")
        function.argtypes, function.restype = arguments, c_int
