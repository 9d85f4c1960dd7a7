"""The real pagestore process: start, refusal, orderly end, kill and restart, pages between two nodes."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvpool.client.fds import FetchedFd, fetch_fd
from kvpool.client.page_items import PageSource
from kvpool.client.pagestore import PageStoreSession, SessionPlan
from kvpool.client.pagestore_control import PageStoreControl
from kvpool.core.cluster import RemoteSource
from kvpool.testing import eventually
from tests.fixtures.pagestore import KEYSPACES, shared_memory_directory
from tests.fixtures.pagestore_process import (
    CLIENT,
    Process,
    environment,
    read,
    refused,
    start_process,
    write,
)

pytestmark = pytest.mark.e2e

Start = Callable[..., Process]


@pytest.fixture
def shm() -> Iterator[Path]:
    with shared_memory_directory() as path:
        yield path


@pytest.fixture
def start(tmp_path: Path, shm: Path) -> Iterator[Start]:
    """Starts pagestores by name; the same name means the same data directory."""
    processes: list[Process] = []

    def run(name: str = "store", *flags: str) -> Process:
        processes.append(start_process(tmp_path / name, shm, *flags))
        return processes[-1]

    yield run
    for process in processes:
        process.kill()


async def test_pages_survive_an_orderly_end_and_nothing_is_left_in_memory(start: Start, shm: Path) -> None:
    store = start()
    session = await store.open()
    await write(session, range(20))
    await session.close()
    assert store.stop() == 0  # dirty pages are flushed
    assert os.listdir(shm) == []
    again = start()
    assert again.ready["node_id"] == store.ready["node_id"]
    assert again.ready["incarnation"] > store.ready["incarnation"]
    session = await again.open()
    assert [one.source for one in await read(session, range(20))] == [PageSource.DISK] * 20
    await session.close()


async def test_a_killed_store_comes_back_with_what_was_flushed_and_counts_its_old_memory(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = start()
    session, control = await store.open(), PageStoreControl(store.endpoint, CLIENT)
    await write(session, range(20))
    assert (await control.flush()).failed_count == 0
    await control.close()
    store.kill()
    await asyncio.wait_for(session.broken.wait(), 60)
    monkeypatch.setenv("KVPOOL_PAGESTORE_ARENA_PREPARE", "false")  # so that all memory it has is the earlier process's
    again = start()
    control = PageStoreControl(again.endpoint, CLIENT)
    status = await control.status()
    assert status.arena_quarantined_bytes == status.arena_segment_bytes > 0
    session = await session.reopen(drained=True)
    assert session.incarnation == again.ready["incarnation"] > store.ready["incarnation"]
    assert [one.source for one in await read(session, range(20))] == [PageSource.DISK] * 20

    async def old_memory_is_back() -> bool:
        return (await control.status()).arena_quarantined_bytes == 0

    await eventually(old_memory_is_back)
    assert (await control.status()).disk_page_count == 20
    await session.close()
    await control.close()


async def test_a_peer_cannot_truncate_a_segment_and_its_owner_lives(start: Start) -> None:
    store, descriptors = start(), list[int]()

    def fetch(path: Path | str, token: bytes, number: int, *, timeout_s: float) -> FetchedFd:
        """Keep a descriptor of all that a peer gets."""
        fetched = fetch_fd(path, token, number, timeout_s=timeout_s)
        descriptors.append(os.dup(fetched.fd))
        return fetched

    plan = SessionPlan(endpoint=store.endpoint, peer_name="test", keyspaces=KEYSPACES)
    session = await PageStoreSession.open(plan, CLIENT, fetch=fetch)
    await write(session, range(2))
    session_file, fd = descriptors  # the one segment comes second
    os.close(session_file)
    size_bytes = os.fstat(fd).st_size
    for wrong_bytes in (0, 2 * size_bytes):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, wrong_bytes)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)  # no other peer could map it
    os.close(fd)
    assert [one.source for one in await read(session, range(2))] == [PageSource.STAGING] * 2
    await session.close()
    assert store.stop() == 0


MAPPER = """
import asyncio, sys
from kvpool.client.pagestore import PageStoreSession, SessionPlan
from tests.fixtures.pagestore_process import CLIENT, KEYSPACES, write

sizes = []

def mapped(segment):
    sizes.append(len(segment))
    return lambda: None

