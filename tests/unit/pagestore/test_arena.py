"""Arena segments in real memory files."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvpool_pagestore.adapters.arena as arena_module
from kvpool.core.errors import ArenaFull, StartupFailed
from kvpool_pagestore.adapters.arena import MemfdArena
from tests.fixtures.pagestore import shared_memory_directory

MIB = 1 << 20


@pytest.fixture
def directory() -> Iterator[Path]:
    with shared_memory_directory() as path:
        yield path / "arena"


SESSION = b"s" * 16


def opened(directory: Path, capacity_bytes: int = 4 * MIB, root: Path = Path("/")) -> MemfdArena:
    arena = MemfdArena(directory, root)
    arena.open(capacity_bytes)
    return arena


def test_a_segment_has_all_its_memory_and_is_private(directory: Path) -> None:
    arena = opened(directory)
    arena.create_segment(7, MIB)
    info = os.fstat(arena.descriptor(7, SESSION))
    assert (info.st_size, info.st_blocks * 512, info.st_mode & 0o777) == (MIB, MIB, 0o600)
    with arena.view(7, 4096, 10) as view:
        view[:] = b"0123456789"
        assert os.pread(arena.descriptor(7, SESSION), 10, 4096) == b"0123456789"
    arena.destroy_segment(7)
    with pytest.raises(KeyError):
        arena.descriptor(7, SESSION)
    arena.close(remove=True)
    assert not directory.exists()


def test_a_directory_belongs_to_one_pagestore(directory: Path) -> None:
    first = opened(directory)
    with pytest.raises(StartupFailed, match="in use by another pagestore"):
        opened(directory)
    first.close(remove=True)
    opened(directory).close(remove=True)


def host(root: Path, total_bytes: int, available_bytes: int, **files: str) -> Path:
    """A host of so much memory. files: of /proc and /sys, with __ for / in their names."""
    files |= {"proc__meminfo": f"MemTotal: {total_bytes >> 10} kB\nMemAvailable: {available_bytes >> 10} kB\n"}
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


CGROUP_2 = {
    "proc__self__cgroup": "0::/kvpool.slice/store\n",
    "sys__fs__cgroup__kvpool.slice__store__memory.max": "max\n",
    "sys__fs__cgroup__kvpool.slice__memory.max": f"{8 * MIB}\n",
}
CGROUP_2_OF_A_CONTAINER = {"proc__self__cgroup": "0::/\n", "sys__fs__cgroup__memory.max": f"{8 * MIB}\n"}
CGROUP_1 = {
    "proc__self__cgroup": "5:cpu,cpuacct:/x\n4:memory:/docker/0123\n0::/\n",
    "sys__fs__cgroup__memory__memory.limit_in_bytes": f"{8 * MIB}\n",
}
NO_CGROUP_LIMIT = {
    "proc__self__cgroup": "4:memory:/\n",
    "sys__fs__cgroup__memory__memory.limit_in_bytes": "9223372036854771712\n",
}


def test_an_arena_that_the_host_can_never_hold_is_refused_at_start(directory: Path, tmp_path: Path) -> None:
    root = host(tmp_path, 16 * MIB, 16 * MIB, **NO_CGROUP_LIMIT)
    with pytest.raises(StartupFailed, match=rf"{17 * MIB}, but this host has {16 * MIB} .* or lower --arena-bytes"):
        opened(directory, 17 * MIB, root)
    opened(directory, 16 * MIB, root).close(remove=True)  # the directory was let go of


@pytest.mark.parametrize("cgroup", [CGROUP_1, CGROUP_2, CGROUP_2_OF_A_CONTAINER])
def test_an_arena_above_the_limit_of_a_cgroup_is_refused_at_start(
    cgroup: dict[str, str], directory: Path, tmp_path: Path
) -> None:
    root = host(tmp_path, 64 * MIB, 64 * MIB, **cgroup)
    with pytest.raises(StartupFailed, match=rf"{9 * MIB}, but the memory limit .* is {8 * MIB}; .* --arena-bytes"):
        opened(directory, 9 * MIB, root)
    opened(directory, 8 * MIB, root).close(remove=True)


def test_an_arena_that_others_leave_no_memory_for_is_warned_of_and_its_segments_are_refused(
    directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = host(tmp_path, 1 << 40, 8 * MIB)
    arena = opened(directory, 9 * MIB, root)
    assert f"arena_bytes is {9 * MIB}, but only {8 * MIB} bytes are available" in caplog.text
    for make in (arena.create_segment, lambda one, size: arena.prepare_segment(one, size, lambda: True)):
        with pytest.raises(ArenaFull, match="lower --arena-bytes"):
            make(1, MIB)
        with pytest.raises(KeyError):
            arena.descriptor(1, SESSION)
    host(tmp_path, 1 << 40, 1 << 30)
    arena.create_segment(1, MIB)
    arena.close(remove=True)


def test_memory_that_peers_keep_is_available_to_the_budget_that_counts_it(
    directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = opened(directory)
    before.create_segment(1, 2 * MIB)
    for session_id in (SESSION, b"t" * 16):
        os.close(before.create_session_file(session_id))
        before.descriptor(1, session_id)
    before.close(remove=False)
    opened(directory, 10 * MIB, host(tmp_path, 1 << 40, 8 * MIB)).close(remove=False)
    assert not caplog.records
    opened(directory, 11 * MIB, tmp_path).close(remove=True)
    assert caplog.records


def test_peers_can_change_neither_the_size_of_a_segment_nor_what_others_may_do_with_it(directory: Path) -> None:
    arena = opened(directory)
    arena.create_segment(1, MIB)
    assert arena.prepare_segment(2, MIB, lambda: True)
    for segment_id in (1, 2):
        fd = os.dup(arena.descriptor(segment_id, SESSION))
        for size_bytes in (0, MIB - 1, 2 * MIB):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size_bytes)
        for seal in (fcntl.F_SEAL_WRITE, 0x10):  # the latter: of all writes to come
            with pytest.raises(PermissionError):
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seal)
        os.close(fd)
    arena.close(remove=True)


def test_a_directory_that_cannot_be_made_is_named(directory: Path) -> None:
    directory.parent.joinpath("file").write_text("")
    with pytest.raises(StartupFailed, match="configure --session-dir"):
        opened(directory.parent / "file" / "arena")


def test_no_room_for_a_segment_is_a_full_arena(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = opened(directory)

    def no_space(fd: int, offset: int, size_bytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_space)
    with pytest.raises(ArenaFull, match=r"lower --arena-bytes"):
        arena.create_segment(1, MIB)
    with pytest.raises(KeyError):
        arena.view(1, 0, 1)
    arena.close(remove=True)


def test_what_peers_got_of_an_earlier_process_is_known_until_their_sessions_are_forgotten(directory: Path) -> None:
    before = opened(directory)
    for segment_id in (1, 2, 3):
        before.create_segment(segment_id, segment_id * MIB)
    others = b"t" * 16
    fds = [before.create_session_file(session_id) for session_id in (SESSION, others, b"u" * 16)]
    for segment_id, session_id in ((1, SESSION), (2, SESSION), (2, SESSION), (2, others)):
        before.descriptor(segment_id, session_id)
    before.close(remove=False)
    arena = opened(directory)
    assert arena.old_sessions() == {SESSION: {1: MIB, 2: 2 * MIB}, others: {2: 2 * MIB}, b"u" * 16: {}}
    assert arena.gone_sessions([SESSION, b"v" * 16]) == [b"v" * 16]
    os.close(fds[0])
    assert arena.gone_sessions([SESSION, others]) == [SESSION]
    arena.forget_sessions([SESSION])
    assert arena.old_sessions() == {others: {2: 2 * MIB}, b"u" * 16: {}}
    arena.close(remove=True)
    assert not directory.exists()
    for fd in fds[1:]:
        os.close(fd)


def test_a_record_that_a_kill_cut_off_is_read_as_far_as_it_goes(directory: Path) -> None:
    before = opened(directory)
    before.create_segment(1, MIB)
    os.close(before.create_session_file(SESSION))
    before.descriptor(1, SESSION)
    before.close(remove=False)
    (record,) = directory.glob("segments-*")
    record.write_bytes(record.read_bytes() + b"cut")
    arena = opened(directory)
    assert arena.old_sessions() == {SESSION: {1: MIB}}
    arena.close(remove=True)


def test_a_peer_gets_no_segment_that_cannot_be_recorded(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = opened(directory)
    arena.create_segment(1, MIB)

    def no_space(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", no_space)
        with pytest.raises(ArenaFull, match="configure --session-dir"):
            arena.descriptor(1, SESSION)
    assert arena.descriptor(1, SESSION) >= 0
    arena.close(remove=True)


def test_a_segment_with_open_views_is_destroyed_all_the_same(directory: Path) -> None:
    arena = opened(directory)
    arena.create_segment(1, MIB)
    view = arena.view(1, 0, 16)
    arena.destroy_segment(1)
    with pytest.raises(KeyError):
        arena.descriptor(1, SESSION)
    assert bytes(view) == bytes(16)  # still mapped: no crash
    arena.close(remove=True)


def test_a_prepared_segment_has_all_its_memory_in_place(directory: Path) -> None:
    arena = opened(directory)
    assert arena.prepare_segment(7, MIB, lambda: True)
    info = os.fstat(arena.descriptor(7, SESSION))
    assert (info.st_size, info.st_blocks * 512, info.st_mode & 0o777) == (MIB, MIB, 0o600)
    with arena.view(7, 4096, 10) as view:
        view[:] = b"0123456789"
        assert os.pread(arena.descriptor(7, SESSION), 10, 4096) == b"0123456789"
    arena.close(remove=True)
    assert not directory.exists()


def test_a_segment_that_is_not_wanted_any_more_leaves_nothing(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "_PREPARED_AT_ONCE_BYTES", MIB // 4)
    arena = opened(directory)
    answers = iter((True, True, False))
    assert not arena.prepare_segment(1, MIB, lambda: next(answers))
    assert next(answers, None) is None
    with pytest.raises(KeyError):
        arena.descriptor(1, SESSION)
    arena.close(remove=True)


@pytest.mark.parametrize("huge", [False, True])
def test_a_kernel_that_cannot_populate_has_the_memory_reserved(
    huge: bool, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena_module, "_huge_pages_may_be_asked_for", lambda: huge)
    monkeypatch.setattr(arena_module, "_MADV_POPULATE_WRITE", 9999)
    arena = opened(directory)
    assert arena.prepare_segment(1, MIB, lambda: True)
    assert os.fstat(arena.descriptor(1, SESSION)).st_blocks * 512 == MIB
    arena.close(remove=True)


def test_no_room_for_a_prepared_segment_is_a_full_arena_and_leaves_nothing(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = opened(directory)

    def no_space(fd: int, offset: int, size_bytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_space)
    with pytest.raises(ArenaFull, match=r"lower --arena-bytes"):
        arena.prepare_segment(1, MIB, lambda: True)
    with pytest.raises(KeyError):
        arena.view(1, 0, 1)
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


def test_the_memory_of_an_arena_that_ends_is_freed_at_once_despite_open_views(directory: Path) -> None:
    arena = opened(directory)
    for segment_id in range(3):
        assert arena.prepare_segment(segment_id, MIB, lambda: True)
    descriptor = os.dup(arena.descriptor(1, SESSION))
    view = arena.view(1, 0, 16)
    view[:] = bytes(range(16))
    arena.close(remove=True)
    assert os.fstat(descriptor).st_blocks == 0 and not directory.exists()
    assert bytes(view) == bytes(16)  # still mapped: no crash
    os.close(descriptor)
