"""A scripted pagestore that hands out real descriptors, and a session with it."""

from __future__ import annotations

import asyncio
import fcntl
import os
import weakref
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from kvpool.client import pagestore
from kvpool.client.fds import FetchedFd
from kvpool.client.page_items import AcquireItem, ReserveItem
from kvpool.client.pagestore import PageStoreSession, SessionPlan
from kvpool.core.cluster import SESSION_FILE_NUMBER, PageMetadata
from kvpool.core.errors import (
    KvPoolError,
)
from kvpool.core.page import PageKey
from kvpool.v1 import pagestore_pb2, pagestore_pb2_grpc
from tests.fixtures.channels import opened_channels
from tests.unit.client.servers import SPEC, Script, Streams, serve, test_config

KEYSPACE = b"k" * 16
SESSION_ID = b"s" * 16
SEGMENT_BYTES = 1 << 16
Response = pagestore_pb2.SessionResponse


class ScriptedStore(pagestore_pb2_grpc.PageStoreServiceServicer):
    def __init__(self) -> None:
        self.streams = Streams()

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        async for message in self.streams.run(request_iterator, context):
            yield message


class Memory:
    """What hands out descriptors: a session file with its lock, and segments."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.fetched: list[int] = []
        self.error: KvPoolError | None = None
        self.segment_fd = os.memfd_create("segment", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.segment_fd)
        os.ftruncate(self.segment_fd, SEGMENT_BYTES)
        self.is_sealed = True

    def fetch(self, path: str, token: bytes, number: int, *, timeout_s: float) -> FetchedFd:
        assert (path, token) == ("/descriptors", b"t" * 32)
        self.fetched.append(number)
        if self.error is not None:
            raise self.error
        if number != SESSION_FILE_NUMBER:
            if self.is_sealed:
                fcntl.fcntl(self.segment_fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            return FetchedFd(os.dup(self.segment_fd), SEGMENT_BYTES)
        fd = os.open(self.directory / "session", os.O_RDWR | os.O_CREAT)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return FetchedFd(fd, 0)

    def peer_alive(self) -> bool:
        fd = os.open(self.directory / "session", os.O_RDWR)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False


class Peer:
    """The session under test and the scripted other side of it."""

    def __init__(self, store: ScriptedStore, memory: Memory, endpoint: str, settings: dict[str, Any]) -> None:
        self.store, self.memory = store, memory
        self.plan = SessionPlan(endpoint=endpoint, peer_name="test", keyspaces=((KEYSPACE, SPEC),))
        self.config = test_config(**settings)
        self.sessions: list[PageStoreSession] = []
        self.channels: list[grpc.aio.Channel] = []  # of all of them

    async def break_sessions(self) -> None:
        """Cut their connections."""
        for channel in self.channels:
            await channel.close()

    async def greet(self, interval_ms: int = 10_000) -> tuple[Script, Any]:
        """Answer the `open` of the next stream."""
        stream = await self.store.streams.next()
        request = await stream.next("open")
        opened = pagestore_pb2.SessionOpened(
            session_id=SESSION_ID,
            incarnation=5,
            descriptor_socket="/descriptors",
            descriptor_token=b"t" * 32,
            heartbeat_interval_ms=interval_ms,
            max_leases=64,
            node_id=b"n" * 16,
        )
        stream.send(Response(request_id=request.request_id, opened=opened))
        return stream, request

    async def open(self, interval_ms: int = 10_000) -> tuple[PageStoreSession, Script]:
        opening = asyncio.create_task(PageStoreSession.open(self.plan, self.config, fetch=self.memory.fetch))
        stream, _ = await self.greet(interval_ms)
        self.sessions.append(await opening)
        return self.sessions[-1], stream


@asynccontextmanager
async def peer(directory: Path, **settings: Any) -> AsyncGenerator[Peer]:
    store = ScriptedStore()  # type: ignore[abstract]
    async with serve(pagestore_pb2_grpc.add_PageStoreServiceServicer_to_server, store) as (_, endpoint):
        one = Peer(store, Memory(directory), endpoint, settings)
        with pytest.MonkeyPatch.context() as patch:
            one.channels = opened_channels(patch, pagestore)
            try:
                yield one
            finally:
                await one.break_sessions()
                for session in one.sessions:
                    await session.broken.wait()


def reserve_items(count: int) -> list[ReserveItem]:
    metadata = PageMetadata(parent_hash=bytes(16), chunk_index=0, group_head_hash=bytes(16))
    return [ReserveItem(PageKey(KEYSPACE, bytes(16), number), 100, metadata) for number in range(count)]


def acquire_items(count: int) -> list[AcquireItem]:
    return [AcquireItem(PageKey(KEYSPACE, bytes(16), number)) for number in range(count)]


def slot(lease_id: int) -> pagestore_pb2.Slot:
    return pagestore_pb2.Slot(lease_id=lease_id, segment_id=3, offset=4096 * lease_id, page_bytes=100)


def granted(request: Any, *lease_ids: int) -> Response:
    results = [
        pagestore_pb2.ReserveResult(admission=pagestore_pb2.ADMISSION_RESERVED, slot=slot(lease)) for lease in lease_ids
    ]
    return Response(request_id=request.request_id, reserve=pagestore_pb2.ReserveResponse(results=results))


def hits(request: Any, first_item: int, *lease_ids: int, final: bool = False) -> Response:
    results = [
        pagestore_pb2.AcquireResult(
            item_index=first_item + at,
            outcome=pagestore_pb2.OUTCOME_HIT,
            slot=slot(lease),
            source=pagestore_pb2.SOURCE_DISK,
        )
        for at, lease in enumerate(lease_ids)
    ]
    return Response(request_id=request.request_id, acquire=pagestore_pb2.AcquireResponse(results=results, final=final))
