"""One load of the pool: windows that fit the agent's requests, one after the other, until one falls short."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvpool.client.engine_items import LoadOutcome, TierTokens
from kvpool.client.engine_requests import LoadHandle
from kvpool.client.gpuagent import EngineSession
from kvpool.client.pool_values import BlockHold, LoadReport, OnProgress
from kvpool.core.cancel import CancelToken
from kvpool.core.errors import DeadlineExceeded, KvPoolError, Stopped
from kvpool.core.ipc import EngineEvent
from kvpool.core.spans import ChunkRange


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTerms:
    """Of one load. grace_s: after its time, for the agent to say so. explain: what callers are told of an error.
    compute_us_per_token: see EngineSession.load."""

    timeout_s: float
    grace_s: float
    on_progress: OnProgress | None
    after: EngineEvent | None
    stop: CancelToken
    explain: Callable[[KvPoolError], KvPoolError]
    compute_us_per_token: float = 0.0


async def load_windows(
    session: Callable[[], EngineSession], windows: Sequence[ChunkRange], chunks: range, terms: LoadTerms
) -> LoadReport:
    """Load what can be loaded of chunks, which the windows are cut from. session: the one in use then."""
    ends_at_s = asyncio.get_running_loop().time() + terms.timeout_s
    loaded, copy_s, tokens, handles = 0, 0.0, TierTokens(), list[LoadHandle]()
    error: KvPoolError | None = None
    for span in windows:
        shift = span.first_chunk_index

        def report(layers: int, failed: tuple[int, ...], shift: int = shift) -> None:
            if terms.on_progress is not None:
                terms.on_progress(layers, tuple(shift + position for position in failed))

        on_progress = report if terms.on_progress is not None and len(windows) == 1 else None
        outcome = await _load_span(session(), span, ends_at_s, on_progress, handles, terms)
        loaded += outcome.loaded_chunks
        tokens += outcome.tokens
        copy_s += outcome.copy_s
        error = outcome.error
        if outcome.loaded_chunks < span.chunk_count:
            break
    failed = tuple(chunks[loaded:])
    return LoadReport(chunks.start, loaded, failed, tokens, error if failed else None, BlockHold(handles), copy_s)


async def _load_span(
    session: EngineSession,
    span: ChunkRange,
    ends_at_s: float,
    on_progress: OnProgress | None,
    handles: list[LoadHandle],
    terms: LoadTerms,
) -> LoadOutcome:
    loop = asyncio.get_running_loop()
    handle: LoadHandle | None = None
    if terms.stop.cancelled:
        return LoadOutcome(0, error=Stopped("nobody needs the load any more"))
    try:
        wait_s = max(0.001, ends_at_s - loop.time())
        async with asyncio.timeout(wait_s):
            handle = await session.load(
                span,
                wait_s=wait_s,
                on_progress=on_progress,
                after=terms.after,
                compute_us_per_token=terms.compute_us_per_token,
            )
        handles.append(handle)
        terms.stop.on_cancel(handle.cancel)
        return await handle.done(max(0.0, ends_at_s - loop.time()) + terms.grace_s)
    except TimeoutError:
        return LoadOutcome(0, error=DeadlineExceeded("the agent takes no more loads now"))
    except KvPoolError as error:
        if handle is not None:
            handle.cancel()
        return LoadOutcome(0, error=terms.explain(error))
    except asyncio.CancelledError:
        if handle is not None:
            handle.cancel()  # the hold goes on; the session keeps it
        raise
