"""What commands print: tables for people, and how a command fails."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvpool.core.errors import KvPoolError

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2


def table(headers: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[int] = ()) -> str:
    """Columns padded to their widest cell; `right` names the columns of numbers."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(line[column]) for line in [list(headers), *cells]) for column in range(len(headers))]

    def line(values: Sequence[str]) -> str:
        padded = [
            value.rjust(width) if column in right else value.ljust(width)
            for column, (value, width) in enumerate(zip(values, widths, strict=True))
        ]
        return "  ".join(padded).rstrip()

    return "\n".join([line(headers), line(["-" * width for width in widths]), *(line(row) for row in cells)])


def size(size_bytes: float) -> str:
    """Bytes in the largest binary unit that leaves at least 1."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size_bytes) < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


def fail(error: KvPoolError | str, *, code: int = EXIT_FAILED) -> int:
    """One clear line on stderr; returns the exit code."""
    line = " ".join(str(error).split())
    sys.stderr.write(f"kvpool: {line}\n")
    return code
