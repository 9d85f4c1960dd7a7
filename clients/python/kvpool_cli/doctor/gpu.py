"""Whether engines and agents of this machine could share GPU memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvpool.client.engine_hold import PeerProcess
from kvpool_cli.doctor.finding import Finding, failure, ok, skipped, warning
from kvpool_cli.doctor.machine import Machine


def examine_gpu(machine: Machine, agent_sockets: Sequence[str]) -> Iterator[Finding]:
    """Devices, what CUDA may see of them, and whether processes here see those that listen on the agents' sockets."""
    devices = sorted(path.name for path in (machine.root / "dev").glob("nvidia[0-9]*"))
    if not devices:
        yield skipped("gpu", "no NVIDIA GPU is visible here", "in a container: --gpus all, or a device claim")
    else:
        yield from _cuda(machine, devices)
    yield from _namespaces(agent_sockets)


def _cuda(machine: Machine, devices: Sequence[str]) -> Iterator[Finding]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1", "NoDevFiles"):
        yield failure("gpu", f"CUDA_VISIBLE_DEVICES is {visible!r}: CUDA sees none of {', '.join(devices)}", "unset it")
    else:
        yield ok("gpu", f"{len(devices)} GPUs{'' if visible is None else f', CUDA sees {visible}'}")
    if "driver" not in machine.text("proc/driver/nvidia/version").lower() and not machine.text(
        "proc/driver/nvidia/version"
    ):
        yield warning("driver", "the NVIDIA driver does not tell its version", "load the kernel module, see nvidia-smi")
    scope = machine.number("proc/sys/kernel/yama/ptrace_scope")
    if scope is not None and scope >= 2:
        yield warning(
            "ptrace",
            f"kernel.yama.ptrace_scope is {scope}: CUDA may be refused the memory of another process",
            "sysctl -w kernel.yama.ptrace_scope=1, or run engine and agent as one user with CAP_SYS_PTRACE",
        )


def _namespaces(agent_sockets: Sequence[str]) -> Iterator[Finding]:
    here = [path for path in agent_sockets if path and Path(path).exists()]
    if not here:
        yield skipped("pid_namespace", "no agent listens on a socket that is visible here")
    for path in here:
        process = PeerProcess.behind(path)
        if process is None:
            yield failure(
                "pid_namespace",
                f"the process behind {path} is not visible: another PID namespace, or gone",
                "CUDA IPC needs one PID namespace: shareProcessNamespace: true in the pod, or --pid with Docker",
            )
            continue
        process.close()
        yield ok("pid_namespace", f"the agent at {path} is visible from here")
