"""Sizes and durations as people write them. Imports nothing beside the standard library."""

from __future__ import annotations

import re

# Binary units as `kubectl` and Python programs write them; GB and G are decimal, as on the label of a disk.
_BYTES_OF = {
    unit: factor
    for power, letter in enumerate("KMGTP", 1)
    for unit, factor in (
        *((f"{letter}{end}", 1024**power) for end in ("iB", "i")),
        *((f"{one}{end}", 1000**power) for one in {letter, "k" if letter == "K" else letter} for end in ("B", "")),
    )
} | {"": 1, "B": 1}
_SECONDS_OF = {"ms": 1e-3, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def size(size_bytes: float) -> str:
    """Bytes in the largest binary unit that leaves at least 1."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size_bytes) < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


def size_from_text(text: str | int) -> int:
    """Bytes of "12345", "64MiB", "64Mi" or "2GB" (decimal). Raises ValueError."""
    if isinstance(text, int):
        return text
    found = _NUMBER.fullmatch(text)
    if found is None or found[2] not in _BYTES_OF:
        raise ValueError(f"{text!r} is not a size; write bytes, or 64MiB, 1.5Gi, 2TB")
    return int(float(found[1]) * _BYTES_OF[found[2]]) if found[2] else int(float(found[1]))


def duration_from_text(text: str | float) -> float:
    """Seconds of "500ms", "90s", "15m", "24h", "7d" or "2w". Raises ValueError."""
    if isinstance(text, int | float):
        return float(text)
    found = _NUMBER.fullmatch(text)
    duration_s = float(found[1]) * _SECONDS_OF.get(found[2], 0) if found is not None else 0.0
    if not 0 < duration_s < 1e10:
        raise ValueError(f"{text!r} is not a duration; write 500ms, 90s, 15m, 24h, 7d or 2w")
    return duration_s
