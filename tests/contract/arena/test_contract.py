"""What ports.Arena promises."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Protocol

import pytest

from kvpool_pagestore.ports import Arena

SIZE_BYTES = 64 << 10
FIRST, SECOND = b"1" * 16, b"2" * 16


class StartedArena(Arena, Protocol):
    """An arena with what its owner asks for at start and end."""

    def old_sessions(self) -> Mapping[bytes, Mapping[int, int]]: ...

    def close(self, *, remove: bool) -> None: ...


class Host(ABC):
    """What outlives the owner of an arena."""

    @abstractmethod
    def start(self) -> StartedArena: ...

    @abstractmethod
    def crash(self, arena: StartedArena) -> None:
        """The owner's process is gone."""

    @abstractmethod
    def give_up(self, arena: StartedArena, fd: int) -> Callable[[], None]:
        """A session file goes to a peer; returns what ends the peer."""


@pytest.mark.parametrize("is_prepared", [False, True])
def test_bytes_stay_where_they_were_put_and_a_destroyed_segment_is_unknown(host: Host, is_prepared: bool) -> None:
    arena = host.start()
    for segment_id in (1, 2):
        if is_prepared:
            assert arena.prepare_segment(segment_id, SIZE_BYTES, lambda: True)
        else:
            arena.create_segment(segment_id, SIZE_BYTES)
    arena.view(1, 4096, 5)[:] = b"first"
    arena.view(2, 4096, 6)[:] = b"second"
    assert bytes(arena.view(1, 4096, 5)) == b"first" and bytes(arena.view(2, 4096, 6)) == b"second"
    arena.destroy_segment(1)
    with pytest.raises(KeyError):
        arena.view(1, 0, 1)
    with pytest.raises(KeyError):
        arena.descriptor(1, FIRST)
    arena.close(remove=True)


def test_what_peers_got_is_known_to_the_next_owner_until_their_sessions_are_forgotten(host: Host) -> None:
    arena = host.start()
    for segment_id in (1, 2, 3):
        arena.create_segment(segment_id, segment_id * SIZE_BYTES)
    fds = {session_id: arena.create_session_file(session_id) for session_id in (FIRST, SECOND)}
    for segment_id, session_id in ((1, FIRST), (2, FIRST), (2, SECOND), (2, SECOND)):
        arena.descriptor(segment_id, session_id)
    end = {session_id: host.give_up(arena, fd) for session_id, fd in fds.items()}
    host.crash(arena)
    arena = host.start()
    assert arena.old_sessions() == {FIRST: {1: SIZE_BYTES, 2: 2 * SIZE_BYTES}, SECOND: {2: 2 * SIZE_BYTES}}
    assert not arena.gone_sessions([FIRST, SECOND])
    end[FIRST]()
    assert list(arena.gone_sessions([FIRST, SECOND])) == [FIRST]
    arena.forget_sessions([FIRST])
    assert arena.old_sessions() == {SECOND: {2: 2 * SIZE_BYTES}}
    host.crash(arena)
    arena = host.start()
    assert arena.old_sessions() == {SECOND: {2: 2 * SIZE_BYTES}}
    end[SECOND]()
    arena.close(remove=True)
    arena = host.start()
    assert arena.old_sessions() == {}
    arena.close(remove=True)


def test_a_session_that_was_never_known_is_gone(host: Host) -> None:
    arena = host.start()
    assert list(arena.gone_sessions([FIRST])) == [FIRST]
    arena.forget_sessions([FIRST])
    arena.close(remove=True)
