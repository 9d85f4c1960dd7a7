"""This machine: memory, limits of processes and of the kernel."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvpool.client.host_memory import cgroup_limit_bytes, meminfo
from kvpool_cli.doctor.finding import Finding, failure, ok, skipped, warning
from kvpool_cli.quantities import size

_NOFILE_WANTED = 16_384  # a session holds a few descriptors for each peer and segment
_NOFILE_LEAST = 1_024
_MAP_COUNT_LEAST = 65_530
_SPARE_BYTES = 1 << 30  # what services take beside the arena
_MIN_KERNEL = (5, 10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """root: where /proc and /sys are looked for. arena_bytes: of all pagestores here together; 0: not known."""

    root: Path = Path("/")
    arena_bytes: int = 0
    arena_used_bytes: int = 0  # of it, what is there already

    def text(self, path: str) -> str:
        """A file of the kernel, or nothing where there is none."""
        try:
            return (self.root / path).read_text()
        except (OSError, UnicodeDecodeError):
            return ""

    def number(self, path: str) -> int | None:
        """A file that holds one number."""
        words = self.text(path).split()
        return int(words[0]) if words and words[0].isdecimal() else None


def examine_machine(machine: Machine) -> Iterator[Finding]:
    """All of it."""
    yield from memory(machine)
    yield from descriptors()
    yield from kernel(machine)


def memory(machine: Machine) -> Iterator[Finding]:
    """Whether the machine, and the cgroup of this process, have the memory that the arenas may take."""
    facts = meminfo(machine.root)
    if not machine.arena_bytes:
        yield skipped(
            "memory",
            f"{size(facts.get('MemAvailable', 0))} are available",
            "--arena-bytes says what the arenas here may take",
        )
    to_come = max(0, machine.arena_bytes - machine.arena_used_bytes)
    available = facts.get("MemAvailable")
    if available is not None and machine.arena_bytes:
        if not to_come:
            yield ok("memory", f"the arenas here have all of their {size(machine.arena_bytes)}")
        elif available < to_come + _SPARE_BYTES:
            yield failure(
                "memory",
                f"{size(available)} are available, the arenas here may still take {size(to_come)}",
                "smaller --arena-bytes, or another machine; beyond it the kernel kills processes",
            )
        else:
            yield ok("memory", f"{size(available)} are available")
    limit = cgroup_limit_bytes(machine.root)
    if limit is not None and machine.arena_bytes:
        if limit < machine.arena_bytes + _SPARE_BYTES:
            yield failure(
                "cgroup",
                f"this cgroup may have {size(limit)}, and arenas of {size(machine.arena_bytes)} count towards it",
                f"a memory limit of at least {size(machine.arena_bytes + _SPARE_BYTES)}, or smaller --arena-bytes",
            )
        else:
            yield ok("cgroup", f"this cgroup may have {size(limit)}")
    if facts.get("SwapTotal", 0) and facts.get("SwapTotal", 0) != facts.get("SwapFree", 0):
        used = facts["SwapTotal"] - facts.get("SwapFree", 0)
        yield warning(
            "swap", f"{size(used)} are swapped out", "arenas may be swapped as well: swapoff -a, or less memory in use"
        )


def descriptors() -> Iterator[Finding]:
    """ulimits, as a service started from here would have them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    remediation = f"ulimit -n {_NOFILE_WANTED}; with systemd LimitNOFILE={_NOFILE_WANTED}"
    if soft != resource.RLIM_INFINITY and soft < _NOFILE_WANTED:
        level = failure if soft < _NOFILE_LEAST else warning
        yield level("nofile", f"a process may open {soft} files (hard limit {hard})", remediation)
    else:
        yield ok("nofile", f"a process may open {'any number of' if soft == resource.RLIM_INFINITY else soft} files")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked != resource.RLIM_INFINITY and Path("/dev/nvidiactl").exists():
        yield warning(
            "memlock",
            f"a process may lock {size(locked)} of memory, and agents register the whole arena with CUDA",
            "ulimit -l unlimited; with systemd LimitMEMLOCK=infinity; with Docker --ulimit memlock=-1",
        )
    else:
        yield ok(
            "memlock", "unlimited" if locked == resource.RLIM_INFINITY else f"{size(locked)}; no GPU here wants more"
        )


def kernel(machine: Machine) -> Iterator[Finding]:
    """Version, maps, and huge pages."""
    release = machine.text("proc/sys/kernel/osrelease").strip() or os.uname().release
    version = tuple(int(part) for part in release.split("-")[0].split(".")[:2] if part.isdecimal())
    if version < _MIN_KERNEL:
        yield failure(
            "kernel",
            f"Linux {release}",
            f"at least {'.'.join(map(str, _MIN_KERNEL))}: descriptors of processes are needed",
        )
    else:
        yield ok("kernel", f"Linux {release}")
    maps = machine.number("proc/sys/vm/max_map_count")
    if maps is not None and maps < _MAP_COUNT_LEAST:
        yield warning(
            "max_map_count", f"a process may have {maps} mappings", f"sysctl -w vm.max_map_count={_MAP_COUNT_LEAST}"
        )
    huge = machine.text("sys/kernel/mm/transparent_hugepage/shmem_enabled")
    chosen = huge[huge.find("[") + 1 : huge.find("]")] if "[" in huge else ""
    if chosen in ("never", "deny"):
        yield ok(
            "huge_pages",
            f"shared memory has none ({chosen}); `advise` or `within_size` saves page faults of large arenas",
        )
    elif chosen:
        yield ok("huge_pages", f"of shared memory: {chosen}")
    if machine.text("sys/kernel/mm/transparent_hugepage/enabled").find("[always]") >= 0:
        yield warning(
            "thp_always",
            "transparent huge pages are on for all memory, which makes a Redis here slow when it forks",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )
    if machine.number("proc/sys/vm/overcommit_memory") == 2:
        yield warning(
            "overcommit", "vm.overcommit_memory is 2: large mappings are refused", "sysctl -w vm.overcommit_memory=1"
        )
