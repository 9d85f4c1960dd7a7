"""A node that announces without an end while what it announces to is broken."""

from __future__ import annotations

import asyncio
import contextlib

import grpc.aio

from kvpool.core.errors import LeaseLost, StoreUnavailable
from kvpool.testing import eventually
from tests.fixtures.index_node import AnnounceCall, Chain, FakeNode, open_keyspace
from tests.fixtures.index_server import RunningIndex
from tests.fixtures.patience import PATIENCE_S

PIECE = 4096  # chunks of one match


class Load:
    """A node that announces one chunk after another, as a client does: what is not acknowledged is sent again."""

    def __init__(self, index: RunningIndex, keyspace: bytes, node: FakeNode) -> None:
        self.chain = Chain(keyspace)
        self.node = node
        self.acknowledged = 0
        self.interruptions = 0
        self._stub = index.stub
        self._task = asyncio.create_task(self._run())

    async def advance(self, count: int = 8, deadline_s: float = PATIENCE_S) -> None:
        """Wait for acknowledgements."""
        target = self.acknowledged + count
        await eventually(lambda: self.acknowledged >= target or self._task.done(), deadline_s)
        assert self.acknowledged >= target, self._task

    async def stop(self) -> int:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        return self.acknowledged

    async def has_matched(self, count: int) -> None:
        """Wait until so many chunks are known: the store may not answer in its time now."""

        async def are_known() -> bool:
            with contextlib.suppress(grpc.aio.AioRpcError):
                return await self._matched() >= count
            return False

        await eventually(are_known)

    async def _matched(self) -> int:
        """Chunks of the chain that are known, counting from its beginning."""
        matched = 0
        for first in range(0, len(self.chain.hashes), PIECE):
            matched += (await self._stub.Match(self.chain.query(PIECE, first=first))).matched_chunks
            if matched % PIECE:
                break
        return matched

    async def _run(self) -> None:
        while True:
            try:
                async with self.node.announcing() as stream:
                    await self._announce(stream)
            except (StoreUnavailable, LeaseLost, asyncio.InvalidStateError):  # the last: it ended before it was used
                self.interruptions += 1
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await self.node.register()

    async def _announce(self, stream: AnnounceCall) -> None:
        while True:
            if self.acknowledged == len(self.chain.hashes):
                self.chain.hashes.extend(Chain(self.chain.keyspace).hashes)
            await stream.send(self.chain.added([self.acknowledged]))
            self.acknowledged += 1


async def loaded(index: RunningIndex) -> Load:
    """Begun when the store answers in its time."""

    async def begun() -> Load | None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            return Load(index, await open_keyspace(index.stub), await FakeNode(index.stub).register())
        return None

    load = await eventually(begun)
    assert load is not None
    return load
