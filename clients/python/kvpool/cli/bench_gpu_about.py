"""What a GPU bench ran on."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

from kvpool.core.errors import NotServed, StartupFailed

_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_MPS_PROCESS = "nvidia-cuda-mps"  # as /proc has it: 15 characters
_QUERY_TIMEOUT_S = 20.0


def check_gpu() -> int:
    """How many GPUs there are. Raises StartupFailed saying what is missing."""
    from kvpool.cuda.driver import CudaError, Driver

    try:
        count = Driver.load().device_count()
    except (NotServed, CudaError) as error:
        raise StartupFailed(f"bench gpu wants a CUDA GPU: {error}".removesuffix("; use device cpu")) from error
    if not count:
        raise StartupFailed("bench gpu wants a CUDA GPU, and none is visible; is CUDA_VISIBLE_DEVICES set?")
    for package in ("kvpool_gpuagent", "torch", "triton"):
        if importlib.util.find_spec(package) is None:
            raise StartupFailed(
                f"bench gpu wants {package}, which is not installed: pip install 'kvpool[gpuagent-cuda]'"
            )
    return count


def driver_version() -> str:
    """Of NVIDIA's driver; "unknown" where nobody tells."""
    if _DRIVER_FILE.exists() and (found := re.search(r"\d{3,}\.\d+(\.\d+)?", _DRIVER_FILE.read_text())):
        return found[0]
    program = shutil.which("nvidia-smi")
    if program is None:
        return "unknown"
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout.strip() else "unknown"


def mps_state(processes: Path = Path("/proc")) -> str:
    """Whether CUDA processes share the GPU by way of MPS: "active", "not active", or what speaks for it."""
    names = (_process_name(path) for path in processes.glob("[0-9]*/comm"))
    if _MPS_PROCESS in names:
        return "active"
    pipes = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps")
    if (pipes / "control").exists():
        return f"perhaps: {pipes} is there, its daemon is not seen from here"
    return "not active"


def _process_name(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # it has ended meanwhile
        return ""
