"""Matches asked of the pool without waiting for them in the engine's way."""

from __future__ import annotations

import concurrent.futures
import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from kvpool.client.hashing import Chain
from kvpool.client.pool import KvPool
from kvpool.client.pool_values import PrefixMatch
from kvpool.client.retry import Backoff
from kvpool.connectors.vllm.link import PoolLink
from kvpool.connectors.vllm.seldom import Seldom
from kvpool.connectors.vllm.settings import VllmSettings
from kvpool.connectors.vllm.tally import Tally
from kvpool.core.errors import DeadlineExceeded, KvPoolError, ServiceUnavailable
from kvpool.core.tracing import TraceParent

_log = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what is said under its own name
_GOOD_FOR_S = 1.0  # a request that gets no blocks at once need not be matched in every step
_BEGUN_MAX = 32  # in one step
_TOKENS_MAX = 1 << 17  # to be hashed in one step: some 10 ms
_GRACE_S = 1.0  # a match has a deadline of its own; so much later its answer is taken for lost


@dataclass(slots=True)
class Lookup:
    """Of one request. trace: that it came with."""

    trace: TraceParent | None = None
    running: Future[PrefixMatch] | None = None
    begun_at_s: float = 0.0
    found: PrefixMatch | None = None
    found_at_s: float = 0.0
    counted: bool = False  # what was made of the answer
    held_chunks: int = 0  # that it was asked with: `found.runs` begin after them

    def cancel(self) -> None:
        """Nobody asks for it any more."""
        if self.running is not None:
            self.running.cancel()


class Lookups:
    """Of a scheduler, whose step they delay for a moment at most, however many requests wait. After a failure nothing
    is asked for a while: the engine computes."""

    def __init__(self, settings: VllmSettings, link: PoolLink, tally: Tally, now_s: Callable[[], float]) -> None:
        self._settings, self._link, self._tally, self._now_s = settings, link, tally, now_s
        self._backoff = Backoff(0.1, 5.0)
        self._silent_until_s = 0.0
        self._seldom = Seldom(now_s)
        self.new_step()

    def new_step(self) -> None:
        """What one step may wait and begin is to be had again."""
        self._wait_left_s = self._settings.lookup_wait_ms / 1e3
        self._begun, self._tokens = 0, 0

    def hashed(self, token_count: int) -> None:
        """So many tokens were hashed for a lookup in this step."""
        self._tokens += token_count

    @property
    def pool(self) -> KvPool | None:
        """The pool if it may be asked now."""
        return None if self._now_s() < self._silent_until_s else self._link.pool

    @property
    def may_begin(self) -> bool:
        """Whether another prompt may be hashed and looked up in this step."""
        return self._begun < _BEGUN_MAX and self._tokens < _TOKENS_MAX

    def answer(self, lookup: Lookup, pool: KvPool, chain: Chain, held_chunks: int) -> PrefixMatch | None:
        """What the pool has of a chain; None while that is not known. Waits for a moment at most."""
        now_s = self._now_s()
        fresh = now_s - lookup.found_at_s < _GOOD_FOR_S and lookup.held_chunks <= held_chunks
        if lookup.found is not None and lookup.running is None and fresh:
            return lookup.found
        if lookup.running is None:
            if self._begun >= _BEGUN_MAX:
                return None
            lookup.running = self._begin(pool, chain, held_chunks, lookup.trace)
            lookup.begun_at_s, lookup.held_chunks = now_s, held_chunks
        found = self._result(lookup.running, lookup.begun_at_s)
        if found is None:
            return None
        lookup.running, lookup.found, lookup.found_at_s, lookup.counted = None, found, now_s, False
        if found.error is not None:
            self._failed(found.error)
        else:
            self._backoff.reset()
        return found if lookup.held_chunks <= held_chunks else None  # None: the engine lost some while it was asked

    def _begin(self, pool: KvPool, chain: Chain, held_chunks: int, trace: TraceParent | None) -> Future[PrefixMatch]:
        self._begun += 1
        self._tally.lookups += 1
        timeout_s = self._settings.match_timeout_s
        try:
            return self._link.start(lambda: pool.match(chain, held_chunks=held_chunks, timeout_s=timeout_s), trace)
        except KvPoolError as error:
            refused: Future[PrefixMatch] = Future()
            refused.set_exception(error)
            return refused

    def _result(self, running: Future[PrefixMatch], begun_at_s: float) -> PrefixMatch | None:
        if not running.done() and self._wait_left_s > 0:
            waits_at_s = self._now_s()
            concurrent.futures.wait([running], self._wait_left_s)
            self._wait_left_s -= self._now_s() - waits_at_s
        if running.done():
            if running.cancelled():
                return PrefixMatch(0, 0, error=ServiceUnavailable("the lookup was cancelled"))
            error = running.exception()
            return running.result() if error is None else PrefixMatch(0, 0, error=_as_pool_error(error))
        if self._now_s() - begun_at_s < self._settings.match_timeout_s + _GRACE_S:
            return None
        running.cancel()
        return PrefixMatch(0, 0, error=DeadlineExceeded("a lookup was never answered"))

    def _failed(self, error: KvPoolError) -> None:
        self._tally.failed_lookups += 1
        self._silent_until_s = self._now_s() + self._backoff.next_s()
        if self._seldom.due("failed"):
            _log.warning("kvpool: nothing is looked up for a moment: %s%s", error, self._seldom.more("failed"))


def _as_pool_error(error: BaseException) -> KvPoolError:
    return error if isinstance(error, KvPoolError) else ServiceUnavailable(repr(error))
