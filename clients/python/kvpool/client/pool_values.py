"""What the pool answers connectors: values, never exceptions, so that cache trouble only means more recomputing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from kvpool.client.engine_items import EngineMatchRun, TierTokens
from kvpool.client.engine_requests import LoadHandle, StoreHandle
from kvpool.core.errors import KvPoolError


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """How much of a prompt can be had. usable_tokens: never all of the prompt. error: why nothing was looked up."""

    matched_chunks: int  # those held by the engine included
    usable_tokens: int
    runs: tuple[EngineMatchRun, ...] = ()  # of the chunks after the held ones
    error: KvPoolError | None = None

    @property
    def estimated_load_ms(self) -> float:
        """Of the chunks after the held ones; 0 if nothing was measured yet."""
        return sum(run.estimated_load_ms for run in self.runs)


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What is in. Chunks by their index in the chain; what is not in must be recomputed.

    failed_chunks: of those asked for, the first that failed and all after it.
    hold:          while it has not ended, the agent may still write to the blocks asked for: they must neither be used
                   nor given to anyone, not even for recomputing. Ended for every report without a DeadlineExceeded or a
                   broken session.
    copy_s:        that the agent copied, from the beginning of the first copy to the end of the last; 0 if not known.
    """

    first_chunk: int
    loaded_chunks: int
    failed_chunks: tuple[int, ...]
    tokens: TierTokens
    error: KvPoolError | None
    hold: BlockHold
    copy_s: float = 0.0

    @property
    def end_chunk(self) -> int:
        """All chunks from first_chunk up to this index are in."""
        return self.first_chunk + self.loaded_chunks


@dataclass(frozen=True, slots=True)
class StoreReport:
    """What was stored. failed_chunks: index in the chain and why."""

    stored_chunks: int
    deduplicated_chunks: int
    failed_chunks: dict[int, KvPoolError]


class BlockHold:
    """Blocks that an agent may still touch."""

    def __init__(self, handles: Sequence[StoreHandle | LoadHandle] = ()) -> None:
        self._handles = tuple(handles)

    @property
    def ended(self) -> bool:
        """Whether the blocks may be reused."""
        return all(handle.hold_ended for handle in self._handles)

    async def wait(self) -> None:
        """Return when they may. After a broken session this takes until the agent has let go of the memory."""
        for handle in self._handles:
            await handle.wait_hold()


OnProgress = Callable[[int, tuple[int, ...]], None]


class LoadTicket:
    """A load in progress. Belongs to the event loop."""

    def __init__(self, load: Callable[[OnProgress], Coroutine[Any, Any, LoadReport]]) -> None:
        """load: does it, and calls back with layers that are in and chunks that have failed so far."""
        self.layers_loaded = 0
        self.failed_chunks: tuple[int, ...] = ()  # so far; when the load has ended see `report`
        self._changed = asyncio.Event()
        self._loading = asyncio.create_task(load(self._progressed), name="kvpool load")
        self._loading.add_done_callback(self._ended)

    @property
    def done(self) -> bool:
        """Whether the load has ended."""
        return self._loading.done()

    async def wait_layers(self, layers: int) -> bool:
        """Wait until so many leading layers are in for every chunk that has not failed: GPU work of the engine that is
        launched after this finds them. False if the load ended before: then `report` says what is in, in all layers.

        When a chunk fails in a later layer group, the report names it though its first layers were in: a step that has
        begun with it is to be recomputed.
        """
        while self.layers_loaded < layers and not self._loading.done():
            self._changed.clear()
            await self._changed.wait()
        return self.layers_loaded >= layers

    async def report(self) -> LoadReport:
        """The end of the load: it has a deadline of its own. raises: InvalidRequest for arguments that do not fit."""
        return await asyncio.shield(self._loading)

    def _progressed(self, layers: int, failed_chunks: tuple[int, ...]) -> None:
        self.layers_loaded, self.failed_chunks = layers, failed_chunks
        self._changed.set()

    def _ended(self, loading: asyncio.Task[LoadReport]) -> None:
        self._changed.set()
        if not loading.cancelled():
            loading.exception()  # its caller may have left


class StoreTicket:
    """A store in progress."""

    def __init__(
        self,
        chunk_indexes: Sequence[int],
        handles: Sequence[tuple[int, StoreHandle]],
        error: KvPoolError | None,
    ) -> None:
        """handles: with the count of leading chunk_indexes before theirs. error: why the rest was not begun."""
        self._chunk_indexes = tuple(chunk_indexes)
        self._handles = tuple(handles)
        self._error = error
        self.hold = BlockHold([handle for _, handle in handles])

    async def wait_reusable(self) -> None:
        """Return when the engine may reuse the blocks. Has no deadline: see BlockHold."""
        await self.hold.wait()

    async def report(self, timeout_s: float) -> StoreReport:
        """The end of the store, or what is known of it after timeout_s; the store itself goes on."""
        stored = deduplicated = 0
        failed: dict[int, KvPoolError] = {}
        ends_at_s = asyncio.get_running_loop().time() + timeout_s
        settled = 0
        for position, (start, handle) in enumerate(self._handles):
            end = self._handles[position + 1][0] if position + 1 < len(self._handles) else start + handle.chunk_count
            settled = end
            try:
                outcome = await handle.done(max(0.0, ends_at_s - asyncio.get_running_loop().time()))
            except KvPoolError as error:
                failed |= dict.fromkeys(self._chunk_indexes[start:end], error)
                continue
            stored += outcome.stored_chunks
            deduplicated += outcome.deduplicated_chunks
            failed |= {self._chunk_indexes[start + at]: error for at, error in outcome.failed.items()}
        if self._error is not None:
            failed |= dict.fromkeys(self._chunk_indexes[settled:], self._error)
        return StoreReport(stored, deduplicated, failed)
