"""Entry point: `python -m kvpool_gpuagent.measure`. Environment: SCRATCH_BYTES, SUM_THREADS and SUM_PROCESSES
of the device."""

from __future__ import annotations

import asyncio
import os
import sys

from kvpool_gpuagent.adapters.sum_process import sum_process_count
from kvpool_gpuagent.measure.commands import serve
from kvpool_gpuagent.measure.measurement import Measurement

_SWITCH_INTERVAL_S = 0.0005  # as kvpool_server.process sets it in the agent


def open_measurement() -> Measurement:
    """On device 0. Raises what the driver, torch or the memory for the arena raise where they are not there."""
    from kvpool_gpuagent.adapters.cuda_device import CudaDevice

    scratch_bytes = int(os.environ.get("SCRATCH_BYTES") or 256 << 20)
    device = CudaDevice(
        scratch_bytes=scratch_bytes,
        sum_threads=int(os.environ.get("SUM_THREADS") or 2),
        sum_processes=int(os.environ.get("SUM_PROCESSES") or sum_process_count()),
    )
    return Measurement(device, device.runtime.driver.copy)


if __name__ == "__main__":
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    sys.exit(asyncio.run(serve(open_measurement, sys.stdin, sys.stdout)))
