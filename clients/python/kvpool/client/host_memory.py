"""How much memory this host has, and how much of it this process may take: what the kernel says in /proc and /sys."""

from __future__ import annotations

from pathlib import Path

_NO_LIMIT_BYTES = 1 << 60  # what version 1 says instead of "none" is just below 2^63
_ROOT = Path("/")


def meminfo(root: Path = _ROOT) -> dict[str, int]:
    """Facts of /proc/meminfo in bytes, by name; empty where it cannot be read."""
    facts = dict[str, int]()
    for line in _text(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdecimal():
            facts[name] = int(words[0]) << 10
    return facts


def cgroup_limit_bytes(root: Path = _ROOT) -> int | None:
    """The lowest memory limit of this process's cgroup and those above it, version 1 or 2; None if there is none."""
    limits = list[int]()
    for line in _text(root / "proc/self/cgroup").splitlines() or ["0::/"]:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        top, name = (
            ("sys/fs/cgroup/memory", "memory.limit_in_bytes") if controllers else ("sys/fs/cgroup", "memory.max")
        )
        below = Path(path.strip("/"))  # in a container it may be the host's: then only the top is there
        for each in (below, *below.parents):
            text = _text(root / top / each / name).strip()
            if text.isdecimal() and int(text) < _NO_LIMIT_BYTES:
                limits.append(int(text))
    return min(limits, default=None)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
