"""A silent peer is told from one that could not be heard."""

from __future__ import annotations

from kvpool.core.silence import Silence


def looks(silence: Silence, *seconds: float) -> list[bool]:
    return [silence.look(now_s) for now_s in seconds]


def test_a_peer_that_says_nothing_is_silent_after_four_heartbeats() -> None:
    silence = Silence(heartbeat_s=1.0)
    assert looks(silence, 10.0, 11.0, 12.0, 13.0, 13.5, 14.0, 15.0) == [False] * 5 + [True] * 2


def test_whatever_it_says_counts_anew() -> None:
    silence = Silence(heartbeat_s=1.0)
    assert not any(looks(silence, 10.0, 11.0, 12.0, 13.0))
    silence.heard()
    assert looks(silence, 14.0, 15.0, 16.0, 17.0) == [False, False, False, True]


def test_a_pause_of_ones_own_is_no_silence_of_the_peer() -> None:
    silence = Silence(heartbeat_s=1.0)
    assert not any(looks(silence, 10.0, 3600.0, 3601.0, 3602.0)), "what it said meanwhile has not been read yet"
    assert silence.look(3603.0), "it does not last for ever"
