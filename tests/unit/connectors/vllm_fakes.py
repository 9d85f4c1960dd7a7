"""Stand-ins for vLLM's requests and for the way to the pool."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from kvpool.client.engine_items import EngineMatchRun, EngineSource, MatchResult
from kvpool.client.hashing import Prompt
from kvpool.core.errors import KvPoolError
from kvpool.core.tracing import TraceParent

HASH_KEY = b"k" * 32


@dataclass
class FakeRequest:
    """What is read of vllm.v1.request.Request."""

    request_id: str = "r"
    all_token_ids: list[int] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    num_preemptions: int = 0
    cache_salt: str | None = None
    lora_request: Any = None
    mm_features: Sequence[Any] = ()
    prompt_embeds: Any = None
    resumable: bool = False
    skip_reading_prefix_cache: bool = False
    trace_headers: Mapping[str, str] | None = None
    kv_transfer_params: Mapping[str, Any] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


def a_request(token_count: int, request_id: str = "r", first_token: int = 0, **values: Any) -> FakeRequest:
    """Of so many prompt tokens."""
    tokens = list(range(first_token, first_token + token_count))
    return FakeRequest(request_id=request_id, all_token_ids=tokens, num_prompt_tokens=token_count, **values)


def image(identifier: str, offset: int, length: int) -> Any:
    """A multimodal feature."""
    return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=length))


@dataclass
class FakeLease:
    """What a pool gave for a lease."""

    chunks: range
    hold_only: bool = False
    ended: bool = False

    def end(self) -> None:
        self.ended = True


class FakePool:
    """A pool that has the first `chunk_count` chunks of everything."""

    def __init__(
        self,
        chunk_count: int = 0,
        *,
        estimated_ms: float = 0.0,
        error: KvPoolError | None = None,
        hash_key: bytes = HASH_KEY,
    ) -> None:
        self.chunk_count, self.estimated_ms, self.error = chunk_count, estimated_ms, error
        self.session = SimpleNamespace(hash_key=hash_key, link_bytes_per_s=0.0)
        self.asked: list[tuple[Prompt, int]] = []
        self.source = EngineSource.STAGING
        self.leases: list[FakeLease] = []
        self.lease_error: KvPoolError | None = None

    async def match(self, chain: Prompt, *, held_chunks: int = 0, timeout_s: float | None = None) -> MatchResult:
        self.asked.append((chain, held_chunks))
        if self.error is not None:
            return MatchResult(held_chunks, error=self.error)
        matched = max(held_chunks, min(self.chunk_count, chain.chunk_count))
        runs = (EngineMatchRun(matched - held_chunks, self.source, self.estimated_ms),)
        return MatchResult(matched, chain.usable_tokens(matched), runs if matched > held_chunks else ())

    async def lease(
        self, chain: Prompt, *, first_chunk: int, end_chunk: int, hold_s: float, hold_only: bool = False
    ) -> FakeLease | None:
        assert 0 <= first_chunk < end_chunk <= chain.chunk_count
        assert hold_s > 0
        if self.lease_error is not None:
            raise self.lease_error
        self.leases.append(FakeLease(range(first_chunk, end_chunk), hold_only))
        return self.leases[-1]


class FakeConnection:
    """Runs what is started at once, unless `held`: then when `go` is called."""

    def __init__(self, pool: Any, *others: Any) -> None:
        """others: the pool as further KV cache groups see it."""
        self.pool, self._others = pool, others
        self.held = False
        self.traces: list[TraceParent | None] = []  # of what was started
        self._waiting: list[tuple[Callable[[], Awaitable[Any]], Future[Any]]] = []

    @property
    def pools(self) -> tuple[Any, ...]:
        return (self.pool, *self._others) if self.pool is not None else ()

    def start(self, work: Callable[[], Awaitable[Any]], trace: TraceParent | None = None) -> Future[Any]:
        future: Future[Any] = Future()
        self.traces.append(trace)
        self._waiting.append((work, future))
        if not self.held:
            self.go()
        return future

    def fail_first(self, error: Exception) -> None:
        """End the first of what waits with an error, without running it."""
        (_, future), *self._waiting = self._waiting
        future.set_exception(error)

    def go(self) -> None:
        """Run what waits."""
        waiting, self._waiting = self._waiting, []
        for work, future in waiting:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(asyncio.run(_await(work)))
                except Exception as error:
                    future.set_exception(error)


async def _await(work: Callable[[], Awaitable[Any]]) -> Any:
    return await work()
