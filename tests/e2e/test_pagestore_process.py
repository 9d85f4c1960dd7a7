"""The real pagestore process: start, refusal, orderly end, kill and restart, pages between two nodes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvpool.client.config import ClientConfig
from kvpool.client.page_items import AcquireItem, AcquireResult, PageSource, ReserveItem
from kvpool.client.pagestore import PageStoreSession, SessionPlan
from kvpool.client.pagestore_control import PageStoreControl
from kvpool.core.cluster import RemoteSource
from kvpool.core.page import verify
from kvpool.testing import eventually_sync
from tests.fixtures.pagestore import (
    KEYSPACES,
    PAGE_BYTES,
    SPEC,
    TENANT,
    fill_page,
    metadata,
    page_key,
    shared_memory_directory,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

CLIENT = ClientConfig(connect_timeout_s=20.0, call_timeout_s=20.0)


@dataclass(slots=True)
class Process:
    """A running pagestore."""

    child: subprocess.Popen[str]
    ready: dict[str, Any]

    @property
    def endpoint(self) -> str:
        return f"unix:{self.ready['socket']}"

    def stop(self) -> int:
        """End it in order; its exit code."""
        self.child.send_signal(signal.SIGTERM)
        return self.child.wait(60)

    def kill(self) -> None:
        self.child.kill()
        self.child.wait(60)

    async def open(self, **changes: Any) -> PageStoreSession:
        values: dict[str, Any] = {"endpoint": self.endpoint, "peer_name": "test", "keyspaces": KEYSPACES}
        return await PageStoreSession.open(SessionPlan(**(values | changes)), CLIENT)


Start = Callable[..., Process]


def command(directory: Path, shm: Path, *flags: str) -> list[str]:
    defaults = {
        "--data-dir": str(directory),
        "--shm-dir": str(shm),
        "--listen": "127.0.0.1:0",
        "--bulk-listen": "127.0.0.1:0",
        "--arena-bytes": "32MiB",
        "--segment-bytes": "4MiB",
        "--disk-bytes": "256MiB",
        "--tenant": TENANT,
        "--ready-file": str(directory) + ".ready",
        "--quarantine-grace-ms": "50",
    }
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    pairs = [part for pair in (defaults | given).items() for part in pair]
    return [sys.executable, "-m", "kvpool_pagestore.main", *pairs]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


@pytest.fixture
def shm() -> Iterator[Path]:
    with shared_memory_directory() as path:
        yield path


@pytest.fixture
def start(tmp_path: Path, shm: Path) -> Iterator[Start]:
    """Starts pagestores by name; the same name means the same data directory."""
    children: list[subprocess.Popen[str]] = []

    def run(name: str = "store", *flags: str) -> Process:
        directory = tmp_path / name
        ready_file = Path(str(directory) + ".ready")
        ready_file.unlink(missing_ok=True)
        child = subprocess.Popen(command(directory, shm, *flags), env=environment(), text=True)
        children.append(child)
        eventually_sync(lambda: ready_file.exists() or child.poll() is not None, 60)
        assert child.poll() is None, "the pagestore did not start"
        return Process(child, json.loads(ready_file.read_text()))

    yield run
    for child in children:
        if child.poll() is None:
            child.kill()
        child.wait(60)


def refused(directory: Path, shm: Path, *flags: str) -> str:
    """The one line with which a pagestore refuses to start."""
    done = subprocess.run(
        command(directory, shm, *flags), env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2, done.stderr
    return done.stderr.strip().splitlines()[-1]


async def write(session: PageStoreSession, numbers: range) -> None:
    results = await session.reserve([ReserveItem(page_key(one), PAGE_BYTES, metadata(one)) for one in numbers])
    leases = []
    for number, result in zip(numbers, results, strict=True):
        assert result.slot is not None, result
        with session.slot_view(result.slot) as view:
            fill_page(view, page_key(number))
        leases.append(result.slot.lease_id)
    assert await session.commit(leases) == [None] * len(leases)


async def read(session: PageStoreSession, numbers: range, *sources: RemoteSource) -> list[AcquireResult]:
    """Answers in item order, verified and released."""
    items = [AcquireItem(page_key(one), sources, metadata(one)) for one in numbers]
    results: list[AcquireResult] = []
    async with session.acquire(items, wait_s=20) as answers:
        async for answer in answers:
            results.append(answer)
            if answer.slot is not None:
                with session.slot_view(answer.slot) as view:
                    assert verify(view, page_key(numbers[answer.item_index]), SPEC.codec) is None
    await session.release([one.slot.lease_id for one in results if one.slot is not None])
    return sorted(results, key=lambda one: one.item_index)


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


async def test_a_killed_store_comes_back_with_what_was_flushed_and_counts_its_old_memory(start: Start) -> None:
    store = start()
    session, control = await store.open(), PageStoreControl(store.endpoint, CLIENT)
    await write(session, range(20))
    assert (await control.flush()).failed_count == 0
    await control.close()
    store.kill()
    await asyncio.wait_for(session.broken.wait(), 20)
    again = start()
    control = PageStoreControl(again.endpoint, CLIENT)
    status = await control.status()
    assert status.arena_quarantined_bytes == status.arena_segment_bytes > 0
    session = await session.reopen(drained=True)
    assert session.incarnation == again.ready["incarnation"] > store.ready["incarnation"]
    assert [one.source for one in await read(session, range(20))] == [PageSource.DISK] * 20
    status = await control.status()
    assert status.arena_quarantined_bytes == 0 and status.disk_page_count == 20
    await session.close()
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
    assert "grow /dev/shm or lower --arena-bytes" in refused(tmp_path / "big", shm, "--arena-bytes", "1024TiB")
    assert "in use" in refused(tmp_path / "port", shm, "--listen", running.ready["endpoint"])
    assert "segment_bytes" in refused(tmp_path / "bad", shm, "--segment-bytes", "1GiB")
    assert running.stop() == 0


def test_an_idle_store_is_small_and_quiet(start: Start) -> None:
    store = start()
    with urllib.request.urlopen(store.ready["metrics_url"], timeout=10) as answer:
        text = answer.read().decode()
    assert "kvpool_pagestore_arena_capacity_bytes 3.3554432e+07" in text
    fields = Path(f"/proc/{store.child.pid}/status").read_text()
    resident = {line.split(":")[0]: int(line.split()[1]) for line in fields.splitlines() if line.startswith("Rss")}
    assert resident["RssAnon"] + resident["RssFile"] < 100 << 10
    assert store.stop() == 0


def test_the_index_being_down_does_not_keep_a_store_from_serving(start: Start) -> None:
    with contextlib.closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens here
        nobody = f"127.0.0.1:{taken.getsockname()[1]}"
        store = start("store", "--index-endpoints", nobody, "--index-start-wait-ms", "200")
        assert store.ready["incarnation"] > 0
        assert store.stop() == 0
