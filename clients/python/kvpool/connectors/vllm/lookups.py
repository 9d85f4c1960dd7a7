"""Hashes prompts and looks them up in the pool in the background, as soon as a request arrives."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from kvpool.client.engine_items import MatchResult
from kvpool.client.hashing import Prompt
from kvpool.client.pool import AsyncPool
from kvpool.client.retry import Backoff
from kvpool.connectors.vllm.agent_connection import AgentConnection
from kvpool.connectors.vllm.concurrency_limiter import ConcurrencyLimiter
from kvpool.connectors.vllm.connector_counters import ConnectorCounters
from kvpool.connectors.vllm.kv_groups import BoundarySearch, KvCacheGroup, match_of_chunks, page_chain
from kvpool.connectors.vllm.log_rate_limiter import LogRateLimiter
from kvpool.connectors.vllm.settings import VllmSettings
from kvpool.connectors.vllm.switch_interval import switch_interval
from kvpool.core.chunks import group_head_index
from kvpool.core.errors import DeadlineExceeded, KvPoolError, ServiceUnavailable
from kvpool.core.tracing import TraceParent

_log = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what is said under its own name
_RESULT_TTL_S = 10.0  # a request that waits for its blocks need not be matched in every step
_CONCURRENT_LOOKUPS = 32
_GRACE_S = 1.0  # a match has a deadline of its own; so much later its answer is taken for lost
_IDLE_WAITS = 5  # of `lookup_wait_ms`, while the engine computes nothing
_LOOP_TOKENS = 1 << 14  # more are not hashed on the loop, which has loads to end: 1 ms

_ROUNDS_MAX = 7  # of questions about groups whose windows lack chunks, or states; then what is known decides

_NO_CHAINS = (Prompt(1, 0, b""),)


@dataclass(frozen=True, slots=True)
class LookupResult:
    """chains: of the request's tokens at the time, for each KV cache group. match: None if only chains were wanted.
    runs: for each group, chunks that the pool has; each run ends before a chunk that it lacks."""

    chains: tuple[Prompt, ...]
    match: MatchResult | None
    runs: tuple[tuple[range, ...], ...] = ()


@dataclass(slots=True)
class Lookup:
    """Lookup of one request. trace: trace context of the request."""

    trace: TraceParent | None = None
    running: Future[LookupResult] | None = None
    awaited_since_s: float | None = None  # the engine could schedule the request
    found: MatchResult | None = None
    runs: tuple[tuple[range, ...], ...] = ()  # see LookupResult
    found_at_s: float = 0.0
    counted: bool = False  # what was made of the answer
    tried: bool = False  # it is loaded though computing was taken to be quicker
    admitted: bool | None = None  # if no load of what is left of the prompt could pay: whether it is made all the same
    held_chunks: int = 0  # that it was asked with: `found.runs` begin after them

    @property
    def chains(self) -> tuple[Prompt, ...]:
        """Chains of a lookup that has ended but was not processed yet; else empty."""
        running = self.running
        if running is None or not running.done() or running.cancelled() or running.exception() is not None:
            return ()
        return running.result().chains

    def cancel(self) -> None:
        """Cancel it: its result is no longer needed."""
        if self.running is not None:
            self.running.cancel()


class Lookups:
    """Lookups of one scheduler.

    All requests together delay a step for `lookup_wait_ms` at most, or several times that while the engine is idle,
    since each request without a result costs an idle engine an empty step. After a failure lookups pause for a while.
    """

    def __init__(
        self,
        settings: VllmSettings,
        connection: AgentConnection,
        groups: Sequence[KvCacheGroup],
        counters: ConnectorCounters,
        now_s: Callable[[], float],
    ) -> None:
        self._groups = groups
        self._settings, self._connection, self._counters, self._now_s = settings, connection, counters, now_s
        self._backoff = Backoff(0.1, 5.0)
        self._paused_until_s = 0.0
        self._log_rate = LogRateLimiter(now_s)
        self._limiter = ConcurrencyLimiter(count=_CONCURRENT_LOOKUPS, size_bytes=1)
        self._waited_s = 0.0

    def new_step(self) -> None:
        """Reset the time for which lookups may delay the step."""
        self._waited_s = 0.0

    @property
    def pools(self) -> tuple[AsyncPool, ...]:
        """The pool of each group if lookups may be made now; else empty."""
        return () if self._now_s() < self._paused_until_s else self._connection.pools

    def begin(
        self,
        lookup: Lookup,
        pools: Sequence[AsyncPool],
        hash_tokens: Callable[[], tuple[Prompt, ...]],
        token_count: int,
        *,
        held_chunks: int = 0,
        match: bool = True,
    ) -> None:
        """Hash the prompt and, if match is true, look it up. hash_tokens may run on another thread."""

        async def ask() -> LookupResult:
            chains = hash_tokens() if token_count <= _LOOP_TOKENS else await asyncio.to_thread(hash_tokens)
            if not match:
                return LookupResult(chains, None)
            async with self._limiter.acquire(0):
                return await self._match(pools, chains, held_chunks)

        self._counters.lookups += match
        lookup.held_chunks, lookup.awaited_since_s = held_chunks, None
        try:
            lookup.running = self._connection.start(ask, lookup.trace)
            switch_interval.shorten_until(lookup.running)
        except KvPoolError as error:
            lookup.running = Future()
            lookup.running.set_exception(error)

    def answer(
        self,
        lookup: Lookup,
        pools: Sequence[AsyncPool],
        hash_tokens: Callable[[], tuple[Prompt, ...]],
        token_count: int,
        held_chunks: int,
        *,
        idle: bool = False,
    ) -> tuple[Prompt, ...]:
        """Return the chains of a request whose result is in `lookup.found`; empty if it is not known yet.

        Waits for a moment at most. hash_tokens must return known chains at once. idle: the engine computes nothing.
        """
        now_s = self._now_s()
        fresh = now_s - lookup.found_at_s < _RESULT_TTL_S and lookup.held_chunks <= held_chunks
        if lookup.running is None and fresh and lookup.found is not None and lookup.found.error is None:
            return hash_tokens()
        if lookup.running is None:
            self.begin(lookup, pools, hash_tokens, token_count, held_chunks=held_chunks)
        if lookup.awaited_since_s is None:
            lookup.awaited_since_s = now_s
        found = self._result(lookup, _IDLE_WAITS if idle else 1)
        if found is None:
            return ()
        lookup.running = None
        if found.match is None:  # only its chains were wanted until now
            self.begin(lookup, pools, lambda: found.chains, 0, held_chunks=held_chunks)
            return ()
        lookup.found, lookup.runs, lookup.found_at_s = found.match, found.runs, now_s
        lookup.counted = lookup.tried = False
        if found.match.error is not None:
            self._failed(found.match.error)
        else:
            self._backoff.reset()
        return found.chains if lookup.held_chunks <= held_chunks else ()  # the engine lost some meanwhile

    async def _match(self, pools: Sequence[AsyncPool], chains: tuple[Prompt, ...], held_chunks: int) -> LookupResult:
        """Find the deepest boundary that all groups have. On the pool's event loop, within one match's time."""
        search, loop = BoundarySearch(self._groups, chains[0], held_chunks), asyncio.get_running_loop()
        pages: dict[int, Prompt] = {}  # by group; most prompts that the pool lacks ask about one
        deadline_s = loop.time() + self._settings.match_timeout_s
        for _ in range(_ROUNDS_MAX):
            asks, left_s = search.asks(), deadline_s - loop.time()
            if not asks or left_s <= 0:
                break
            for number in {number for number, _ in asks} - pages.keys():
                pages[number] = page_chain(chains[number], self._groups[number].pages)
            matches = await asyncio.gather(
                *(
                    self._match_group(pools[number], number, pages[number], first, search.limit, left_s)
                    for number, first in asks
                )
            )
            for (group, first), match in zip(asks, matches, strict=True):
                if match.error is not None:
                    return LookupResult(chains, match)
                search.found(group, first, match)
        return LookupResult(chains, search.match, search.runs)

    async def _match_group(
        self, pool: AsyncPool, number: int, chain: Prompt, first_chunk: int, end_chunk: int, timeout_s: float
    ) -> MatchResult:
        """Match chunks of one group from first_chunk on, up to end_chunk at least. Of recurrent layers one counts.
        chain: of the chunks' pages."""
        group = self._groups[number]
        if group.recurrent:
            end_chunk = first_chunk + 1
            chain = replace(chain, packed=chain.packed_hashes(0, end_chunk * group.pages))
        if group.pages == 1:
            return await pool.match(chain, held_chunks=first_chunk, timeout_s=timeout_s)
        held = first_chunk * group.pages
        left_out = group_head_index(held)  # pages of the index's groups before the one of the first page
        asked = replace(chain, packed=chain.packed_hashes(left_out, end_chunk * group.pages))
        match = await pool.match(asked, held_chunks=held - left_out, timeout_s=timeout_s)
        return match_of_chunks(match, left_out, group.pages)

    def _result(self, lookup: Lookup, waits: int) -> LookupResult | None:
        running = lookup.running
        assert running is not None
        assert lookup.awaited_since_s is not None
        left_s = waits * self._settings.lookup_wait_ms / 1e3 - self._waited_s
        if not running.done() and left_s > 0:
            waits_at_s = self._now_s()
            concurrent.futures.wait([running], left_s)
            self._waited_s += self._now_s() - waits_at_s
        if running.done():
            if running.cancelled():
                return _failure(ServiceUnavailable("the lookup was cancelled"))
            error = running.exception()
            return running.result() if error is None else _failure(_as_pool_error(error))
        if self._now_s() - lookup.awaited_since_s < self._settings.match_timeout_s + _GRACE_S:
            return None
        running.cancel()
        return _failure(DeadlineExceeded("a lookup was never answered"))

    def _failed(self, error: KvPoolError) -> None:
        self._counters.failed_lookups += 1
        self._paused_until_s = self._now_s() + self._backoff.next_s()
        if self._log_rate.due("failed"):
            _log.warning("kvpool: nothing is looked up for a moment: %s%s", error, self._log_rate.suppressed("failed"))


def _failure(error: KvPoolError) -> LookupResult:
    return LookupResult(_NO_CHAINS, MatchResult(0, error=error))


def _as_pool_error(error: BaseException) -> KvPoolError:
    return error if isinstance(error, KvPoolError) else ServiceUnavailable(repr(error))
