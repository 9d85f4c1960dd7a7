"""How far a long command is: one line on a terminal's stderr, nothing where stderr is not a terminal."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bars


class Progress:
    """Bytes done of a total. done_before_bytes: of an earlier run."""

    def __init__(self, what: str, total_bytes: int, *, done_before_bytes: int = 0) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        console = Console(stderr=True)
        self._bars = Bars(*columns, console=console, transient=True, disable=not sys.stderr.isatty())
        self._task = self._bars.add_task(what, total=total_bytes, completed=done_before_bytes)
        self._bars.start()

    def show(self, done_bytes: int) -> None:
        """Show where we are, now and then."""
        self._bars.update(self._task, completed=done_bytes)

    def end(self) -> None:
        """Take the line away."""
        self._bars.stop()
