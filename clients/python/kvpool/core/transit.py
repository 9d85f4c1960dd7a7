"""How long messages of a stream were on their way, told from the sender's clock."""

from __future__ import annotations

_DRIFT = 1e-4  # how much faster one of the two clocks may run


class Transit:
    """Of one stream. Time is passed in.

    The two clocks have nothing in common but their speed. What is known of their distance: the sender opened the stream
    after we asked for it. So a message is never taken for younger than it is; by as much as the opening took, and that
    shrinks by 0.1 ms a second, for older.
    """

    def __init__(self, asked_at_s: float) -> None:
        """asked_at_s: when the stream was asked for, by our clock."""
        self._opened_at_s = asked_at_s  # when the sender opened it, by our clock, or a little before
        self._looked_at_s = asked_at_s

    def delay_s(self, sent_s: float, now_s: float) -> float:
        """Of a message that is taken up now. sent_s: seconds since the sender opened the stream, by its clock."""
        self._opened_at_s += _DRIFT * max(0.0, now_s - self._looked_at_s)
        self._looked_at_s = now_s
        self._opened_at_s = min(self._opened_at_s, now_s - sent_s)
        return now_s - sent_s - self._opened_at_s
