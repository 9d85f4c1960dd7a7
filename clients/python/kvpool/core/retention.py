"""How long and how eagerly pages are kept: per store request, or by default of a keyspace."""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.core.errors import InvalidRequest

PRIORITY_MAX = 100
PINNED_FOREVER_US = (1 << 63) - 1
"""A pin that never ends by itself. Any other pin is soft: it ends at its time."""


@dataclass(frozen=True, slots=True)
class Retention:
    """The defaults ask for nothing special; a page stored with them takes the defaults of its keyspace.

    ttl_ms:          milliseconds to live after the store; 0: no limit.
    priority:        -100 (first to go) to 100 (last to go).
    pinned_until_us: wall time, microseconds since the epoch, before which the page is not evicted; 0: not pinned.
    """

    ttl_ms: int = 0
    priority: int = 0
    pinned_until_us: int = 0

    def check(self, name: str = "retention") -> None:
        """Raises InvalidRequest naming the field."""
        for field in ("ttl_ms", "pinned_until_us"):
            if not 0 <= getattr(self, field) <= PINNED_FOREVER_US:
                raise InvalidRequest(f"{name}.{field} must be >= 0, got {getattr(self, field)}")
        if abs(self.priority) > PRIORITY_MAX:
            raise InvalidRequest(f"{name}.priority must lie in [-100, 100], got {self.priority}")

    def expires_us(self, now_us: int) -> int:
        """When a page stored now is worth nothing any more, as wall time; 0 for never."""
        return min(now_us + self.ttl_ms * 1000, PINNED_FOREVER_US) if self.ttl_ms else 0


NO_RETENTION = Retention()
"""Nothing special asked for."""
