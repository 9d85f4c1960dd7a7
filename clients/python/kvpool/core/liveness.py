"""Whether the peer of a session still lives: the one rule of clients and services.

A process that stands still (it is stopped, swapped out, or its machine pauses) runs its timers first when it goes on,
and reads what its peers said meanwhile after that. By its clock alone it would give up peers that are well.
"""

from __future__ import annotations

SILENT_HEARTBEATS = 4  # a peer that says nothing for so many intervals is gone


class LivenessMonitor:
    """Counts a peer's silence from check to check; of a pause longer than planned, no more than two planned ones."""

    def __init__(self, heartbeat_s: float) -> None:
        """heartbeat_s: how often the peer is to say something, or more often."""
        self.limit_s = SILENT_HEARTBEATS * heartbeat_s
        self.check_s = heartbeat_s / 2  # how far apart checks are to be
        self._checked_s: float | None = None
        self._silent_s = 0.0

    def beat(self) -> None:
        """The peer said something."""
        self._silent_s = 0.0

    def expired(self, now_s: float) -> bool:
        """Whether the peer was silent for the limit. To be asked every `check_s`."""
        if self._checked_s is not None:
            self._silent_s += min(now_s - self._checked_s, 2 * self.check_s)
        self._checked_s = now_s
        return self._silent_s >= self.limit_s
