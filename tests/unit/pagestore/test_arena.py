"""Arena segments on a real shared-memory file system."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import kvpool_pagestore.adapters.arena as arena_module
from kvpool.core.errors import ArenaFull, StartupFailed
from kvpool_pagestore.adapters.arena import TmpfsArena
from kvpool_server import flock
from tests.fixtures.pagestore import shared_memory_directory

MIB = 1 << 20


@pytest.fixture
def directory() -> Iterator[Path]:
    with shared_memory_directory() as path:
        yield path / "arena"


def opened(directory: Path, capacity_bytes: int = 4 * MIB) -> TmpfsArena:
    arena = TmpfsArena(directory, flock)
    arena.open(capacity_bytes)
    return arena


def test_a_segment_has_all_its_memory_and_is_private(directory: Path) -> None:
    arena = opened(directory)
    arena.create_segment(7, MIB)
    info = os.fstat(arena.descriptor(7))
    assert (info.st_size, info.st_blocks * 512, info.st_mode & 0o777) == (MIB, MIB, 0o600)
    with arena.view(7, 4096, 10) as view:
        view[:] = b"0123456789"
        assert os.pread(arena.descriptor(7), 10, 4096) == b"0123456789"
    arena.destroy_segment(7)
    with pytest.raises(KeyError):
        arena.descriptor(7)
    arena.close(remove=True)
    assert not directory.exists()


def test_a_directory_belongs_to_one_pagestore(directory: Path) -> None:
    first = opened(directory)
    with pytest.raises(StartupFailed, match="in use by another pagestore"):
        opened(directory)
    first.close(remove=True)
    opened(directory).close(remove=True)


def test_a_neighbour_that_sweeps_does_not_keep_an_owner_from_starting(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(directory).close(remove=False)
    sweeping = os.open(directory / "lock", os.O_RDWR)
    fcntl.flock(sweeping, fcntl.LOCK_EX)
    pauses_s = list[float]()

    def let_go(pause_s: float) -> None:
        pauses_s.append(pause_s)
        os.close(sweeping)

    monkeypatch.setattr(arena_module, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=let_go))
    opened(directory).close(remove=True)
    assert len(pauses_s) == 1


def test_an_arena_that_can_never_fit_is_refused_at_start(directory: Path) -> None:
    with pytest.raises(StartupFailed, match=r"grow /dev/shm or lower --arena-bytes"):
        opened(directory, 1 << 50)


def test_a_directory_that_cannot_be_made_is_named(directory: Path) -> None:
    directory.parent.joinpath("file").write_text("")
    with pytest.raises(StartupFailed, match="configure --shm-dir"):
        opened(directory.parent / "file" / "arena")


def test_no_room_for_a_segment_is_a_full_arena(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = opened(directory)

    def no_space(fd: int, offset: int, size_bytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_space)
    with pytest.raises(ArenaFull, match=r"grow /dev/shm or lower --arena-bytes"):
        arena.create_segment(1, MIB)
    assert not list(directory.glob("segment-*"))
    arena.close(remove=True)


def test_segments_of_an_earlier_process_are_found_counted_and_destroyed(directory: Path) -> None:
    before = opened(directory)
    before.create_segment(1, MIB)
    before.create_segment(2, 2 * MIB)
    fd = before.create_session_file(b"s" * 16)
    before.close(remove=False)
    arena = opened(directory)
    assert arena.old_bytes == 3 * MIB
    assert arena.old_sessions() == [b"s" * 16]
    assert arena.gone_sessions([b"s" * 16, b"t" * 16]) == [b"t" * 16]
    os.close(fd)
    assert arena.gone_sessions([b"s" * 16]) == [b"s" * 16]
    arena.forget_sessions([b"s" * 16])
    arena.destroy_old_segments()
    assert arena.old_bytes == 0 and not list(directory.glob("se*"))
    arena.close(remove=True)


def test_prepared_segments_of_an_earlier_process_that_no_peer_could_map_are_destroyed_apart(directory: Path) -> None:
    before = opened(directory)
    before.create_segment(1, MIB)
    for segment_id in (2, 3, 4):
        assert before.prepare_segment(segment_id, 2 * MIB, lambda: True)
    before.view(3, 0, 6)[:] = b"shared"
    peer_fd = os.dup(before.descriptor(3))
    before.close(remove=False)
    arena = opened(directory)
    assert arena.old_bytes == 7 * MIB
    assert arena.destroy_unshared_segments() == 4 * MIB
    assert arena.old_bytes == 3 * MIB and len(list(directory.glob("segment-*"))) == 2
    assert arena.destroy_unshared_segments() == 0
    assert os.pread(peer_fd, 6, 0) == b"shared"
    os.close(peer_fd)
    arena.destroy_old_segments()
    assert arena.old_bytes == 0 and not list(directory.glob("segment-*"))
    arena.close(remove=True)


@pytest.mark.parametrize("shared", [False, True])
def test_a_prepared_segment_leaves_nothing_when_it_is_destroyed(shared: bool, directory: Path) -> None:
    arena = opened(directory)
    assert arena.prepare_segment(1, MIB, lambda: True)
    if shared:
        assert arena.descriptor(1) == arena.descriptor(1)
    arena.destroy_segment(1)
    assert not list(directory.glob("segment-*"))
    arena.close(remove=True)


def test_a_segment_that_somebody_still_looks_at_is_unlinked_all_the_same(directory: Path) -> None:
    arena = opened(directory)
    arena.create_segment(1, MIB)
    view = arena.view(1, 0, 16)
    arena.destroy_segment(1)
    assert not list(directory.glob("segment-*"))
    assert bytes(view) == bytes(16)  # still mapped: no crash
    arena.close(remove=True)


def test_only_arenas_whose_owner_and_peers_are_gone_are_swept(directory: Path) -> None:
    root = directory.parent
    living, mapped, abandoned = (TmpfsArena(root / f"kvpool-{name * 32}", flock) for name in "abc")
    for arena in (living, mapped, abandoned):
        arena.open(MIB)
        arena.create_segment(1, MIB)
    fd = mapped.create_session_file(b"s" * 16)
    os.close(abandoned.create_session_file(b"s" * 16))
    mapped.close(remove=False)
    abandoned.close(remove=False)
    (root / "kvpool-notes").mkdir()
    (root / "kvpool-notes" / "segment-1").write_text("not ours")
    sweeper = TmpfsArena(root / f"kvpool-{'d' * 32}", flock)
    assert sweeper.sweep_abandoned() == 1
    left = sorted(path.parent.name for path in root.glob("*/segment-*"))
    assert left == [f"kvpool-{'a' * 32}", f"kvpool-{'b' * 32}", "kvpool-notes"]
    os.close(fd)
    assert sweeper.sweep_abandoned() == 1
    # An owner that comes back finds its arena empty, and starts.
    abandoned.open(MIB)
    assert abandoned.old_bytes == 0 and abandoned.old_sessions() == []
    for arena in (living, abandoned):
        arena.close(remove=True)


def test_a_prepared_segment_has_all_its_memory_in_place(directory: Path) -> None:
    arena = opened(directory)
    assert arena.prepare_segment(7, MIB, lambda: True)
    info = os.fstat(arena.descriptor(7))
    assert (info.st_size, info.st_blocks * 512, info.st_mode & 0o777) == (MIB, MIB, 0o600)
    with arena.view(7, 4096, 10) as view:
        view[:] = b"0123456789"
        assert os.pread(arena.descriptor(7), 10, 4096) == b"0123456789"
    arena.close(remove=True)
    assert not directory.exists()


def test_a_segment_that_is_not_wanted_any_more_leaves_nothing(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "_PREPARED_AT_ONCE_BYTES", MIB // 4)
    arena = opened(directory)
    answers = iter((True, True, False))
    assert not arena.prepare_segment(1, MIB, lambda: next(answers))
    assert next(answers, None) is None and not list(directory.glob("segment-*"))
    with pytest.raises(KeyError):
        arena.descriptor(1)
    arena.close(remove=True)


@pytest.mark.parametrize("huge", [False, True])
def test_a_kernel_that_cannot_populate_has_the_memory_reserved(
    huge: bool, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena_module, "_huge_pages_may_be_asked_for", lambda: huge)
    monkeypatch.setattr(arena_module, "_MADV_POPULATE_WRITE", 9999)
    arena = opened(directory)
    assert arena.prepare_segment(1, MIB, lambda: True)
    assert os.fstat(arena.descriptor(1)).st_blocks * 512 == MIB
    arena.close(remove=True)


def test_no_room_for_a_prepared_segment_is_a_full_arena_and_leaves_nothing(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = opened(directory)

    def no_space(fd: int, offset: int, size_bytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_space)
    with pytest.raises(ArenaFull, match=r"grow /dev/shm or lower --arena-bytes"):
        arena.prepare_segment(1, MIB, lambda: True)
    assert not list(directory.glob("segment-*"))
    arena.close(remove=True)


@pytest.mark.parametrize(("said", "asked_for"), [("always [advise] never", True), ("always [never] deny", False)])
def test_huge_pages_are_asked_for_where_the_system_gives_them(
    said: str, asked_for: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shmem_enabled").write_text(said)
    monkeypatch.setattr(arena_module, "_HUGE_PAGES", tmp_path / "shmem_enabled")
    assert arena_module._huge_pages_may_be_asked_for() is asked_for
    monkeypatch.setattr(arena_module, "_HUGE_PAGES", tmp_path / "missing")
    assert not arena_module._huge_pages_may_be_asked_for()


def test_the_memory_of_an_arena_that_ends_is_given_back_at_once_whoever_still_looks(directory: Path) -> None:
    arena = opened(directory)
    for segment_id in range(3):
        assert arena.prepare_segment(segment_id, MIB, lambda: True)
    descriptor = os.dup(arena.descriptor(1))
    view = arena.view(1, 0, 16)
    view[:] = bytes(range(16))
    arena.close(remove=True)
    assert os.fstat(descriptor).st_blocks == 0 and not directory.exists()
    assert bytes(view) == bytes(16)  # still mapped: no crash
    os.close(descriptor)
