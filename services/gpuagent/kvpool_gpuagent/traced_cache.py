"""An engine's cache whose copies are spans of the request that asks for them."""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.core.page import PageFault
from kvpool.core.tracing import BYTES, PAGES, SERVED_PAGES, Span, Tracer
from kvpool_gpuagent.ports import EngineCache, PageCopy, StopFlag


def traced(cache: EngineCache, tracer: Tracer) -> EngineCache:
    """The cache, with spans around its copies; the very same where nothing is traced."""
    return TracedCache(cache, tracer) if tracer.recording else cache


class TracedCache:
    """See ports.EngineCache."""

    def __init__(self, cache: EngineCache, tracer: Tracer) -> None:
        self._cache, self._tracer = cache, tracer
        self.batch_bytes = cache.batch_bytes

    async def event_passed(self, slot: int) -> bool:
        """See ports.EngineCache. Asked again and again: no span."""
        return await self._cache.event_passed(slot)

    async def gather(self, copies: Sequence[PageCopy], stop: StopFlag) -> bool:
        """See ports.EngineCache. One span: devices seal a page in the same pass that copies it."""
        with self._tracer.part("gpuagent.gather_and_seal") as span:
            _describe(span, copies)
            complete = await self._cache.gather(copies, stop)
            if not complete:
                span.fail("STOPPED")
        return complete

    async def scatter(self, copies: Sequence[PageCopy]) -> Sequence[PageFault | None]:
        """See ports.EngineCache. Verifying is a part of it."""
        with self._tracer.part("gpuagent.verify_and_scatter") as span:
            _describe(span, copies)
            faults = await self._cache.scatter(copies)
            if span.recording:
                span.set({SERVED_PAGES: sum(fault is None for fault in faults)})
                if any(fault is not None for fault in faults):
                    span.fail("PAGE_CORRUPT")
        return faults

    async def close(self) -> None:
        """See ports.EngineCache."""
        await self._cache.close()


def _describe(span: Span, copies: Sequence[PageCopy]) -> None:
    if span.recording:
        span.set({PAGES: len(copies), BYTES: sum(len(copy.page) for copy in copies)})
