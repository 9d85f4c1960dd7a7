"""match -> load -> store of one engine rank. Cache failures come back as values that say what to compute."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvpool.client.config import ClientConfig
from kvpool.client.engine_items import (
    EngineSource,
    LoadResult,
    MatchResult,
    RequestStats,
    StoreResult,
    TierTokens,
)
from kvpool.client.engine_registration import EngineRegistration, OfferFd
from kvpool.client.engine_requests import LeaseHandle, StoreRequest
from kvpool.client.fds import offer_fd
from kvpool.client.gpuagent import EngineSession
from kvpool.client.handle import AsyncHandle, LoadTerms, load_windows
from kvpool.client.hashing import Prompt
from kvpool.client.paged_cache import PagedCache
from kvpool.client.request_spans import end_with_stores, note_loaded, note_matched, request_span
from kvpool.client.retry import Backoff
from kvpool.core.chunks import ChunkRange, Extra, Tokens
from kvpool.core.errors import DeadlineExceeded, InvalidRequest, KvPoolError, ServiceUnavailable, Stopped
from kvpool.core.ipc import EngineEvent
from kvpool.core.retention import Retention
from kvpool.core.tracing import Span
from kvpool.wire.convert_engine import BlockIds
from kvpool.wire.tls_errors import is_unix

if TYPE_CHECKING:
    from kvpool.wire.tls import TlsCredentials

_log = logging.getLogger(__name__)
# An agent with a GPU pins its pagestore's whole arena for the first engine: a second for a few GiB.
_GPU_CONNECT_TIMEOUT_S = 60.0


class EventRecorder(Protocol):
    """An engine's memory, of PagedCache or a connector's own."""

    def record_event(self) -> EngineEvent | None:
        """What the calling thread gave to its current stream so far; see PagedCache."""


class AsyncPool:
    """The cache as one engine rank sees it. Belongs to one event loop; `Pool` is the same for code without one.

    After `connect` a method raises only for misuse (InvalidRequest); a cache failure is part of its result. When the
    agent goes away, the pool reconnects in the background and finds nothing meanwhile.

    `block_table` names the engine's blocks of the whole prompt from token 0 on, in order. `wait_event` is GPU work that
    a load or store has to come after: an event that was taken and recorded, and is given back by the call; without one
    it is what the calling thread gave to its current stream so far.
    """

    def __init__(self, session: EngineSession, config: ClientConfig, cache: EventRecorder | None = None) -> None:
        """Use `connect`, or `open`. cache: records events; without one, calls come after nothing but their event."""
        self._session = session
        self._config = config
        self._cache = cache
        self._closed = False
        self._ended = asyncio.Event()  # closed, so that nothing more is learned of what the agent holds
        self._reconnecting = asyncio.create_task(self._keep_connected(), name="kvpool reconnect")
        self.totals = RequestStats()  # of all requests counted with `count`

    @classmethod
    async def connect(
        cls,
        agent: str,
        cache: PagedCache,
        *,
        engine_name: str = "",
        keyspace_name: str = "",
        config: ClientConfig | None = None,
    ) -> AsyncPool:
        """Share a cache through the agent at `agent` ("unix:/path" or "host:port").

        engine_name, keyspace_name: what operators see; by default the process's id, and a name made of the model.
        raises: what `open` raises; InvalidRequest also for an address of another form.
        """
        _check_agent(agent)
        if config is None:
            config = ClientConfig(tls=None if is_unix(agent) else _tls_from_environment())
            if cache.on_gpu:
                config = replace(config, connect_timeout_s=_GPU_CONNECT_TIMEOUT_S)
        registration = EngineRegistration(
            endpoint=agent,
            engine_name=engine_name or f"engine-{os.getpid()}",
            keyspace_name=keyspace_name or cache.model.keyspace_name,
            spec=cache.model.spec,
            layout=cache.layout,
            regions=cache.regions,
            events=cache.events,
        )
        try:
            return await cls.open(registration, config, cache=cache)
        except ServiceUnavailable as error:
            if type(error) is not ServiceUnavailable:  # those of TLS say what to do
                raise
            raise ServiceUnavailable(
                f"no agent can be reached at {agent}; start one with `kvpool cluster up`, or correct the address "
                f"({error.message.removesuffix(f'; {error.advice}')})"
            ) from error

    @classmethod
    async def open(
        cls,
        registration: EngineRegistration,
        config: ClientConfig,
        *,
        offer: OfferFd = offer_fd,
        cache: EventRecorder | None = None,
    ) -> AsyncPool:
        """Register with the agent. raises: KeyspaceMismatch, PartitionRefused, GeometryUnsupported, InvalidRequest,
        NotServed (configuration that must be changed); ServiceUnavailable, DeadlineExceeded (try again later)."""
        return cls(await EngineSession.open(registration, config, offer=offer), config, cache)

    @property
    def session(self) -> EngineSession:
        """The session now in use, perhaps a broken one."""
        return self._session

    @property
    def connected(self) -> bool:
        """Whether the agent can be asked now."""
        return self._session.failure is None and not self._closed

    def prompt(self, tokens: Tokens, extras: Sequence[Sequence[Extra]] | None = None) -> Prompt:
        """Hash a prompt. extras: of each full chunk, what its KV depends on beside tokens (images, a LoRA adapter).

        raises: InvalidRequest for tokens that are not token ids.
        """
        return Prompt.of(self._session.hash_key, tokens, self._session.spec.chunk_tokens, extras)

    def extend(self, prompt: Prompt, tokens: Tokens, extras: Sequence[Sequence[Extra]] | None = None) -> Prompt:
        """Hash a longer prompt that begins with `prompt`. tokens: all of it. extras: of the new full chunks."""
        return prompt.extended(self._session.hash_key, tokens, extras)

    async def match(self, prompt: Prompt, *, held_chunks: int = 0, timeout_s: float | None = None) -> MatchResult:
        """The longest prefix that the pool has; chunks that the engine holds are not looked up."""
        with self._span("match", prompt.chunk_count) as span:
            found = await self._match(prompt, held_chunks, timeout_s)
            note_matched(span, found.matched_chunks, prompt.chunk_count, found.error)
        return found

    async def _match(self, prompt: Prompt, held_chunks: int, timeout_s: float | None) -> MatchResult:
        held = min(held_chunks, prompt.chunk_count)
        if held == prompt.chunk_count:
            return MatchResult(held, prompt.usable_tokens(held))
        asked = min(prompt.chunk_count, self._session.max_request_chunks or prompt.chunk_count)
        try:
            hashes = prompt.packed_hashes(0, asked)
            found = await self._session.match(hashes, min(held, asked), timeout_s=timeout_s)
        except KvPoolError as error:
            return MatchResult(held, prompt.usable_tokens(held), error=self._explain(error))
        matched = max(held, min(found.matched_chunks, prompt.chunk_count))
        return MatchResult(matched, prompt.usable_tokens(matched), found.runs)

    def load(
        self,
        prompt: Prompt,
        block_table: BlockIds,
        *,
        first_chunk: int = 0,
        end_chunk: int | None = None,
        skip_tokens: int = 0,
        timeout_s: float | None = None,
        wait_event: EngineEvent | None = None,
        compute_us_per_token: float = 0.0,
    ) -> Coroutine[Any, Any, LoadResult]:
        """Load what the pool has of a prompt. Returns when the blocks are the caller's again, whatever came of it.

        After a deadline, or once the caller is interrupted, that takes until the agent has stopped writing, or its
        process has ended; see `start_load` for a caller that can do without the blocks meanwhile. raises:
        ServiceUnavailable if the pool is closed and that is not known by then: then they are not.

        first_chunk: the engine has those before. end_chunk: the first one not to load; by default, where the match
        ends. skip_tokens: of the first chunk, to leave untouched. compute_us_per_token: what computing would take, for
        the agent's metrics; 0 if not known.
        raises: InvalidRequest for a range outside of the prompt.
        """
        starting = self.start_load(
            prompt,
            block_table,
            first_chunk=first_chunk,
            end_chunk=end_chunk,
            skip_tokens=skip_tokens,
            timeout_s=timeout_s,
            wait_event=wait_event,
            compute_us_per_token=compute_us_per_token,
            by_layer=False,
        )
        return self._finish_load(starting)

    async def _finish_load(self, starting: Coroutine[Any, Any, AsyncHandle[LoadResult]]) -> LoadResult:
        handle = await starting
        if await self._wait_released(handle):
            raise asyncio.CancelledError
        if not handle.released:
            raise ServiceUnavailable("the pool was closed and its agent did not let go of the blocks: leave them alone")
        return await handle.result()

    async def _wait_released(self, held: AsyncHandle[Any] | StoreRequest) -> bool:
        """Wait until blocks are the caller's again, or nothing more is learned of them as the pool was closed.

        Also when cancelled, which is returned: a caller that is gone gives its blocks to others.
        """
        is_cancelled = False
        while not held.released and not self._ended.is_set():
            waits = [asyncio.ensure_future(held.wait_released()), asyncio.ensure_future(self._ended.wait())]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                is_cancelled = True
                held.cancel()
            finally:
                for wait in waits:
                    wait.cancel()
        return is_cancelled

    async def end(self, handle: AsyncHandle[Any]) -> None:
        """Cancel a load or store and wait until its blocks are the caller's again, or nothing more is learned of them
        as the pool was closed."""
        handle.cancel()
        await self._wait_released(handle)

    def start_load(
        self,
        prompt: Prompt,
        block_table: BlockIds,
        *,
        first_chunk: int = 0,
        end_chunk: int | None = None,
        skip_tokens: int = 0,
        timeout_s: float | None = None,
        wait_event: EngineEvent | None = None,
        compute_us_per_token: float = 0.0,
        by_layer: bool = True,
        from_gpu: bool = False,
    ) -> Coroutine[Any, Any, AsyncHandle[LoadResult]]:
        """Begin a load, whose first layers can be used before its last ones are in. Arguments as for `load`.

        by_layer: have the agent report layers, for `wait_layers`; loads of more chunks than one request takes do not.
        from_gpu: look in GPU caches of other ranks of the host first; a match of this load itself says whether to.
        """
        terms = LoadTerms(
            timeout_s=self._config.load_timeout_s if timeout_s is None else timeout_s,
            grace_s=self._config.load_grace_s,
            by_layer=by_layer,
            wait_event=wait_event or self._record_event(),
            compute_us_per_token=compute_us_per_token,
            from_gpu=from_gpu,
        )

        async def start() -> AsyncHandle[LoadResult]:
            return AsyncHandle(
                lambda handle: self._load(prompt, block_table, first_chunk, end_chunk, skip_tokens, terms, handle)
            )

        return start()

    async def _load(
        self,
        prompt: Prompt,
        block_table: BlockIds,
        first_chunk: int,
        end_chunk: int | None,
        skip_tokens: int,
        terms: LoadTerms,
        handle: AsyncHandle[LoadResult],
    ) -> LoadResult:
        try:
            if end_chunk is None:
                found = await self.match(prompt, held_chunks=first_chunk)
                end_chunk = max(first_chunk, found.matched_chunks)
                if found.error is not None:
                    return LoadResult(first_chunk, num_tokens=found.num_tokens, error=found.error)
                terms = replace(terms, from_gpu=any(run.source == EngineSource.GPU for run in found.runs))
            chunks = range(first_chunk, end_chunk)
            with self._span("load", len(chunks)) as span:
                windows = self._windows(prompt, block_table, chunks, skip_tokens)
                result = await load_windows(lambda: self._session, windows, chunks, terms, handle)
                error = self._explain(result.error) if result.error is not None else None
                note_loaded(span, result.loaded_chunks, len(chunks), error, result.tokens)
        finally:
            self._session.give_back(terms.wait_event)
        if first_chunk <= prompt.pooled_chunks:
            prompt.pooled_chunks = result.end_chunk if error else max(prompt.pooled_chunks, result.end_chunk)
        return replace(result, error=error, num_tokens=prompt.usable_tokens(result.end_chunk))

    async def lease(
        self, prompt: Prompt, *, first_chunk: int, end_chunk: int, hold_s: float, hold_only: bool = False
    ) -> LeaseHandle | None:
        """Keep chunks [first_chunk, end_chunk) in this host's memory for a load to come, and bring them there from disk
        and other nodes, until the lease is ended, for hold_s at most. As many leading ones as one request may name.

        hold_only: see EngineSession.lease. None if the agent cannot be asked. raises: InvalidRequest for a range
        that is not within the prompt.
        """
        if not 0 <= first_chunk < end_chunk <= prompt.chunk_count:
            raise InvalidRequest(
                f"chunks [{first_chunk}, {end_chunk}) are not within the {prompt.chunk_count} of the prompt"
            )
        most = self._session.max_request_chunks or prompt.chunk_count
        try:
            async with asyncio.timeout(self._config.call_timeout_s):
                chunks = range(first_chunk, min(end_chunk, first_chunk + most))
                return await self._session.lease(prompt, chunks, hold_s=hold_s, hold_only=hold_only)
        except (TimeoutError, KvPoolError):
            return None

    def store(
        self,
        prompt: Prompt,
        block_table: BlockIds,
        *,
        first_chunk: int | None = None,
        end_chunk: int | None = None,
        retention: Retention | None = None,
        still_valid: Callable[[], bool | Awaitable[bool]] | None = None,
        wait_event: EngineEvent | None = None,
        timeout_s: float | None = None,
    ) -> Coroutine[Any, Any, AsyncHandle[StoreResult]]:
        """Begin to store the full chunks of a prompt that are not known to be in the pool. Their blocks must keep their
        bytes until the handle is released; decoding goes on meanwhile.

        first_chunk, end_chunk: chunks [first_chunk, end_chunk) instead.
        retention: how long and how eagerly all these chunks are kept. None: as the keyspace says.
        still_valid: called each time blocks were copied out: whether all blocks of this store held their bytes until
        then, else they are not stored; may return an awaitable. None: they do until they are released.
        timeout_s: until the result says what is known by then; the store itself goes on.
        raises: InvalidRequest for a range outside of the prompt.
        """
        first = prompt.pooled_chunks if first_chunk is None else first_chunk
        chunks = range(first, max(first, prompt.chunk_count) if end_chunk is None else end_chunk)
        limit_s = self._config.store_timeout_s if timeout_s is None else timeout_s
        event = wait_event or (self._record_event() if chunks else None)
        return self._store(prompt, block_table, chunks, retention, still_valid, event, limit_s)

    async def begin_store(
        self,
        prompt: Prompt,
        block_table: BlockIds,
        chunks: range,
        *,
        wait_event: EngineEvent | None,
        retention: Retention | None = None,
        still_valid: Callable[[int], bool | Awaitable[bool]] | None = None,
    ) -> StoreRequest:
        """Begin to store chunks in one request to the agent, for callers that keep account of them themselves: the
        prompt does not note what is in the pool.

        wait_event: engine work that must end before the blocks are read; it is given back. None: there is none.
        retention, still_valid: as for `store`; still_valid is passed the number of leading chunks that were copied out.
        raises: InvalidRequest for a range that is empty, outside of the prompt, or more than one request may name; why
        the store was not begun.
        """
        requests: list[StoreRequest] = []
        error: KvPoolError | None = None
        trace = self._span("store", len(chunks))
        try:
            spans = self._windows(prompt, block_table, chunks, 0)
            if len(spans) != 1:
                most = self._session.max_request_chunks
                raise InvalidRequest(f"one request stores 1 to {most} chunks, got {len(chunks)}")
            with trace.current():
                requests.append(await self._begin_one(spans[0], retention, still_valid, wait_event))
            return requests[0]
        except KvPoolError as refused:
            error = refused
            raise
        finally:
            end_with_stores(trace, requests, error)
            self._session.give_back(wait_event)

    async def _store(
        self,
        prompt: Prompt,
        block_table: BlockIds,
        chunks: range,
        retention: Retention | None,
        still_valid: Callable[[], bool | Awaitable[bool]] | None,
        event: EngineEvent | None,
        timeout_s: float,
    ) -> AsyncHandle[StoreResult]:
        requests: list[StoreRequest] = []
        error: KvPoolError | None = Stopped("the store was not begun to its end")
        trace = self._span("store", len(chunks))
        try:
            spans = self._windows(prompt, block_table, chunks, 0)
            with trace.current():
                error = await self._begin_stores(spans, requests, retention, still_valid, event)
        except asyncio.CancelledError:  # its caller gets no handle
            for request in requests:
                request.cancel()
            for request in requests:
                await self._wait_released(request)
            raise
        finally:
            end_with_stores(trace, requests, error)
            self._session.give_back(event)
        if chunks.start <= prompt.pooled_chunks:
            prompt.pooled_chunks = max(prompt.pooled_chunks, chunks.stop)  # taken back by those that fail
        handle = AsyncHandle[StoreResult](partial(_end_of_store, prompt, chunks, requests, error, timeout_s))
        for request in requests:
            handle.add(request)
        handle.begun()
        return handle

    async def _begin_stores(
        self,
        spans: Sequence[ChunkRange],
        requests: list[StoreRequest],
        retention: Retention | None,
        still_valid: Callable[[], bool | Awaitable[bool]] | None,
        event: EngineEvent | None,
    ) -> KvPoolError | None:
        """Begin what can be begun; why the rest was not."""
        asked = (lambda _: still_valid()) if still_valid is not None else None
        for span in spans:
            try:
                requests.append(await self._begin_one(span, retention, asked, event))
            except KvPoolError as refused:
                return refused
        return None

    async def _begin_one(
        self,
        span: ChunkRange,
        retention: Retention | None,
        still_valid: Callable[[int], bool | Awaitable[bool]] | None,
        event: EngineEvent | None,
    ) -> StoreRequest:
        # A time limit costs the event loop more than a request that need not wait for others.
        limit = asyncio.timeout(self._config.call_timeout_s) if self._session.is_full else nullcontext()
        try:
            async with limit:
                return await self._session.store(span, retention=retention, kept=still_valid, after=event)
        except TimeoutError:
            raise DeadlineExceeded("the agent takes no more stores now") from None
        except KvPoolError as refused:
            raise self._explain(refused) from None

    def count(self, prompt: Prompt, *, own_tokens: int, load: LoadResult | None = None) -> RequestStats:
        """Where one prompt's tokens came from; also added to `totals`."""
        stats = RequestStats.of(prompt, own_tokens=own_tokens, loaded=load.tokens if load else TierTokens())
        self.totals += stats
        return stats

    async def close(self) -> bool:
        """End the session. False if the agent did not confirm; then see `session.released`. Idempotent."""
        if self._closed:
            return True
        self._closed = True
        self._reconnecting.cancel()
        await asyncio.gather(self._reconnecting, return_exceptions=True)
        try:
            return await self._session.close()
        finally:
            self._ended.set()

    async def __aenter__(self) -> AsyncPool:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _windows(self, prompt: Prompt, block_table: BlockIds, chunks: range, skip_tokens: int) -> list[ChunkRange]:
        session = self._session
        limit = session.max_request_chunks or max(1, len(chunks))
        return spans_of(prompt, block_table, chunks, session.blocks_per_chunk, limit, skip_tokens)

    def _record_event(self) -> EngineEvent | None:
        return self._cache.record_event() if self._cache is not None else None

    def _span(self, operation: str, chunk_count: int) -> Span:
        return request_span(self._config.tracer, operation, self._session.keyspace, chunk_count)

    def _explain(self, error: KvPoolError) -> KvPoolError:
        if self._closed:
            return ServiceUnavailable("the pool was closed")
        return error

    async def _keep_connected(self) -> None:
        """Open a successor whenever the session breaks; what fails is tried again, ever more slowly."""
        backoff = Backoff(self._config.backoff_initial_s, self._config.backoff_max_s)
        while True:
            await self._session.broken.wait()
            _log.warning("the agent's session broke, reconnecting: %s", self._session.failure)
            while self._session.failure is not None:
                await asyncio.sleep(backoff.next_s())
                try:
                    self._session = await self._session.reopen()
                except KvPoolError as error:
                    _log.info("the agent cannot be reached yet: %s", error)
                except Exception:
                    _log.exception("reconnecting to the agent failed and is tried again")
            backoff.reset()