async def main():
    plan = SessionPlan(endpoint=sys.argv[1], peer_name="mapper", keyspaces=KEYSPACES)
    session = await PageStoreSession.open(plan, CLIENT, on_map=mapped)
    await write(session, range(2))
    print(sum(sizes), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@contextlib.contextmanager
def mapper_of(store: Process) -> Iterator[int]:
    """Another process that has mapped a segment and goes on having it; how many bytes."""
    child = subprocess.Popen(
        [sys.executable, "-c", MAPPER, store.endpoint], env=environment(), text=True, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        with child.stdout as output:
            yield int(output.readline())
    finally:
        child.kill()
        child.wait(60)


def shared_memory_bytes(store: Process) -> int:
    """Shared memory that the process has in place."""
    text = Path(f"/proc/{store.child.pid}/smaps").read_text()
    found, is_arena = 0, False
    for line in text.splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            is_arena = "segment-" in line
        elif is_arena and words[0] == "Rss:":
            found += int(words[1]) << 10
    return found


async def test_memory_of_a_killed_store_stays_in_the_budget_of_the_next_one_until_its_mapper_has_gone(
    start: Start,
) -> None:
    store = start()
    arena_bytes = 32 << 20
    with mapper_of(store) as mapped_bytes:
        store.kill()
        again = start()
        control = PageStoreControl(again.endpoint, CLIENT)

        def has_taken_what_is_left() -> bool:
            assert shared_memory_bytes(again) + mapped_bytes <= arena_bytes
            return shared_memory_bytes(again) + mapped_bytes == arena_bytes

        await eventually(has_taken_what_is_left)
        status = await control.status()
        assert (status.arena_quarantined_bytes, status.arena_segment_bytes) == (mapped_bytes, arena_bytes)
        assert 0 < mapped_bytes < arena_bytes

    async def the_whole_budget_is_back() -> bool:
        return (await control.status()).arena_quarantined_bytes == 0 and shared_memory_bytes(again) == arena_bytes

    await eventually(the_whole_budget_is_back)
    await control.close()


async def test_a_store_pulls_pages_from_another_and_serves_them(start: Start) -> None:
    first, second = start("first"), start("second")
    writer, reader = await first.open(), await second.open()
    await write(writer, range(40))
    source = RemoteSource(
        node_id=bytes.fromhex(first.ready["node_id"]),
        incarnation=first.ready["incarnation"],
        bulk_endpoint=first.ready["bulk_endpoint"],
    )
    assert [one.source for one in await read(reader, range(40), source)] == [PageSource.REMOTE] * 40
    assert [one.source for one in await read(reader, range(40))] == [PageSource.STAGING] * 40
    stale = RemoteSource(node_id=source.node_id, incarnation=1, bulk_endpoint=source.bulk_endpoint)
    (missed,) = await read(reader, range(100, 101), stale)
    assert missed.slot is None and missed.error is not None and missed.error.reason == "STALE_INCARNATION"
    await writer.close()
    await reader.close()


def test_what_cannot_start_says_why_in_one_line(start: Start, tmp_path: Path, shm: Path) -> None:
    running = start()
    assert "in use by another pagestore" in refused(tmp_path / "store", shm)
    assert (tmp_path / "store.ready").exists()
    (tmp_path / "file").write_text("")
    assert "make it writable or configure another" in refused(
        tmp_path / "file" / "data", shm, "--ready-file", str(tmp_path / "ready")
    )
    assert "arena_bytes is 1125899906842624, but" in refused(tmp_path / "big", shm, "--arena-bytes", "1024TiB")
    assert "in use" in refused(tmp_path / "port", shm, "--listen", running.ready["endpoint"])
    assert "segment_bytes" in refused(tmp_path / "bad", shm, "--segment-bytes", "1GiB")
    assert running.stop() == 0


def test_an_idle_store_is_small_and_quiet(start: Start) -> None:
    store = start()
    with urllib.request.urlopen(store.ready["metrics_url"], timeout=60) as answer:
        text = answer.read().decode()
    assert "kvpool_pagestore_arena_capacity_bytes 3.3554432e+07" in text
    fields = Path(f"/proc/{store.child.pid}/status").read_text()
    resident = {line.split(":")[0]: int(line.split()[1]) for line in fields.splitlines() if line.startswith("Rss")}
    assert resident["RssAnon"] + resident["RssFile"] < 100 << 10
    assert store.stop() == 0


def test_the_index_being_down_does_not_keep_a_store_from_serving(start: Start) -> None:
    with contextlib.closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))  # no server listens here
        no_one = f"127.0.0.1:{taken.getsockname()[1]}"
        store = start("store", "--index-endpoints", no_one, "--index-start-wait-ms", "200")
        assert store.ready["incarnation"] > 0
        assert store.stop() == 0
