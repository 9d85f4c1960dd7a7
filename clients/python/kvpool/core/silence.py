"""How long a peer has said nothing to a process that was there to hear it.

A process that stands still (it is stopped, swapped out, or its machine pauses) runs its timers first when it goes on,
and reads what its peers said meanwhile after that. By its clock alone it would give up peers that are well.
"""

from __future__ import annotations

SILENT_HEARTBEATS = 4  # a peer that says nothing for so many intervals is gone


class Silence:
    """Counts the time from look to look; of a pause that is longer than planned, no more than two planned ones."""

    def __init__(self, heartbeat_s: float) -> None:
        """heartbeat_s: how often the peer is to say something, or more often."""
        self.limit_s = SILENT_HEARTBEATS * heartbeat_s
        self.look_s = heartbeat_s / 2  # how far apart looks are to be
        self._looked_s: float | None = None
        self._silent_s = 0.0

    def heard(self) -> None:
        """The peer said something."""
        self._silent_s = 0.0

    def look(self, now_s: float) -> bool:
        """Whether the peer was silent for the limit."""
        if self._looked_s is not None:
            self._silent_s += min(now_s - self._looked_s, 2 * self.look_s)
        self._looked_s = now_s
        return self._silent_s >= self.limit_s
