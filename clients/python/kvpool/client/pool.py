"""match -> load -> store for connectors. Trouble of the cache comes back as values that say what to recompute."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import numpy as np

from kvpool.client.config import ClientConfig
from kvpool.client.engine_items import TierTokens
from kvpool.client.engine_registration import EnginePlan, OfferFd
from kvpool.client.engine_requests import LeaseHandle, StoreHandle
from kvpool.client.fds import offer_fd
from kvpool.client.gpuagent import EngineSession
from kvpool.client.hashing import Chain
from kvpool.client.pool_loads import LoadTerms, load_windows
from kvpool.client.pool_values import LoadReport, LoadTicket, OnProgress, PrefixMatch, StoreTicket
from kvpool.client.request_spans import end_with_stores, note_loaded, note_matched, request_span
from kvpool.client.request_stats import RequestStats
from kvpool.client.retry import Backoff
from kvpool.core.cancel import CancelToken
from kvpool.core.chunks import Extra, Tokens
from kvpool.core.errors import DeadlineExceeded, InvalidRequest, KvPoolError, ServiceUnavailable, Stopped
from kvpool.core.ipc import EngineEvent
from kvpool.core.retention import Retention
from kvpool.core.spans import ChunkRange
from kvpool.core.tracing import Span
from kvpool.wire.convert_engine import BlockIds

_log = logging.getLogger(__name__)


class KvPool:
    """The cache as one engine rank sees it. Belongs to one event loop; see sync.SyncKvPool for engines without one.

    After `open` no method raises for trouble of the cache, only for misuse (InvalidRequest for arguments that do not
    fit each other). When the agent goes away, the pool reconnects in the background and answers "nothing" meanwhile.

    `block_table` arguments name the engine's blocks of the whole prompt from token 0 on, in order.
    """

    def __init__(self, session: EngineSession, config: ClientConfig) -> None:
        """Use `open`."""
        self._session = session
        self._config = config
        self._closed = False
        self._reconnecting = asyncio.create_task(self._keep_connected(), name="kvpool reconnect")
        self.totals = RequestStats()  # of all requests counted with `count`

    @classmethod
    async def open(cls, plan: EnginePlan, config: ClientConfig, *, offer: OfferFd = offer_fd) -> KvPool:
        """Register with the agent. raises: KeyspaceMismatch, PartitionRefused, GeometryUnsupported, InvalidRequest,
        NotServed (configuration that must be changed); ServiceUnavailable, DeadlineExceeded (try again later)."""
        return cls(await EngineSession.open(plan, config, offer=offer), config)

    @property
    def session(self) -> EngineSession:
        """The session now in use, perhaps a broken one."""
        return self._session

    @property
    def connected(self) -> bool:
        """Whether the agent can be asked now."""
        return self._session.failure is None and not self._closed

    def chain(self, tokens: Tokens, extras: Sequence[Sequence[Extra]] | None = None) -> Chain:
        """Hash a prompt. raises: InvalidRequest for tokens that are no token ids."""
        return Chain.of(self._session.hash_key, tokens, self._session.spec.chunk_tokens, extras)

    def extend(self, chain: Chain, tokens: Tokens, extras: Sequence[Sequence[Extra]] | None = None) -> Chain:
        """Hash a longer prompt that begins with the one of `chain`. extras: of the new full chunks."""
        return chain.extended(self._session.hash_key, tokens, extras)

    async def match(self, chain: Chain, *, held_chunks: int = 0, timeout_s: float | None = None) -> PrefixMatch:
        """The longest prefix to be had; chunks that the engine holds are not looked up."""
        with self._span("match", chain.chunk_count) as span:
            found = await self._match(chain, held_chunks, timeout_s)
            note_matched(span, found.matched_chunks, chain.chunk_count, found.error)
        return found

    async def _match(self, chain: Chain, held_chunks: int, timeout_s: float | None) -> PrefixMatch:
        held = min(held_chunks, chain.chunk_count)
        if held == chain.chunk_count:
            return PrefixMatch(held, chain.usable_tokens(held))
        asked = chain.hashes[: self._session.max_request_chunks or None]
        try:
            found = await self._session.match(asked, min(held, len(asked)), timeout_s=timeout_s)
        except KvPoolError as error:
            return PrefixMatch(held, chain.usable_tokens(held), error=self._explain(error))
        matched = max(held, min(found.matched_chunks, chain.chunk_count))
        return PrefixMatch(matched, chain.usable_tokens(matched), found.runs)

    async def load(
        self,
        chain: Chain,
        block_table: BlockIds,
        *,
        first_chunk: int,
        end_chunk: int,
        skip_tokens: int = 0,
        timeout_s: float | None = None,
        on_progress: OnProgress | None = None,
        after: EngineEvent | None = None,
        stop: CancelToken | None = None,
        compute_us_per_token: float = 0.0,
    ) -> LoadReport:
        """Load chunks [first_chunk, end_chunk) into the engine's blocks.

        skip_tokens: of the first chunk, to leave untouched. on_progress: called with layers that are in and failed
        chunks (indexes in the chain), for loads that fit into one request. after: GPU work that may still read what the
        blocks held before, an event that was taken and recorded; it is given back here. stop: ends it early.
        compute_us_per_token: see EngineSession.load.
        raises: InvalidRequest for a range outside of the chain.
        """
        chunks = range(first_chunk, end_chunk)
        terms = LoadTerms(
            timeout_s=self._config.load_timeout_s if timeout_s is None else timeout_s,
            grace_s=self._config.load_grace_s,
            on_progress=on_progress,
            after=after,
            stop=stop or CancelToken(),
            explain=self._explain,
            compute_us_per_token=compute_us_per_token,
        )
        try:
            with self._span("load", len(chunks)) as span:
                windows = self._windows(chain, block_table, first_chunk, end_chunk, skip_tokens)
                report = await load_windows(lambda: self._session, windows, chunks, terms)
                note_loaded(span, report.loaded_chunks, len(chunks), report.error, report.tokens)
                return report
        finally:
            self._session.give_back(after)

    def begin_load(
        self,
        chain: Chain,
        block_table: BlockIds,
        *,
        first_chunk: int,
        end_chunk: int,
        skip_tokens: int = 0,
        timeout_s: float | None = None,
        after: EngineEvent | None = None,
        compute_us_per_token: float = 0.0,
    ) -> LoadTicket:
        """Begin a load whose first layers can be used before its last ones are in. Arguments as for `load`."""
        return LoadTicket(
            lambda on_progress: self.load(
                chain,
                block_table,
                first_chunk=first_chunk,
                end_chunk=end_chunk,
                skip_tokens=skip_tokens,
                timeout_s=timeout_s,
                on_progress=on_progress,
                after=after,
                compute_us_per_token=compute_us_per_token,
            )
        )

    async def lease(
        self, chain: Chain, *, first_chunk: int, end_chunk: int, hold_s: float, hold_only: bool = False
    ) -> LeaseHandle | None:
        """Keep chunks [first_chunk, end_chunk) in this host's memory for a load to come, and bring them there from disk
        and other nodes, until the lease is ended, for hold_s at most. As many leading ones as one request may name.

        hold_only: see EngineSession.lease. None if the agent cannot be asked. raises: InvalidRequest for a range
        that is not within the chain.
        """
        if not 0 <= first_chunk < end_chunk <= chain.chunk_count:
            raise InvalidRequest(
                f"chunks [{first_chunk}, {end_chunk}) are not within the {chain.chunk_count} of the chain"
            )
        most = self._session.max_request_chunks or chain.chunk_count
        try:
            async with asyncio.timeout(self._config.call_timeout_s):
                chunks = range(first_chunk, min(end_chunk, first_chunk + most))
                return await self._session.lease(chain, chunks, hold_s=hold_s, hold_only=hold_only)
        except (TimeoutError, KvPoolError):
            return None

    async def store(
        self,
        chain: Chain,
        block_table: BlockIds,
        *,
        first_chunk: int,
        end_chunk: int,
        retention: Retention | None = None,
        kept: Callable[[], bool] | None = None,
        after: EngineEvent | None = None,
    ) -> StoreTicket:
        """Begin to store chunks [first_chunk, end_chunk); their blocks are held until the ticket says otherwise.

        retention: of all chunks, or of ranges of the prompt's tokens; a chunk takes what keeps it longest of all that
        touch it. None: as the keyspace says.
        kept: asked each time blocks were copied out, whether all blocks of this store held their bytes until now; None
        means the engine keeps to the rule. after: GPU work that computes the blocks, an event that was taken and
        recorded; it is given back here. raises: InvalidRequest for a range outside of the chain.
        """
        chunks = range(first_chunk, end_chunk)
        handles: list[tuple[int, StoreHandle]] = []
        error: KvPoolError | None = Stopped("the store was not begun to its end")
        trace = self._span("store", len(chunks))
        try:
            spans = self._windows(chain, block_table, first_chunk, end_chunk, 0)
            with trace.current():
                error = await self._begin_stores(spans, first_chunk, handles, retention, kept, after)
        finally:
            end_with_stores(trace, [handle for _, handle in handles], error)
            self._session.give_back(after)
        return StoreTicket(chunks, handles, error)

    async def _begin_stores(
        self,
        spans: Sequence[ChunkRange],
        first_chunk: int,
        handles: list[tuple[int, StoreHandle]],
        retention: Retention | None,
        kept: Callable[[], bool] | None,
        after: EngineEvent | None,
    ) -> KvPoolError | None:
        """Begin what can be begun; why the rest was not."""
        asked = (lambda _: kept()) if kept is not None else None
        for span in spans:
            try:
                async with asyncio.timeout(self._config.call_timeout_s):
                    handle = await self._session.store(span, retention=retention, kept=asked, after=after)
                handles.append((span.first_chunk_index - first_chunk, handle))
            except TimeoutError:
                return DeadlineExceeded("the agent takes no more stores now")
            except KvPoolError as refused:
                return self._explain(refused)
        return None

    def count(self, chain: Chain, *, own_tokens: int, load: LoadReport | None = None) -> RequestStats:
        """Where one prompt's tokens came from; also added to `totals`."""
        stats = RequestStats.of(chain, own_tokens=own_tokens, loaded=load.tokens if load else TierTokens())
        self.totals += stats
        return stats

    async def close(self) -> bool:
        """End the session. False if the agent did not confirm; then see `session.released`. Idempotent."""
        if self._closed:
            return True
        self._closed = True
        self._reconnecting.cancel()
        await asyncio.gather(self._reconnecting, return_exceptions=True)
        return await self._session.close()

    def _windows(
        self, chain: Chain, block_table: BlockIds, first_chunk: int, end_chunk: int, skip_tokens: int
    ) -> list[ChunkRange]:
        session = self._session
        limit = session.max_request_chunks or max(1, end_chunk - first_chunk)
        return spans_of(chain, block_table, range(first_chunk, end_chunk), session.blocks_per_chunk, limit, skip_tokens)

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


