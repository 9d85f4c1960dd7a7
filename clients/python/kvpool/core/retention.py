"""How long and how eagerly pages are kept: per store request, per range of its tokens, or by default of a keyspace."""

from __future__ import annotations

from collections.abc import Sequence
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


@dataclass(frozen=True, slots=True)
class RetentionRange:
    """Retention of tokens [first_token, first_token + token_count) of the prompt, counted from its beginning."""

    first_token: int
    token_count: int
    retention: Retention

    def check(self, name: str) -> None:
        """Raises InvalidRequest naming the field."""
        if self.first_token < 0:
            raise InvalidRequest(f"{name}.first_token must be >= 0, got {self.first_token}")
        if self.token_count < 1:
            raise InvalidRequest(f"{name}.token_count must be >= 1, got {self.token_count}")
        self.retention.check(f"{name}.retention")


@dataclass(frozen=True, slots=True)
class PromptRetention:
    """How the tokens of a prompt are kept: those that no range touches as `otherwise` says."""

    ranges: tuple[RetentionRange, ...] = ()
    otherwise: Retention = NO_RETENTION


def retention_of_tokens(
    first_token: int, token_count: int, ranges: Sequence[RetentionRange], otherwise: Retention
) -> Retention:
    """Retention of a chunk: what keeps it longest of all ranges that touch it, field by field; else `otherwise`.

    A chunk is kept or lost as a whole, so a range that names one of its tokens speaks for all of them.
    """
    end = first_token + token_count
    touching = [
        one.retention for one in ranges if one.first_token < end and first_token < one.first_token + one.token_count
    ]
    if not touching:
        return otherwise
    unlimited = any(not one.ttl_ms for one in touching)
    return Retention(
        ttl_ms=0 if unlimited else max(one.ttl_ms for one in touching),
        priority=max(one.priority for one in touching),
        pinned_until_us=max(one.pinned_until_us for one in touching),
    )
