"""Log lines that may have a cause in every step, said once in a while."""

from __future__ import annotations

import time
from collections.abc import Callable

_PAUSE_S = 10.0


class LogRateLimiter:
    """Of one place; subjects are few."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic, pause_s: float = _PAUSE_S) -> None:
        self._now_s, self._pause_s = now_s, pause_s
        self._said_at_s: dict[str, float] = {}
        self._kept_back: dict[str, int] = {}

    def due(self, subject: str) -> bool:
        """Whether something may be said of it now."""
        now_s, said_at_s = self._now_s(), self._said_at_s.get(subject)
        if said_at_s is not None and now_s - said_at_s < self._pause_s:
            self._kept_back[subject] = self._kept_back.get(subject, 0) + 1
            return False
        self._said_at_s[subject] = now_s
        return True

    def more(self, subject: str) -> str:
        """What to add when it is said: how often it was not, since the last time."""
        count = self._kept_back.pop(subject, 0)
        return f" (and {count} more like it since this was last said)" if count else ""