def _check_agent(agent: str) -> None:
    """Raises InvalidRequest for an address that gRPC would take for the name of a host. A socket's path may be
    relative."""
    if not agent.startswith("unix:") or agent == "unix:":
        from kvpool.core.addresses import check_endpoint  # most agents are at a unix socket

        check_endpoint(agent, "agent")


def _tls_from_environment() -> TlsCredentials | None:
    from kvpool.client.tls import tls_from_environment  # most agents are at a unix socket, which has none

    return tls_from_environment(os.environ)


async def _end_of_store(
    prompt: Prompt,
    chunks: range,
    requests: Sequence[StoreRequest],
    error: KvPoolError | None,
    timeout_s: float,
    handle: AsyncHandle[StoreResult],
) -> StoreResult:
    """error: why the chunks behind those of the requests were not begun."""
    loop = asyncio.get_running_loop()
    stored = deduplicated = 0
    failed: dict[int, KvPoolError] = {}
    ends_at_s = loop.time() + timeout_s
    for request in requests:
        try:
            end = await request.done(max(0.0, ends_at_s - loop.time()))
        except KvPoolError as cause:
            failed |= dict.fromkeys(request.chunks, cause)
            continue
        stored += end.stored_chunks
        deduplicated += end.deduplicated_chunks
        failed |= end.failed_chunks
    if error is not None:
        begun = requests[-1].chunks.stop if requests else chunks.start
        failed |= dict.fromkeys(range(begun, chunks.stop), error)
    if failed:
        prompt.pooled_chunks = min(prompt.pooled_chunks, *failed)
    handle.progressed(handle.layers_loaded, tuple(sorted(failed)))
    return StoreResult(stored, deduplicated, failed)


