"""A progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from typing import TextIO

from tqdm import tqdm  # type: ignore[import-untyped]


class Progress:
    """Steps done of `total`, on stderr."""

    def __init__(self, total: int, stream: TextIO = sys.stderr) -> None:
        self._total, self._done, self._stream = total, 0, stream
        self._bar = tqdm(total=total, unit="turn", file=stream, leave=False) if stream.isatty() else None

    def phase(self, title: str) -> None:
        """A new part begins."""
        if self._bar is not None:
            self._bar.set_description(title)
        else:
            self._line(title)

    def step(self, text: str) -> None:
        """One more is done."""
        self._done += 1
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update()
        else:
            self._line(f"  [{self._done}/{self._total}] {text}")

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.close()

    def _line(self, text: str) -> None:
        self._stream.write(f"{text}\n")
        self._stream.flush()
