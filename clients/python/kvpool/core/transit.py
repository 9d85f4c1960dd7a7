"""How long messages of a stream were on their way, told from the sender's clock."""

from __future__ import annotations

_DRIFT = 1e-4  # how much faster one of the two clocks may run
_LATE_S = 2.0  # a replica has no use of heartbeats that come much later
_PATIENCE_S = 10.0


class Transit:
    """Of one stream. Time is passed in.

    The two clocks have nothing in common but their speed. What is known of their distance: the sender opened the stream
    after we asked for it. So a message is never taken for younger than it is; by as much as the opening took, and that
    shrinks by 0.1 ms a second, for older. That is too slow where the opening took long, or the sender's clock stood
    still with its machine: then the stream is adrift, and another one tells more.
    """

    def __init__(self, asked_at_s: float) -> None:
        """asked_at_s: when the stream was asked for, by our clock."""
        self._opened_at_s = asked_at_s  # when the sender opened it, by our clock, or a little before
        self._looked_at_s = asked_at_s
        self._late_since_s: float | None = None  # when the first came of those that were all late

    @property
    def is_adrift(self) -> bool:
        """Whether all messages of ten seconds were late: what waited is read in less."""
        return self._late_since_s is not None and self._looked_at_s - self._late_since_s >= _PATIENCE_S

    def delay_s(self, sent_s: float, now_s: float) -> float:
        """Of a message that is taken up now. sent_s: seconds since the sender opened the stream, by its clock."""
        self._opened_at_s += _DRIFT * max(0.0, now_s - self._looked_at_s)
        self._looked_at_s = now_s
        self._opened_at_s = min(self._opened_at_s, now_s - sent_s)
        delay_s = now_s - sent_s - self._opened_at_s
        if delay_s < _LATE_S:
            self._late_since_s = None
        elif self._late_since_s is None:
            self._late_since_s = now_s
        return delay_s
