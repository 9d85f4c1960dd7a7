"""One load of the pool: windows that fit the agent's requests, one after the other, until one falls short."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvpool.client.engine_items import LoadResult, TierTokens
from kvpool.client.engine_requests import LoadRequest
from kvpool.client.gpuagent import EngineSession
from kvpool.client.handle import AsyncHandle
from kvpool.core.errors import DeadlineExceeded, KvPoolError, Stopped
from kvpool.core.ipc import EngineEvent
from kvpool.core.spans import ChunkRange


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTerms:
    """Of one load. grace_s: after its time, for the agent to say so. wait_event: GPU work that may still read or write
    the blocks. by_layer: progress is wanted. compute_us_per_token: see EngineSession.load."""

    timeout_s: float
    grace_s: float
    by_layer: bool = False
    wait_event: EngineEvent | None = None
    compute_us_per_token: float = 0.0


async def load_windows(
    session: Callable[[], EngineSession],
    windows: Sequence[ChunkRange],
    chunks: range,
    terms: LoadTerms,
    handle: AsyncHandle[LoadResult],
) -> LoadResult:
    """Load what can be loaded of chunks, which the windows are cut from. session: the one in use then."""
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    ends_at_s = started_s + terms.timeout_s
    loaded, copy_s, tokens = 0, 0.0, TierTokens()
    error: KvPoolError | None = None
    on_progress = handle.progressed if terms.by_layer and len(windows) == 1 else None
    for span in windows:
        part = await _load_span(session(), span, ends_at_s, on_progress, terms, handle)
        loaded += part.loaded_chunks
        tokens += part.tokens
        copy_s += part.copy_s
        error = part.error
        if part.loaded_chunks < span.chunk_count:
            break
    failed = tuple(chunks[loaded:])
    if chunks:
        layers = handle.layers_loaded if failed else session().spec.group.layers
        handle.progressed(layers, failed)
    return LoadResult(
        first_chunk=chunks.start,
        loaded_chunks=loaded,
        failed_chunks=failed,
        error=error if failed else None,
        tokens=tokens,
        copy_s=copy_s,
        duration_s=loop.time() - started_s,
    )


async def _load_span(
    session: EngineSession,
    span: ChunkRange,
    ends_at_s: float,
    on_progress: Callable[[int, tuple[int, ...]], None] | None,
    terms: LoadTerms,
    handle: AsyncHandle[LoadResult],
) -> LoadResult:
    loop = asyncio.get_running_loop()
    request: LoadRequest | None = None
    if handle.cancelled:
        return LoadResult(error=Stopped("the load is no longer needed"))
    try:
        wait_s = max(0.001, ends_at_s - loop.time())
        async with asyncio.timeout(wait_s):
            request = await session.load(
                span,
                wait_s=wait_s,
                on_progress=on_progress,
                after=terms.wait_event,
                compute_us_per_token=terms.compute_us_per_token,
            )
        handle.add(request)
        return await request.done(max(0.0, ends_at_s - loop.time()) + terms.grace_s)
    except TimeoutError:
        return LoadResult(error=DeadlineExceeded("the agent takes no more loads now"))
    except KvPoolError as error:
        if request is not None:
            request.cancel()
        return LoadResult(error=error)
    except asyncio.CancelledError:
        if request is not None:
            request.cancel()  # the blocks stay the agent's until it says so; the session keeps the request
        raise
