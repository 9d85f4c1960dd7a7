"""An engine's cache whose copies are spans of the request that asks for them."""

from __future__ import annotations

from kvpool.core.cancel import CancelToken
from kvpool.core.tracing import PAGES, SERVED_PAGES, Span, Tracer
from kvpool_gpuagent.core.pages import CopyBatch
from kvpool_gpuagent.ports import EngineCache


def traced(cache: EngineCache, tracer: Tracer) -> EngineCache:
    """The cache, with spans around its copies; the very same where nothing is traced."""
    return TracedCache(cache, tracer) if tracer.recording else cache


class TracedCache:
    """See ports.EngineCache."""

    def __init__(self, cache: EngineCache, tracer: Tracer) -> None:
        self._cache, self._tracer = cache, tracer

    async def event_passed(self, slot: int) -> bool:
        """See ports.EngineCache. Asked again and again: no span."""
        return await self._cache.event_passed(slot)

    async def gather(self, batch: CopyBatch, stop: CancelToken) -> bool:
        """See ports.EngineCache."""
        with self._tracer.part("gpuagent.gather") as span:
            _describe(span, batch)
            complete = await self._cache.gather(batch, stop)
            if not complete:
                span.fail("STOPPED")
        return complete

    async def scatter(self, batch: CopyBatch) -> None:
        """See ports.EngineCache."""
        with self._tracer.part("gpuagent.scatter") as span:
            _describe(span, batch)
            await self._cache.scatter(batch)
            if span.recording:
                span.set({SERVED_PAGES: batch.count})

    async def close(self) -> None:
        """See ports.EngineCache."""
        await self._cache.close()


def _describe(span: Span, batch: CopyBatch) -> None:
    if span.recording:
        span.set({PAGES: batch.count})
