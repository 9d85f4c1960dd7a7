"""Pulls between simulated pagestores."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from kvpool.core.cluster import PageMetadata, RemoteSource
from kvpool.core.errors import DeadlineExceeded, KvPoolError, ServiceUnavailable, SessionBusy
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.outcome import Admission
from kvpool.core.page import PageKey
from kvpool_pagestore.core.page_table import Grant
from kvpool_pagestore.core.slots import PageRecord
from kvpool_pagestore.engine.fetch import PageRequest
from kvpool_pagestore.engine.sessions import PeerSession
from kvpool_pagestore.engine.store import PageStoreEngine
from tests.sim.loop import Process, current_process
from tests.sim.nodes import World
from tests.sim.pages import SPEC, TENANT_OF, true_page
from tests.sim.threads import wait_for

if TYPE_CHECKING:
    from tests.sim.pagestore_node import PageStoreNode

_Send = Callable[[int, KvPoolError | None, bytes | None, bool], None]


class SimPeers:
    """A pagestore's ports.PeerPages: pulls run on the other node's engine, page by page and half by half."""

    def __init__(self, world: World, owner: PageStoreNode) -> None:
        self._world = world
        self._owner = owner

    def pull(
        self,
        source: RemoteSource,
        spec: KeyspaceSpec,
        items: Sequence[Any],
        deadline_s: float,
        on_page: Callable[[int, KvPoolError | None, bool], None],
        stop: Any = None,
    ) -> None:
        loop = self._world.loop
        answers: asyncio.Queue[tuple[int, KvPoolError | None, bytes | None, bool]] = asyncio.Queue()
        puller = current_process()
        keys = [item.key for item in items]

        def serve(engine: PageStoreEngine, send: _Send) -> Coroutine[Any, Any, None]:
            return _serve_pull(self._world, engine, source, keys, deadline_s, send)

        serving = self._begin(source, answers, puller, serve)
        unsettled = set(range(len(items)))
        ends_at_s = loop.time() + deadline_s
        broken: KvPoolError | None = None if serving else ServiceUnavailable("no server listens there")
        if stop is not None:
            stop.on_cancel(lambda: loop.call_soon_threadsafe(answers.put_nowait, (-1, None, None, False)))
        try:
            while unsettled and broken is None and not (stop is not None and stop.cancelled):
                index, error, data, last = wait_for(loop, _next(answers, ends_at_s - loop.time()))
                if index < 0:
                    broken = error
                elif data is not None:
                    data = self._travelled(data)
                    offset = len(items[index].destination) - len(data) if last else 0
                    items[index].destination[offset : offset + len(data)] = data
                    if last:
                        unsettled.discard(index)
                        on_page(index, None, True)
                else:
                    unsettled.discard(index)
                    on_page(index, error, False)
        finally:
            if serving:
                serving()
        for index in unsettled:
            on_page(index, broken or ServiceUnavailable("the pull was stopped"), False)

    def verify(self, source: RemoteSource, spec: KeyspaceSpec, keys: Sequence[PageKey], deadline_s: float) -> None:
        """One answer for all of them."""
        loop = self._world.loop
        answers: asyncio.Queue[tuple[int, KvPoolError | None, bytes | None, bool]] = asyncio.Queue()

        def serve(engine: PageStoreEngine, send: _Send) -> Coroutine[Any, Any, None]:
            return _serve_verify(engine, source, keys, send)

        if serving := self._begin(source, answers, current_process(), serve):
            try:
                wait_for(loop, _next(answers, deadline_s))
            finally:
                serving()

    def push(
        self,
        target: RemoteSource,
        spec: KeyspaceSpec,
        items: Sequence[Any],
        deadline_s: float,
        *,
        require_durable: bool,
        on_page: Callable[[int, KvPoolError | None], None],
        stop: Any,
    ) -> None:
        """Page by page and half by half, as `pull`; bytes are taken from the slots while they travel."""
        loop, world = self._world.loop, self._world
        answers: asyncio.Queue[tuple[int, KvPoolError | None, bytes | None, bool]] = asyncio.Queue()
        pages = [(item.key, bytes(item.page), item.metadata) for item in items]
        for key, page, _ in pages:
            if page != true_page(key):
                world.violations.append(f"{self._owner.name}: page {key} was sent to another node with wrong bytes")

        def serve(engine: PageStoreEngine, send: _Send) -> Coroutine[Any, Any, None]:
            return _serve_push(world, engine, target, pages, require_durable, send)

        serving = self._begin(target, answers, current_process(), serve)
        unsettled = set(range(len(items)))
        ends_at_s = loop.time() + deadline_s
        broken: KvPoolError | None = None if serving else ServiceUnavailable("no server listens there")
        stop.on_cancel(lambda: loop.call_soon_threadsafe(answers.put_nowait, (-1, None, None, False)))
        try:
            while unsettled and broken is None and not stop.cancelled:
                index, error, _, _ = wait_for(loop, _next(answers, ends_at_s - loop.time()))
                if index < 0:
                    broken = error
                else:
                    unsettled.discard(index)
                    on_page(index, error)
        finally:
            if serving:
                serving()
        for index in unsettled:
            on_page(index, broken or ServiceUnavailable("the push was stopped"))

    def close(self) -> None:
        pass

    def _travelled(self, data: bytes) -> bytes:
        """What arrives: sometimes not what was sent."""
        network = self._world.network
        if not network.chance(network.faults.flipped):
            return data
        at = int(network.rng.random() * len(data))
        return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]

    def _begin(
        self, source: RemoteSource, answers: Any, puller: Process, serve: Callable[[PageStoreEngine, _Send], Any]
    ) -> Callable[[], None] | None:
        """Have the other node serve; returns what ends that."""
        world = self._world
        node = next((one for one in world.pagestores if one.bulk_endpoint == source.bulk_endpoint), None)
        if node is None or not node.serving or not node.alive:
            return None
        server, engine = node.process, node.engine
        assert engine is not None
        last_s = [0.0]

        def send(index: int, error: KvPoolError | None, data: bytes | None, last: bool) -> None:
            answer = (index, error, data, last)
            last_s[0] = world.network.send(server, puller, last_s[0], lambda: answers.put_nowait(answer))

        def died() -> None:
            send(-1, ServiceUnavailable("the peer died"), None, False)

        tasks: list[asyncio.Task[None]] = []
        over = [False]

        def begin() -> None:
            if not over[0]:
                tasks.append(world.loop.spawn(server, serve(engine, send)))

        def end_there() -> None:
            over[0] = True
            for task in tasks:
                task.cancel()

        def end() -> None:
            if died in server.on_kill:
                server.on_kill.remove(died)
            if end in puller.on_kill:
                puller.on_kill.remove(end)
            world.network.send(puller, server, 0.0, end_there)

        server.on_kill.append(died)
        puller.on_kill.append(end)
        world.network.send(puller, server, 0.0, begin)
        return end


async def _next(answers: asyncio.Queue[Any], timeout_s: float) -> Any:
    try:
        async with asyncio.timeout(max(0.0, timeout_s)):
            return await answers.get()
    except TimeoutError:
        return -1, DeadlineExceeded("the pull took too long"), None, False


async def _serve_verify(engine: PageStoreEngine, source: RemoteSource, keys: Sequence[PageKey], send: _Send) -> None:
    try:
        engine.check_incarnation(source.incarnation)
        peer = engine.sessions.open_internal(TENANT_OF[keys[0].keyspace], [(keys[0].keyspace, SPEC)])
    except KvPoolError as error:
        send(-1, error, None, False)
        return
    try:
        await engine.pages.verify(peer, keys)
        send(0, None, None, False)
    finally:
        engine.sessions.close(peer)


async def _serve_pull(
    world: World,
    engine: PageStoreEngine,
    source: RemoteSource,
    keys: Sequence[PageKey],
    deadline_s: float,
    send: _Send,
) -> None:
    """What kvpool_pagestore.bulk.servicer does for a read stream, one page after the other."""
    try:
        engine.check_incarnation(source.incarnation)
        if source.incarnation != engine.incarnation:
            world.violations.append(f"incarnation {engine.incarnation} served what {source.incarnation} was asked for")
        peer = engine.sessions.open_internal(TENANT_OF[keys[0].keyspace], [(keys[0].keyspace, SPEC)])
    except KvPoolError as error:
        send(-1, error, None, False)
        return
    try:
        for index, key in enumerate(keys):
            settled: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

            def on_acquired(acquired: Sequence[Any], final: bool, settled: asyncio.Future[Any] = settled) -> None:
                for one in acquired:
                    if not settled.done():
                        settled.set_result(one)

            engine.pages.acquire(peer, [PageRequest(key=key)], wait_s=deadline_s, on_acquired=on_acquired)
            one = await settled
            if world.loop.trace is not None:
                world.loop.trace(f"{current_process()} serves {key}: {one.error or bool(one.grant)}")
            if one.grant is None:
                send(index, one.error, None, True)
                continue
            view = engine.pages.view(one.grant)
            half = len(view) // 2
            first = bytes(view[:half])
            send(index, None, first, False)
            await asyncio.sleep(world.some_s(0.005))
            second = bytes(view[half:])
            if first + second != true_page(key):
                world.violations.append(f"page {key} changed while a peer was reading it")
            send(index, None, second, True)
            engine.pages.release(peer, [one.grant.lease_id])
    except KvPoolError as error:
        send(-1, error, None, False)
    finally:
        engine.sessions.close(peer)


async def _serve_push(
    world: World,
    engine: PageStoreEngine,
    target: RemoteSource,
    pages: Sequence[tuple[PageKey, bytes, PageMetadata]],
    durable: bool,
    send: _Send,
) -> None:
    """What kvpool_pagestore.bulk.servicer does for a write stream."""
    try:
        engine.check_incarnation(target.incarnation)
        keyspace = pages[0][0].keyspace
        peer = engine.sessions.open_internal(TENANT_OF[keyspace], [(keyspace, SPEC)])
    except KvPoolError as error:
        send(-1, error, None, False)
        return
    try:
        for index, (key, page, metadata) in enumerate(pages):
            send(index, await _put(world, engine, peer, key, page, metadata, durable), None, True)
    except KvPoolError as error:
        send(-1, error, None, False)
    finally:
        engine.sessions.close(peer)


async def _put(
    world: World,
    engine: PageStoreEngine,
    peer: PeerSession,
    key: PageKey,
    page: bytes,
    metadata: PageMetadata,
    durable: bool,
) -> KvPoolError | None:
    item = PageRecord(key=key, page_bytes=len(page), metadata=metadata)
    (answer,) = await engine.pages.reserve(peer, [item])
    if isinstance(answer, Grant):
        view, half = engine.pages.view(answer), len(page) // 2
        view[:half] = page[:half]
        await asyncio.sleep(world.some_s(0.005))
        view[half:] = page[half:]
        (error,) = await engine.pages.commit(peer, [answer.lease_id], durable=durable)
        return error
    if answer is Admission.EXISTS:
        return await engine.pages.make_durable(key) if durable else None
    return answer if isinstance(answer, KvPoolError) else SessionBusy("somebody else writes the page there")
