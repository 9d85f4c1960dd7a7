"""Which peers are given up: those that say nothing, and not those that could not be heard."""

from __future__ import annotations

import math

from kvpool_pagestore.core.sessions import Session, SessionTable


def table_of(*heard_s: float) -> tuple[SessionTable, list[Session]]:
    table = SessionTable(silence_limit_s=4.0, grace_s=1.0)
    sessions = [Session(bytes([at]) * 16, "t", "peer", 1, heard) for at, heard in enumerate(heard_s)]
    for session in sessions:
        table.add(session)
    return table, sessions


def test_a_peer_that_says_nothing_for_the_limit_is_silent() -> None:
    table, (silent, other) = table_of(0.0, 0.0)
    for now_s in (1.0, 2.0, 3.0, 3.9):
        other.heard_s = now_s
        assert table.silent(now_s) == []
    assert table.silent(4.0) == [silent]


def test_after_a_pause_of_its_own_peers_have_time_to_be_heard() -> None:
    table, (silent, other) = table_of(0.0, 0.0)
    assert table.silent(1.0) == []
    assert table.silent(3600.0) == [], "what they said meanwhile has not been read yet"
    other.heard_s = 3600.1
    assert table.silent(3601.0) == [silent], "three seconds before the pause and after it, and two of it"


def test_after_a_pause_nobody_was_heard_later_than_now() -> None:
    table, (late,) = table_of(5.0)
    assert table.silent(1.0) == []
    assert table.silent(6.0) == []
    assert late.heard_s == 6.0


def test_a_session_of_this_process_itself_is_never_silent() -> None:
    table, (silent, _) = table_of(0.0, math.inf)
    assert table.silent(1.0) == []
    assert table.silent(3600.0) == [], "this process stood still"
    for now_s in (3601.0, 3602.0):
        table.silent(now_s)
    assert table.silent(7200.0) == [silent]
    assert table.silent(7300.0) == [silent]
