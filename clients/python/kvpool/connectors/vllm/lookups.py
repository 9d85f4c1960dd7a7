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
from kvpool.connectors.vllm.settings import VllmSettings
from kvpool.connectors.vllm.tally import Tally
from kvpool.core.errors import KvPoolError

_log = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what is said under its own name
_GOOD_FOR_S = 1.0  # a request that gets no blocks at once need not be matched in every step


@dataclass(slots=True)
class Lookup:
    """Of one request."""

    running: Future[PrefixMatch] | None = None
    found: PrefixMatch | None = None
    found_at_s: float = 0.0
    counted: bool = False  # what was made of the answer
    held_chunks: int = 0  # that it was asked with: `found.runs` begin after them

    def cancel(self) -> None:
        """Nobody asks for it any more."""
        if self.running is not None:
            self.running.cancel()


class Lookups:
    """Of a scheduler. After a failure nothing is asked for a while: the engine computes."""

    def __init__(self, settings: VllmSettings, link: PoolLink, tally: Tally, now_s: Callable[[], float]) -> None:
        self._settings, self._link, self._tally, self._now_s = settings, link, tally, now_s
        self._backoff = Backoff(0.1, 5.0)
        self._silent_until_s = 0.0

    @property
    def pool(self) -> KvPool | None:
        """The pool if it may be asked now."""
        return None if self._now_s() < self._silent_until_s else self._link.pool

    def answer(self, lookup: Lookup, pool: KvPool, chain: Chain, held_chunks: int) -> PrefixMatch | None:
        """What the pool has of a chain; None while that is not known. Waits for a moment at most."""
        now_s = self._now_s()
        fresh = now_s - lookup.found_at_s < _GOOD_FOR_S and lookup.held_chunks <= held_chunks
        if lookup.found is not None and lookup.running is None and fresh:
            return lookup.found
        try:
            if lookup.running is None:
                timeout_s = self._settings.match_timeout_s
                lookup.running = self._link.start(
                    lambda: pool.match(chain, held_chunks=held_chunks, timeout_s=timeout_s)
                )
                lookup.held_chunks = held_chunks
                self._tally.lookups += 1
            wait_s = 0.0 if lookup.running.done() else self._settings.lookup_wait_ms / 1e3
            lookup.found = lookup.running.result(wait_s)
        except concurrent.futures.TimeoutError:
            return None
        except (KvPoolError, concurrent.futures.CancelledError) as error:
            _log.info("kvpool: a match failed: %s", error)
            lookup.found = PrefixMatch(held_chunks, 0)
        lookup.running, lookup.found_at_s, lookup.counted = None, now_s, False
        if lookup.held_chunks > held_chunks:  # the engine lost some while it was asked
            return None
        if lookup.found.error is not None:
            self._tally.failed_lookups += 1
            self._silent_until_s = now_s + self._backoff.next_s()
            _log.warning("kvpool: nothing is looked up for a moment: %s", lookup.found.error)
        else:
            self._backoff.reset()
        return lookup.found
