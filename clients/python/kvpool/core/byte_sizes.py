"""Sizes in bytes as text, for flags, environment variables and options of every program here."""

from __future__ import annotations

import re
from typing import Final

# Binary units as `kubectl` and Python programs write them; GB and G are decimal, as on the label of a disk.
_BYTES_OF: Final = {
    unit: factor
    for power, letter in enumerate("KMGTP", 1)
    for unit, factor in (
        *((f"{letter}{end}", 1024**power) for end in ("iB", "i")),
        *((f"{one}{end}", 1000**power) for one in {letter, "k" if letter == "K" else letter} for end in ("B", "")),
    )
} | {"": 1, "B": 1}
_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def size_from_text(text: str | int) -> int:
    """Bytes of "12345", "64MiB", "64Mi" or "2GB" (decimal). Raises ValueError."""
    if isinstance(text, int):
        return text
    found = _SIZE.fullmatch(text)
    factor = _BYTES_OF.get(found[2]) if found is not None else None
    if found is None or factor is None or ("." in found[1] and factor == 1):
        raise ValueError(f"{text!r} is not a size; write a whole number of bytes, or 64MiB, 1.5Gi, 2TB")
    return int(float(found[1]) * factor) if "." in found[1] else int(found[1]) * factor


def exact_size_text(size_bytes: int) -> str:
    """A size in the largest binary unit that shows it exactly, e.g. 68719476736 as 64GiB."""
    for unit, factor in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes and size_bytes % factor == 0:
            return f"{size_bytes // factor}{unit}"
    return str(size_bytes)
