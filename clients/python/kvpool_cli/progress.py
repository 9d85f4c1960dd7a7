"""How far a long command is: one line on a terminal's stderr, nothing where stderr is none."""

from __future__ import annotations

import shutil
import sys
import time

from kvpool_cli.output import size

_SHOWN_EVERY_S = 0.2
_BAR_CHARS = 24


class Progress:
    """Bytes done of a total; the rate is that since the start, less what was done before."""

    def __init__(self, what: str, total_bytes: int, *, done_before_bytes: int = 0) -> None:
        self._what = what
        self._total_bytes = total_bytes
        self._before_bytes = done_before_bytes
        self._started_s = time.monotonic()
        self._shown_s = float("-inf")
        self._shows = sys.stderr.isatty()

    def show(self, done_bytes: int) -> None:
        """Say where we are, now and then."""
        now_s = time.monotonic()
        if self._shows and now_s - self._shown_s >= _SHOWN_EVERY_S:
            self._shown_s = now_s
            columns = shutil.get_terminal_size().columns
            line = self.line(done_bytes, now_s - self._started_s)
            sys.stderr.write(f"\r{line[: columns - 1]}\x1b[K")
            sys.stderr.flush()

    def line(self, done_bytes: int, elapsed_s: float) -> str:
        """What is shown."""
        share = min(1.0, done_bytes / self._total_bytes) if self._total_bytes else 1.0
        filled = int(share * _BAR_CHARS)
        rate = (done_bytes - self._before_bytes) / elapsed_s if elapsed_s > 0 else 0.0
        left = f", {(self._total_bytes - done_bytes) / rate:.0f} s left" if rate > 0 else ""
        return (
            f"{self._what} [{'#' * filled}{'-' * (_BAR_CHARS - filled)}] {share:4.0%} "
            f"{size(done_bytes)} of {size(self._total_bytes)}, {size(rate)}/s{left}"
        )

    def end(self) -> None:
        """Take the line away."""
        if self._shows:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
