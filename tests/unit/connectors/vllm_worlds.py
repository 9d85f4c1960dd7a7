"""A scheduler's side of the vLLM connector over a scripted pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvpool.client.engine_items import LoadResult, TierTokens
from kvpool.connectors.vllm.kv_groups import KvCacheGroup
from kvpool.connectors.vllm.orders import LoadEnd, LoadOrder, StepOrders, StoreEnd, StoreOrder, prompt_of
from kvpool.connectors.vllm.scheduler import SchedulerSide
from kvpool.connectors.vllm.settings import VllmSettings
from kvpool.core.errors import DeadlineExceeded, PageMissing
from kvpool.testing import ManualClock
from tests.unit.connectors.vllm_fakes import FakeLink, FakePool, FakeRequest

CHUNK, BLOCK, CHUNK_BYTES = 32, 16, 1000
BLOCKS = list(range(100, 200))


def hashes_of(order: LoadOrder | StoreOrder) -> tuple[bytes, ...]:
    """Of its chunks."""
    return prompt_of(order, CHUNK).hashes


class World:
    """A scheduler's side over a scripted pool."""

    def __init__(self, pool: FakePool | None, *others: FakePool, **settings: Any) -> None:
        self.clock = ManualClock()
        self.link = FakeLink(pool, *others)
        wanted = {
            "agent": "unix:/x",
            "chunk_tokens": CHUNK,
            "min_load_tokens": 1,
            "lookup_wait_ms": 0.0,
            "store": "finish",
            **settings,
        }
        self.worker_count, self.shares_blocks = wanted.pop("workers", 1), wanted.pop("shares_blocks", True)
        tells_changes, volatile_tokens = wanted.pop("tells_changes", True), wanted.pop("volatile_tokens", 0)
        weights = wanted.pop("weights", None)
        groups = wanted.pop("groups", [KvCacheGroup(block_tokens=BLOCK, chunk_bytes=CHUNK_BYTES)])
        self.side = SchedulerSide(
            VllmSettings(**wanted),
            self.link,  # type: ignore[arg-type]
            groups,
            worker_count=self.worker_count,
            shares_blocks=self.shares_blocks,
            tells_changes=tells_changes,
            volatile_tokens=volatile_tokens,
            now_s=self.clock.monotonic_s,
            weights=weights,
        )

    def match(self, request: FakeRequest, held_tokens: int = 0) -> int | None:
        self.side.on_new_request(request)
        return self.side.matched_tokens(request, held_tokens)

    def load(self, request: FakeRequest, held_tokens: int = 0) -> StepOrders:
        tokens = self.match(request, held_tokens)
        assert tokens
        self.side.allocated(request, [BLOCKS], tokens)
        return self.build()

    def build(self, scheduled: dict[str, int] | None = None, preempted: Sequence[str] = ()) -> StepOrders:
        return self.side.build(scheduled or {}, preempted, lambda _: [BLOCKS])

    def ended(
        self,
        orders: StepOrders,
        loaded_chunks: int,
        *,
        late: bool = False,
        gone: bool = True,
        cancelled: bool = False,
        copy_s: float = 0.0,
        remote_chunks: int = 0,
    ) -> None:
        """The loads of a step bring so many chunks."""
        ends = [
            LoadEnd(
                request_id=order.request_id,
                result=LoadResult(
                    order.first_chunk,
                    loaded_chunks,
                    tuple(range(order.first_chunk + loaded_chunks, order.end_chunk)),
                    error=DeadlineExceeded("late") if late else PageMissing("gone") if gone else None,
                    tokens=TierTokens((loaded_chunks - remote_chunks) * CHUNK, 0, remote_chunks * CHUNK),
                    copy_s=copy_s,
                ),
                duration_s=0.01,
                size_bytes=loaded_chunks * CHUNK_BYTES,
                cancelled=cancelled,
            )
            for order in orders.loads
        ]
        self.side.on_worker_report(orders.step, ends)
        self.side.received([order.request_id for order in orders.loads])

    def stored(self, orders: StepOrders, failed_chunks: int = 0) -> None:
        """The stores of a step end on all workers."""
        for order in orders.stores * self.worker_count:
            end = StoreEnd(
                number=order.number,
                stored_chunks=order.end_chunk - order.first_chunk - failed_chunks,
                deduplicated_chunks=0,
                failed_chunks=failed_chunks,
                duration_s=0.01,
                size_bytes=1,
            )
            self.side.on_worker_report(orders.step, [end])
