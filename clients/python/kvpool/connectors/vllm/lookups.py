"""Prompts hashed and matches asked of the pool in the background, from the moment that a request comes."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from kvpool.client.engine_items import MatchResult
from kvpool.client.hashing import Prompt
from kvpool.client.pool import AsyncPool
from kvpool.client.retry import Backoff
from kvpool.connectors.vllm.concurrency_limiter import ConcurrencyLimiter
from kvpool.connectors.vllm.connector_counters import ConnectorCounters
from kvpool.connectors.vllm.link import PoolLink
from kvpool.connectors.vllm.log_rate_limiter import LogRateLimiter
from kvpool.connectors.vllm.settings import VllmSettings
from kvpool.core.errors import DeadlineExceeded, KvPoolError, ServiceUnavailable
from kvpool.core.tracing import TraceParent

_log = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what is said under its own name
_GOOD_FOR_S = 10.0  # a request that waits for its blocks need not be matched in every step
_AT_ONCE = 32
_GRACE_S = 1.0  # a match has a deadline of its own; so much later its answer is taken for lost
_IDLE_WAITS = 5  # of `lookup_wait_ms`, while the engine computes nothing
_LOOP_TOKENS = 1 << 14  # more are not hashed on the loop, which has loads to end: 1 ms

_NO_CHAIN = Prompt(1, 0, b"")


@dataclass(frozen=True, slots=True)
class Found:
    """chain: of the request's tokens when it was asked. match: None if only the chain was wanted."""

    chain: Prompt
    match: MatchResult | None


@dataclass(slots=True)
class Lookup:
    """Of one request. trace: that it came with."""

    trace: TraceParent | None = None
    running: Future[Found] | None = None
    awaited_since_s: float | None = None  # the engine could schedule the request
    found: MatchResult | None = None
    found_at_s: float = 0.0
    counted: bool = False  # what was made of the answer
    tried: bool = False  # it is loaded though computing was taken to be quicker
    held_chunks: int = 0  # that it was asked with: `found.runs` begin after them

    @property
    def chain(self) -> Prompt | None:
        """Of one that has ended and was not asked for its answer yet."""
        running = self.running
        if running is None or not running.done() or running.cancelled() or running.exception() is not None:
            return None
        return running.result().chain

    def cancel(self) -> None:
        """Its answer is not needed any more."""
        if self.running is not None:
            self.running.cancel()


class Lookups:
    """Of a scheduler, whose step they delay for a moment at most, however many requests wait: longer if it computes
    nothing, since a request without an answer costs it an empty step. After a failure nothing is asked for a while: the
    engine computes."""

    def __init__(
        self, settings: VllmSettings, link: PoolLink, tally: ConnectorCounters, now_s: Callable[[], float]
    ) -> None:
        self._settings, self._link, self._tally, self._now_s = settings, link, tally, now_s
        self._backoff = Backoff(0.1, 5.0)
        self._silent_until_s = 0.0
        self._log_rate = LogRateLimiter(now_s)
        self._limiter = ConcurrencyLimiter(count=_AT_ONCE, size_bytes=1)
        self._waited_s = 0.0

    def new_step(self) -> None:
        """The time that one step may wait can be had again."""
        self._waited_s = 0.0

    @property
    def pool(self) -> AsyncPool | None:
        """The pool if it may be asked now."""
        return None if self._now_s() < self._silent_until_s else self._link.pool

    def begin(
        self,
        lookup: Lookup,
        pool: AsyncPool,
        hash_tokens: Callable[[], Prompt],
        token_count: int,
        *,
        held_chunks: int = 0,
        match: bool = True,
    ) -> None:
        """Hash so many tokens and ask for them. match: False only hashes. hash_tokens runs on another thread."""
        timeout_s = self._settings.match_timeout_s

        async def ask() -> Found:
            chain = hash_tokens() if token_count <= _LOOP_TOKENS else await asyncio.to_thread(hash_tokens)
            if not match:
                return Found(chain, None)
            async with self._limiter.acquire(0):
                return Found(chain, await pool.match(chain, held_chunks=held_chunks, timeout_s=timeout_s))

        self._tally.lookups += match
        lookup.held_chunks, lookup.awaited_since_s = held_chunks, None
        try:
            lookup.running = self._link.start(ask, lookup.trace)
        except KvPoolError as error:
            lookup.running = Future()
            lookup.running.set_exception(error)

    def answer(
        self,
        lookup: Lookup,
        pool: AsyncPool,
        hash_tokens: Callable[[], Prompt],
        token_count: int,
        held_chunks: int,
        *,
        idle: bool = False,
    ) -> Prompt | None:
        """The chain of a request whose answer is in `lookup.found` now; None while that is not known. Waits for a
        moment at most. hash_tokens gives a chain that is known already at once. idle: the engine computes nothing."""
        now_s = self._now_s()
        fresh = now_s - lookup.found_at_s < _GOOD_FOR_S and lookup.held_chunks <= held_chunks
        if lookup.running is None and fresh and lookup.found is not None and lookup.found.error is None:
            return hash_tokens()
        if lookup.running is None:
            self.begin(lookup, pool, hash_tokens, token_count, held_chunks=held_chunks)
        if lookup.awaited_since_s is None:
            lookup.awaited_since_s = now_s
        found = self._result(lookup, _IDLE_WAITS if idle else 1)
        if found is None:
            return None
        lookup.running = None
        if found.match is None:  # only its chain was wanted until now
            self.begin(lookup, pool, lambda: found.chain, 0, held_chunks=held_chunks)
            return None
        lookup.found, lookup.found_at_s = found.match, now_s
        lookup.counted = lookup.tried = False
        if found.match.error is not None:
            self._failed(found.match.error)
        else:
            self._backoff.reset()
        return found.chain if lookup.held_chunks <= held_chunks else None  # None: the engine lost some meanwhile

    def _result(self, lookup: Lookup, waits: int) -> Found | None:
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
        self._tally.failed_lookups += 1
        self._silent_until_s = self._now_s() + self._backoff.next_s()
        if self._log_rate.due("failed"):
            _log.warning("kvpool: nothing is looked up for a moment: %s%s", error, self._log_rate.more("failed"))


def _failure(error: KvPoolError) -> Found:
    return Found(_NO_CHAIN, MatchResult(0, error=error))


def _as_pool_error(error: BaseException) -> KvPoolError:
    return error if isinstance(error, KvPoolError) else ServiceUnavailable(repr(error))