def spans_of(
    prompt: Prompt, block_table: BlockIds, chunks: range, blocks_per_chunk: int, limit: int, skip_tokens: int
) -> list[ChunkRange]:
    """Requests of at most `limit` chunks each, in order.

    block_table: of the whole prompt from token 0 on. skip_tokens: of the first chunk. raises: InvalidRequest naming
    what does not fit.
    """
    if not 0 <= chunks.start <= chunks.stop <= prompt.chunk_count:
        raise InvalidRequest(
            f"chunks [{chunks.start}, {chunks.stop}) are not within the {prompt.chunk_count} of the prompt"
        )
    if len(block_table) < chunks.stop * blocks_per_chunk:
        raise InvalidRequest(
            f"block_table has {len(block_table)} blocks, {chunks.stop} chunks need {chunks.stop * blocks_per_chunk}"
        )
    if not 0 <= skip_tokens < prompt.chunk_tokens:
        raise InvalidRequest(f"skip_tokens must be in [0, {prompt.chunk_tokens}), got {skip_tokens}")
    used = block_table[chunks.start * blocks_per_chunk : chunks.stop * blocks_per_chunk]
    block_ids = np.asarray(used, dtype=np.int64).reshape(len(chunks), blocks_per_chunk)
    spans: list[ChunkRange] = []
    for start in range(chunks.start, chunks.stop, limit):
        end = min(start + limit, chunks.stop)
        spans.append(
            ChunkRange(
                chunk_hashes=prompt.packed_hashes(start, end),
                block_ids=block_ids[start - chunks.start : end - chunks.start],
                first_chunk_index=start,
                parent_hash=prompt.parent_hash(start),
                group_head_hashes=prompt.group_head_hashes(start, end - start),
                chain_head_hash=prompt.head_hash,
                prompt_tokens=prompt.token_count,
                skip_tokens=skip_tokens if start == chunks.start else 0,
            )
        )
    return spans
