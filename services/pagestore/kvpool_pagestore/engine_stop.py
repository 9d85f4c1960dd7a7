"""Telling work on another thread that it is not wanted any more."""

from __future__ import annotations

import threading
from collections.abc import Callable


class StopSignal:
    """A ports.Stop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stopped = False
        self._act: Callable[[], object] | None = None

    @property
    def stopped(self) -> bool:
        return self._stopped

    def on_stop(self, act: Callable[[], object]) -> None:
        with self._lock:
            self._act = act
            stopped = self._stopped
        if stopped:
            act()

    def stop(self) -> None:
        """Idempotent."""
        with self._lock:
            act = self._act if not self._stopped else None
            self._stopped = True
        if act is not None:
            act()