def spans_of(
    chain: Chain, block_table: BlockIds, chunks: range, blocks_per_chunk: int, limit: int, skip_tokens: int
) -> list[ChunkRange]:
    """Requests of at most `limit` chunks each, in chain order.

    block_table: of the whole prompt from token 0 on. skip_tokens: of the first chunk. raises: InvalidRequest naming
    what does not fit.
    """
    if not 0 <= chunks.start <= chunks.stop <= chain.chunk_count:
        raise InvalidRequest(
            f"chunks [{chunks.start}, {chunks.stop}) are not within the {chain.chunk_count} of the chain"
        )
    if len(block_table) < chunks.stop * blocks_per_chunk:
        raise InvalidRequest(
            f"block_table has {len(block_table)} blocks, {chunks.stop} chunks need {chunks.stop * blocks_per_chunk}"
        )
    if not 0 <= skip_tokens < chain.chunk_tokens:
        raise InvalidRequest(f"skip_tokens must be in [0, {chain.chunk_tokens}), got {skip_tokens}")
    used = block_table[chunks.start * blocks_per_chunk : chunks.stop * blocks_per_chunk]
    block_ids = np.asarray(used, dtype=np.int64).reshape(len(chunks), blocks_per_chunk)
    spans: list[ChunkRange] = []
    for start in range(chunks.start, chunks.stop, limit):
        end = min(start + limit, chunks.stop)
        spans.append(
            ChunkRange(
                chunk_hashes=chain.packed_hashes(start, end),
                block_ids=block_ids[start - chunks.start : end - chunks.start],
                first_chunk_index=start,
                parent_hash=chain.parent_hash(start),
                group_head_hashes=chain.group_head_hashes(start, end - start),
                chain_head_hash=chain.head_hash,
                prompt_tokens=chain.token_count,
                skip_tokens=skip_tokens if start == chunks.start else 0,
            )
        )
    return spans
