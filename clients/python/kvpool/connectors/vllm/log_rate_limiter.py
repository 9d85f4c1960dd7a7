"""Rate limit for log lines that could otherwise be written in every step."""

from __future__ import annotations

import time
from collections.abc import Callable

_PAUSE_S = 10.0


class LogRateLimiter:
    """Rate limit by subject, of which there are few. Use one for each place that logs."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._logged_at_s: dict[str, float] = {}
        self._suppressed: dict[str, int] = {}

    def due(self, subject: str) -> bool:
        """Return whether a line about `subject` may be logged now."""
        now_s, logged_at_s = self._now_s(), self._logged_at_s.get(subject)
        if logged_at_s is not None and now_s - logged_at_s < _PAUSE_S:
            self._suppressed[subject] = self._suppressed.get(subject, 0) + 1
            return False
        self._logged_at_s[subject] = now_s
        return True

    def suppressed(self, subject: str) -> str:
        """Return a suffix for the log line: how many like it were suppressed since the last one."""
        count = self._suppressed.pop(subject, 0)
        return f" (and {count} more like it since this was last logged)" if count else ""
