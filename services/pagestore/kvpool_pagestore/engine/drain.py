"""Draining: pages that have no other live copy are moved to other nodes, then the lease ends.

A pass asks the index about every chunk and moves those that it knows of nowhere else. Passes are repeated until one
finds nothing to move, so that what was evicted elsewhere, or committed here meanwhile, is seen. A drain that ends in
the middle loses nothing: what was moved has another copy, and the next drain sees that. That a node is being drained is
saved on its disk: after a restart the drain goes on by itself until it is done or cancelled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from enum import Enum

from kvpool.core.cluster import NodeInfo
from kvpool.core.errors import DrainBlocked, Draining, KvPoolError
from kvpool_pagestore.core.admission import AdmissionPurpose, AdmissionRequest
from kvpool_pagestore.core.replication import HeldChunk, Holder, others, pick, ranked
from kvpool_pagestore.engine.context import background, cancelled
from kvpool_pagestore.engine.copies import CopyPlanner, Purpose, Wanted, by_group, lacking
from kvpool_pagestore.engine.disk_tier import DurableValue

_log = logging.getLogger(__name__)

_SLICE_CHUNKS = 512  # looked at between two answers of progress
_GROUPS_AT_ONCE = 4
_PASSES_MAX = 8
_WRITERS_LOOKS = 50
_WRITERS_LOOK_S = 0.1
_PASS_PAUSE_S = 0.1  # receivers announce what they got within it
_GO_ON_FIRST_S = 0.5  # after a failure without a watcher
_GO_ON_LAST_S = 60.0
_SAVED_DRAINING = b"1"


class DrainState(Enum):
    """How far a drain is."""

    SERVING = "serving"
    DRAINING = "draining"
    DRAINED = "drained"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainProgress:
    """Pages moved and found elsewhere; chunks that this pass has not looked at yet."""

    moved_pages: int = 0
    moved_bytes: int = 0
    kept_pages: int = 0
    remaining: int = 0
    done: bool = False


class Drain:
    """One node's drain."""

    def __init__(self, planner: CopyPlanner, saved_state: DurableValue) -> None:
        """saved_state: whether the node is being drained."""
        self._planner = planner
        self._saved_state = saved_state
        self._going_on: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._watchers = 0
        self._turning = asyncio.Lock()  # held while the node is taken out of service, or back
        self._changed = asyncio.Event()
        self._failure: KvPoolError | None = None
        self._full: set[bytes] = set()  # nodes that refused pages in this pass
        self.state = DrainState.SERVING
        self.progress = DrainProgress()

    @property
    def refuses_pages(self) -> bool:
        """Whether new pages are refused."""
        return self.state is not DrainState.SERVING

    def refusal(self, request: AdmissionRequest) -> KvPoolError | None:
        """An AdmissionRule: nothing new is stored while the node is drained."""
        if request.purpose is AdmissionPurpose.STORE and self.refuses_pages:
            return Draining("this pagestore is being drained")
        return None

    async def load(self) -> None:
        """Read whether an earlier process of the node was being drained: pages are refused then. Raises StoreFault."""
        if not self._planner.is_alone and await self._saved_state.load() == _SAVED_DRAINING:
            self.state = DrainState.DRAINING

    def start(self) -> None:
        """Go on with what `load` found. Call once the node serves."""
        if self.state is DrainState.DRAINING:
            _log.warning("this node was being drained: the drain goes on")
            self._going_on = background(self._go_on(), "go-on-draining")

    async def watch(self) -> AsyncGenerator[DrainProgress]:
        """Drain, or go on with it, and yield the progress until it is done. Raises DrainBlocked and what failed.

        Moving goes on while there is a watcher; the node refuses new pages until `cancel`, watched or not.
        """
        self._watchers += 1
        try:
            async with self._turning:
                if self.state is not DrainState.DRAINED:
                    await self._planner.placement.set_draining(True)
                if begins := self.state is DrainState.SERVING:  # it may have ended meanwhile
                    self.state = DrainState.DRAINING
            if self._task is None and self.state is DrainState.DRAINING:
                self._failure = None
                self._task = background(self._run(), "drain")
            if begins:
                await self._saved_state.save(_SAVED_DRAINING)
            if self._leaving is not None:
                await asyncio.wait([self._leaving])
            while True:
                changed, progress = self._changed, self.progress
                yield progress
                if progress.done:
                    return
                if self._failure is not None and self._task is None:
                    raise self._failure
                await changed.wait()
        finally:
            self._watchers -= 1
            if not self._watchers and self._task is not None:
                await self._pause()

    async def cancel(self) -> None:
        """Take the node back into service. Raises DrainBlocked once the drain has ended."""
        async with self._turning:
            await self._end_task()
            if self.state is DrainState.DRAINED:
                raise DrainBlocked("the node is drained and its lease has ended: restart the pagestore to use it again")
            if self.state is DrainState.DRAINING:
                self._failure = DrainBlocked("the drain was cancelled")
                self._notify()
                await self._planner.placement.set_draining(False)
                await self._saved_state.save(b"")
                self.state = DrainState.SERVING
                self.progress = DrainProgress()

    async def stop(self) -> None:
        """End moving and watching, since the process ends."""
        await self._end_task()
        self._failure = Draining("the pagestore is shutting down; the drain goes on when it is back")
        self._notify()

    # Inside

    async def _go_on(self) -> None:
        """Watch as an operator would who calls again whenever the drain fails."""
        pause_s = _GO_ON_FIRST_S
        while self.state is not DrainState.DRAINED:
            try:
                async with aclosing(self.watch()) as progresses:
                    async for _ in progresses:
                        pass
            except KvPoolError as error:
                _log.warning("the drain goes on in %.1f s: %s", pause_s, error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _GO_ON_LAST_S)

    async def _end_task(self) -> None:
        task, self._going_on = self._going_on, None
        await cancelled(task)
        await self._pause()

    async def _pause(self) -> None:
        task, self._task = self._task, None
        await cancelled(task)

    async def _run(self) -> None:
        try:
            await self._writers()
            for _ in range(_PASSES_MAX):
                await self._planner.local.flush()
                if not await self._pass():
                    break
                await asyncio.sleep(_PASS_PAUSE_S)
            else:
                raise DrainBlocked(
                    f"after {_PASSES_MAX} passes pages still have no other copy: what is moved is evicted"
                )
            self.state = DrainState.DRAINED  # there is no way back: a node that is leaving is not registered again
            self._leaving = background(self._leave(), "leave-the-index")
            await asyncio.shield(self._leaving)
        except KvPoolError as error:
            _log.error("the drain stopped and can be called again: %s", error)
            self._failure = error
        except Exception as error:
            self._failure = KvPoolError(f"the drain failed and can be called again: {error}")
            raise
        finally:
            if self._task is asyncio.current_task():
                self._task = None
            self._notify()

    async def _leave(self) -> None:
        """Leave the index. Goes on when the drain is no longer watched."""
        await self._planner.placement.leave()
        try:
            await self._saved_state.save(b"")  # a restart takes the node back into service
        finally:
            self.progress = replace(self.progress, done=True)
            self._notify()

    async def _writers(self) -> None:
        """Wait for pages that are being written, for a while: a writer may have died over its slots."""
        for _ in range(_WRITERS_LOOKS):
            if not self._planner.local.is_being_written:
                return
            await asyncio.sleep(_WRITERS_LOOK_S)
        _log.warning("some pages are still being written: the drain goes on without waiting for them")

    async def _pass(self) -> int:
        """Look at everything once; return how many pages had to be moved."""
        self._full.clear()
        buckets = await self._planner.local.buckets()
        remaining = sum(map(len, buckets))
        self._update(kept_pages=0, remaining=remaining)
        needed = 0
        for bucket in buckets:
            for part in bucket.parts(_SLICE_CHUNKS):
                needed += await self._slice(part)
                remaining -= len(part)
                self._update(remaining=remaining)
        self._update(remaining=0)
        return needed

    async def _slice(self, names: Sequence[bytes]) -> int:
        needed = 0
        left = by_group(chunk for name in names for chunk in self._planner.local.chunk(name))
        holders = await self._planner.holders([chunk for group in left for chunk in group])
        for start in range(0, len(left), _GROUPS_AT_ONCE):
            moves = (self._group(chunks, holders) for chunks in left[start : start + _GROUPS_AT_ONCE])
            for moved in await asyncio.gather(*moves, return_exceptions=True):
                if isinstance(moved, BaseException):
                    raise moved
                needed += moved
        return needed

    async def _group(self, chunks: Sequence[HeldChunk], holders: dict[HeldChunk, list[Holder]]) -> int:
        """Move those pages of one chain group that no other node has; return how many there were."""
        me = self._planner.placement.me()
        if me is None:
            raise DrainBlocked("the node is not registered with the index: wait until it is, or restart it")
        alone = [chunk for chunk in chunks if not others(chunk, holders[chunk], me.node_id)]
        kept = sum(chunk.shards.bit_count() for chunk in chunks) - sum(chunk.shards.bit_count() for chunk in alone)
        self._update(kept_pages=self.progress.kept_pages + kept)
        needed = sum(chunk.shards.bit_count() for chunk in alone)
        while alone:
            alone = await self._move(alone, holders, me.node_id)
        return needed

    async def _move(
        self, alone: list[HeldChunk], holders: dict[HeldChunk, list[Holder]], here: bytes
    ) -> list[HeldChunk]:
        """Bring chunks to one node; the answer are those that it did not take. Raises DrainBlocked if there is none."""
        wanted: list[Wanted] = [(chunk, chunk.shards) for chunk in alone]
        size_bytes = self._planner.size_bytes(wanted)
        targets = await self._targets(alone, size_bytes, fresh=False)
        if not targets:  # one may have come within the last second
            targets = await self._targets(alone, size_bytes, fresh=True)
        if not targets:
            reason = f"no other pagestore has room for {len(alone)} chunks ({size_bytes} bytes) of a chain"
            others_live = any(node.info.node_id != here for node in await self._planner.nodes())
            raise DrainBlocked(reason if others_live else f"{reason}: there is no other")
        target = targets[0]
        report = await self._planner.copy(target, lacking(alone, holders, target.node_id), Purpose.DRAIN)
        self._update(
            moved_pages=self.progress.moved_pages + len(report.copied),
            moved_bytes=self.progress.moved_bytes + report.copied_bytes,
        )
        if not report.failed:
            return []
        _log.warning(
            "%s took %d pages of a chain group, not %d: %s",
            target.bulk_endpoint,
            len(report.copied),
            len(report.failed),
            next(iter(report.failed.values())),
        )
        self._full.add(target.node_id)
        failed = {(key.keyspace, key.chunk_hash) for key in report.failed}
        return [chunk for chunk in alone if (chunk.keyspace, chunk.chunk_hash) in failed]

    async def _targets(self, alone: Sequence[HeldChunk], size_bytes: int, *, fresh: bool) -> list[NodeInfo]:
        """The node that should get chunks of one group, if there is one that takes them."""
        me, first = self._planner.placement.me(), alone[0]
        nodes = await self._planner.nodes(fresh=fresh)
        if me is None:
            raise DrainBlocked("the node lost its registration; drain again")
        durable = any(chunk.durable for chunk in alone)
        candidates = ranked(nodes, me, first.keyspace, first.group_head_hash)
        taking = (node for node in candidates if node.node_id not in self._full)
        with_room = (node for node in taking if self._planner.has_room(node, size_bytes, durable=durable))
        return pick(with_room, 1, {me.host_id})

    def _update(self, **changes: int) -> None:
        self.progress = replace(self.progress, **changes)  # type: ignore[arg-type]  # all but `done` are counts
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
