"""A scheduler's side of the vLLM connector over a scripted pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvpool.client.engine_items import LoadResult, TierTokens
from kvpool.connectors.vllm.kv_groups import KvCache, KvCacheGroup
from kvpool.connectors.vllm.scheduler import ConnectorScheduler
from kvpool.connectors.vllm.settings import VllmSettings
from kvpool.connectors.vllm.step_jobs import LoadJob, LoadReport, StepJobs, StoreJob, StoreReport, prompt_of_job
from kvpool.core.errors import DeadlineExceeded, PageMissing
from kvpool.testing import ManualClock
from tests.unit.connectors.vllm_fakes import FakeConnection, FakePool, FakeRequest
from tests.unit.connectors.vllm_jobs import BLOCK, CHUNK, CHUNK_BYTES

BLOCKS = list(range(100, 200))


def hashes_of(job: LoadJob | StoreJob) -> tuple[bytes, ...]:
    """Of its chunks."""
    return prompt_of_job(job, CHUNK).hashes


class World:
    """A scheduler's side over a scripted pool."""

    def __init__(
        self, pool: FakePool | None, *others: FakePool, connection: FakeConnection | None = None, **settings: Any
    ) -> None:
        """connection: in place of one to these pools that runs everything at once."""
        self.clock = ManualClock()
        self.connection = connection if connection is not None else FakeConnection(pool, *others)
        wanted = {
            "agent": "unix:/x",
            "chunk_tokens": CHUNK,
            "min_load_tokens": 1,
            "lookup_wait_ms": 0.0,
            "store": "finish",
            **settings,
        }
        self.worker_count, self.prefix_caching = wanted.pop("workers", 1), wanted.pop("prefix_caching", True)
        publishes_events, volatile_tokens = wanted.pop("publishes_events", True), wanted.pop("volatile_tokens", 0)
        weights = wanted.pop("weights", None)
        groups = wanted.pop("groups", [KvCacheGroup(block_tokens=BLOCK, chunk_bytes=CHUNK_BYTES)])
        self.side = ConnectorScheduler(
            VllmSettings(**wanted),
            self.connection,  # type: ignore[arg-type]
            KvCache(groups=groups, prefix_caching=self.prefix_caching, volatile_tokens=volatile_tokens),
            worker_count=self.worker_count,
            publishes_events=publishes_events,
            weights=weights,
            clock=self.clock,
        )

    def match(self, request: FakeRequest, held_tokens: int = 0) -> int | None:
        self.side.on_new_request(request)
        return self.side.get_num_new_matched_tokens(request, held_tokens)

    def load(self, request: FakeRequest, held_tokens: int = 0) -> StepJobs:
        tokens = self.match(request, held_tokens)
        assert tokens
        self.side.allocated(request, [BLOCKS], tokens)
        return self.build()

    def build(self, scheduled: dict[str, int] | None = None, preempted: Sequence[str] = ()) -> StepJobs:
        return self.side.build_jobs(scheduled or {}, preempted, lambda _: [BLOCKS])

    def ended(
        self,
        jobs: StepJobs,
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
            LoadReport(
                request_id=job.request_id,
                result=LoadResult(
                    job.first_chunk,
                    loaded_chunks,
                    tuple(range(job.first_chunk + loaded_chunks, job.end_chunk)),
                    error=DeadlineExceeded("late") if late else PageMissing("gone") if gone else None,
                    tokens=TierTokens((loaded_chunks - remote_chunks) * CHUNK, 0, remote_chunks * CHUNK),
                    copy_s=copy_s,
                ),
                duration_s=0.01,
                size_bytes=loaded_chunks * CHUNK_BYTES,
                cancelled=cancelled,
            )
            for job in jobs.loads
        ]
        self.side.on_worker_report(jobs.step, ends)
        self.side.finished_recving([job.request_id for job in jobs.loads])

    def stored(self, jobs: StepJobs, failed_chunks: int = 0) -> None:
        """The stores of a step end on all workers."""
        for job in jobs.stores * self.worker_count:
            end = StoreReport(
                number=job.number,
                stored_chunks=job.end_chunk - job.first_chunk - failed_chunks,
                deduplicated_chunks=0,
                failed_chunks=failed_chunks,
                duration_s=0.01,
                size_bytes=1,
            )
            self.side.on_worker_report(jobs.step, [end])
