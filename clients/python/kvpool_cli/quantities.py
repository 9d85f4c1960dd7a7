"""Sizes and counts as people read them, durations as they write them."""

from __future__ import annotations

import re

_SECONDS_OF = {"ms": 1e-3, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def size(size_bytes: float) -> str:
    """Bytes in the largest binary unit that leaves at least 1."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size_bytes) < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


def counted(count: int, one: str) -> str:
    """`1 host`, `2 hosts`."""
    return f"{count} {one}" if count == 1 else f"{count} {one}s"


def duration(duration_s: float) -> str:
    """A duration in the largest unit, up to days, of which it is a whole number."""
    milliseconds = round(duration_s * 1e3)
    for unit in ("d", "h", "m", "s"):
        if milliseconds and milliseconds % round(_SECONDS_OF[unit] * 1e3) == 0:
            return f"{milliseconds // round(_SECONDS_OF[unit] * 1e3)} {unit}"
    return f"{milliseconds} ms"


def duration_from_text(text: str | float) -> float:
    """Seconds of "500ms", "90s", "15m", "24h", "7d" or "2w". Raises ValueError."""
    if isinstance(text, int | float):
        return float(text)
    found = _NUMBER.fullmatch(text)
    duration_s = float(found[1]) * _SECONDS_OF.get(found[2], 0) if found is not None else 0.0
    if not 0 < duration_s < 1e10:
        raise ValueError(f"{text!r} is not a duration; write 500ms, 90s, 15m, 24h, 7d or 2w")
    return duration_s
