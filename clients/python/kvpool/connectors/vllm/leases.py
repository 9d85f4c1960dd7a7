"""Leases on the chunks that waiting requests will load: they are brought into host memory and kept there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from kvpool.client.engine_requests import LeaseHandle
from kvpool.connectors.vllm.agent_connection import AgentConnection
from kvpool.connectors.vllm.kv_groups import KvCacheGroup, page_chain
from kvpool.connectors.vllm.load_plans import LoadPlan
from kvpool.core.errors import KvPoolError

_log = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what is said under its own name
HOLD_S = 30.0  # an agent may end it earlier
RETRY_S = 1.0  # after one that ended early: refused, say
LEASES_MAX = 16  # more are refused by an agent's default


@dataclass(slots=True)
class _Lease:
    handles: list[Future[LeaseHandle | None]]  # of the KV cache groups
    size_bytes: int
    begun_at_s: float

    @property
    def ended(self) -> bool:
        """Whether it is known to keep nothing."""
        return all(_has_ended(handle) for handle in self.handles)


class Leases:
    """Leases of the requests that wait in one scheduler.

    A request that is allocated blocks in the step that plans its load, as on an engine that is not busy, needs no lease
    and costs no message.
    """

    def __init__(
        self, connection: AgentConnection, groups: Sequence[KvCacheGroup], *, bytes_max: int, now_s: Callable[[], float]
    ) -> None:
        """bytes_max: limit for all leases together."""
        self._connection, self._groups, self._now_s, self._bytes_max = connection, groups, now_s, bytes_max
        self._wanted: dict[str, LoadPlan] = {}  # of requests that were planned in this step
        self._leases: dict[str, _Lease] = {}  # by request

    def want(self, request_id: str, plan: LoadPlan) -> None:
        """The request will load this plan once it has blocks. Chunks in other GPUs' caches cannot be leased."""
        if not plan.from_gpu:
            self._wanted[request_id] = plan

    def allocated(self, request_id: str) -> None:
        """The request's load starts: its lease stays until the load has ended."""
        self._wanted.pop(request_id, None)

    def end(self, request_id: str) -> None:
        """End the request's lease: it loads nothing, or its load has ended."""
        self._wanted.pop(request_id, None)
        lease = self._leases.pop(request_id, None)
        if lease is not None:
            self._end(lease)

    def end_all(self) -> None:
        """End all leases and drop all plans."""
        for request_id in [*self._wanted, *self._leases]:
            self.end(request_id)

    def new_step(self) -> None:
        """Start leases for requests that were planned in the last step but got no blocks, and end expired ones.

        As many leading chunks are leased as `bytes_max` allows.
        """
        wanted, self._wanted = self._wanted, {}
        now_s = self._now_s()
        for request_id, lease in list(self._leases.items()):
            age_s = now_s - lease.begun_at_s
            if age_s >= HOLD_S or (lease.ended and age_s >= RETRY_S):
                self.end(request_id)
        for request_id, plan in wanted.items():
            if request_id not in self._leases and len(self._leases) < LEASES_MAX:
                self._begin(request_id, plan, now_s)

    def _begin(self, request_id: str, plan: LoadPlan, now_s: float) -> None:
        left_bytes = self._bytes_max - sum(lease.size_bytes for lease in self._leases.values() if not lease.ended)
        handles: list[Future[LeaseHandle | None]] = []
        size_bytes, end_tokens = 0, plan.first_token + plan.token_count
        for pool, group, chain in zip(self._connection.pools, self._groups, plan.chains, strict=False):
            needed_from = group.first_chunk(end_tokens, chain.chunk_tokens)
            first_chunk = max(plan.first_token // chain.chunk_tokens, needed_from)
            count = min(plan.end_chunk - first_chunk, (left_bytes - size_bytes) // max(1, group.chunk_bytes))
            if count <= 0:
                continue
            lease = partial(
                pool.lease,
                page_chain(chain, group.pages),
                first_chunk=first_chunk * group.pages,
                end_chunk=(first_chunk + count) * group.pages,
                hold_s=HOLD_S,
                hold_only=plan.staged,
            )
            try:
                handles.append(self._connection.start(lease, plan.trace))
            except KvPoolError:
                return  # the connection was closed
            size_bytes += count * group.chunk_bytes
        if handles:
            self._leases[request_id] = _Lease(handles, size_bytes, now_s)

    def _end(self, lease: _Lease) -> None:
        if lease.ended:
            return

        async def end() -> None:
            for handle in await asyncio.gather(*map(asyncio.wrap_future, lease.handles), return_exceptions=True):
                if handle is not None and not isinstance(handle, BaseException):
                    handle.end()

        try:
            self._connection.start(end)
        except KvPoolError:
            _log.debug("kvpool: a lease ends with its session")


def _has_ended(handle: Future[LeaseHandle | None]) -> bool:
    if not handle.done():
        return False
    lease = None if handle.cancelled() or handle.exception() else handle.result()
    return lease is None or lease.ended
