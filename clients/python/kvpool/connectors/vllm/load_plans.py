"""Decides what to load for each request, and tracks loads until they have ended."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kvpool.client.engine_items import EngineSource, MatchResult, TierTokens
from kvpool.client.hashing import Prompt
from kvpool.client.retry import Backoff
from kvpool.connectors.vllm.connector_counters import ConnectorCounters
from kvpool.connectors.vllm.kv_groups import NULL_BLOCK_ID, KvCacheGroup, first_held_token, page_blocks, page_chain
from kvpool.connectors.vllm.log_rate_limiter import LogRateLimiter
from kvpool.connectors.vllm.lookups import Lookup
from kvpool.connectors.vllm.settings import LOAD_QUICKER, VllmSettings
from kvpool.connectors.vllm.step_jobs import LoadJob, LoadReport, block_id_array
from kvpool.core.errors import InvalidRequest
from kvpool.core.load_cost import LoadCost, LoadRun, Trials, leading
from kvpool.core.tracing import TraceParent

_log = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what is said under its own name
_LATE_S = 1.0  # after its deadline a load is not waited for by others
# After a load that was late nothing is loaded for a moment, a longer one the more have been late since one was not.
_PAUSE_S, _PAUSE_MAX_S = 0.5, 4.0
_LOCAL = (EngineSource.STAGING, EngineSource.GPU)
_ONE_SOURCE = 0.9  # of a load's tokens: then it says how fast the source is


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What will be loaded if the engine finds blocks for it.

    queued_bytes: of loads before it. load_ms: expected duration; None if unknown.
    """

    chains: tuple[Prompt, ...]  # of each KV cache group
    first_token: int
    end_chunk: int
    token_count: int
    load_ms: float | None
    queued_bytes: int
    trace: TraceParent | None = None
    staged: bool = False  # the match found all of it in the memory of this host
    must_wait: bool = False  # as many bytes as may be are in flight: it is to be planned again in a later step
    sources: tuple[tuple[EngineSource, int], ...] = ()  # tokens from each, from first_token on

    @property
    def from_gpu(self) -> bool:
        """Whether part of it lies in GPU caches of other engines."""
        return any(source == EngineSource.GPU for source, _ in self.sources)


@dataclass(slots=True)
class _Running:
    first_hash: bytes
    end_chunk: int
    plan: LoadPlan
    size_bytes: int
    begun_at_s: float
    until_s: float  # others wait for it no longer
    worker_s: float = 0.0  # as the slowest worker measured it
    copy_s: float = 0.0  # the same of copying alone
    tokens: TierTokens = field(default_factory=TierTokens)  # of all workers
    failed: bool = False
    late: bool = False


class LoadPlans:
    """Load plans of one scheduler."""

    def __init__(
        self,
        settings: VllmSettings,
        counters: ConnectorCounters,
        groups: Sequence[KvCacheGroup],
        *,
        now_s: Callable[[], float],
    ) -> None:
        self._settings, self._counters, self._now_s = settings, counters, now_s
        self._groups = groups
        self.cost = LoadCost()
        self._log_rate = LogRateLimiter(now_s)
        self._pauses = Backoff(_PAUSE_S, _PAUSE_MAX_S)
        self._paused_until_s = 0.0
        self._running: dict[str, _Running] = {}  # by request
        self._queued_bytes = 0
        self._short = Trials(now_s())  # look-ups of prompts too short to pay
        self._blocked = False  # in this step: none overtakes it, or a large load would never begin
        self._first_chunks: dict[bytes, tuple[str, float]] = {}  # of running loads: which request's, and until when

    def new_step(self) -> None:
        """The engine asks about its waiting requests again, in order."""
        self._blocked = False

    def is_loading(self, chunk_hash: bytes) -> bool:
        """Whether a running load begins with this chunk and is not overdue."""
        _, until_s = self._first_chunks.get(chunk_hash, ("", 0.0))
        return self._now_s() < until_s

    def admit_lookup(self, lookup: Lookup, token_count: int) -> bool:
        """Decide whether a request that could load so many tokens waits for the pool's answer.

        It does if a load of so many could pay, and of the others now and then one: what loads take may have changed.
        """
        if self._settings.load != LOAD_QUICKER or self.cost.can_pay(token_count):
            return True
        if lookup.admitted is None:
            now_s = self._now_s()
            lookup.admitted = self._short.is_due(now_s)
            if lookup.admitted:
                self._short.restart(now_s)
        return lookup.admitted

    def plan(
        self,
        chains: tuple[Prompt, ...],
        lookup: Lookup,
        found: MatchResult,
        held_tokens: int,
        link_bytes_per_s: float = 0.0,
    ) -> LoadPlan | None:
        """Return the part of the matched chunks that is worth loading; None if there is none.

        held_tokens: tokens that the engine has. link_bytes_per_s: of the agent's device; 0 if unknown.
        """
        chain = chains[0]
        runs = self._runs(chain, lookup.held_chunks, found, held_tokens)
        self.cost.link_bytes_per_s, self.cost.local_sources = link_bytes_per_s, _LOCAL
        offered_chunks = chunks = sum(run.chunk_count for run in runs)
        if self._settings.load == LOAD_QUICKER and not lookup.tried:
            paused = self._now_s() < self._paused_until_s
            chunks = 0 if paused else self.cost.chunks_to_load(runs, self._queued_bytes)
            if offered_chunks and not chunks and not paused and not lookup.counted:
                lookup.tried = self.cost.tries_declined(self._now_s())
                chunks = offered_chunks if lookup.tried else 0
        chosen = leading(runs, chunks)
        size_bytes = sum(run.size_bytes for run in chosen)
        # One that is larger than all that may be in flight is loaded alone.
        full = self._queued_bytes and (
            self._blocked or self._queued_bytes + size_bytes > self._settings.load_bytes_in_flight_max
        )
        if chunks and full and all(running.until_s <= self._now_s() for running in self._running.values()):
            chunks, chosen = 0, []  # as the loads that it would wait for may never end
        self._blocked |= bool(chunks and full)
        if not lookup.counted and not (chunks and full):  # a request that gets no blocks asks again and again
            lookup.counted = True
            self._counters.decided(offered_chunks, chunks)
            if offered_chunks and not chunks and self._log_rate.due("declined"):
                _log.info(
                    "kvpool: %d chunks are computed: that is expected to take %.1f ms, loading them %.1f ms%s",
                    *(offered_chunks, self.cost.compute_ms(sum(run.token_count for run in runs)) or 0.0),
                    *(self.cost.load_ms(runs, self._queued_bytes) or 0.0, self._log_rate.suppressed("declined")),
                )
        end_chunk = held_tokens // self._settings.chunk_tokens + chunks
        token_count = chain.usable_tokens(end_chunk) - held_tokens
        if not chunks or token_count < max(1, self._settings.min_load_tokens):
            return None
        return LoadPlan(
            chains,
            held_tokens,
            end_chunk,
            token_count,
            self.cost.load_ms(chosen, self._queued_bytes),
            self._queued_bytes,
            lookup.trace,
            staged=all(run.source == EngineSource.STAGING for run in chosen),
            must_wait=bool(full),
            sources=tuple((run.source, run.token_count) for run in chosen if isinstance(run.source, EngineSource)),
        )

    def begin(
        self, request_id: str, plan: LoadPlan, block_ids: Sequence[Sequence[int]], token_count: int
    ) -> list[LoadJob]:
        """Start a plan for which the engine has blocks, and return its jobs, of each group that needs one.

        block_ids: for each of vLLM's groups, all blocks of the request from token 0 on. raises: InvalidRequest if none
        can be loaded.
        """
        chunk_tokens = self._settings.chunk_tokens
        end_token = plan.first_token + token_count
        end_chunk = min(plan.end_chunk, plan.chains[0].chunks_of(end_token))
        compute_ms = self.cost.compute_ms(token_count)
        jobs: list[LoadJob] = []
        size_bytes = 0
        for number, (group, chain) in enumerate(zip(self._groups, plan.chains, strict=True)):
            first_token, blocks = plan.first_token, group.blocks_of(block_ids)
            if group.recurrent:
                first_token = max(self._state_token(end_token, end_chunk, one) for one in blocks)
            elif group.window_tokens:  # tokens that have left the window have no blocks
                first_token = max(first_held_token(one, first_token, group.block_tokens) for one in blocks)
            if first_token >= end_token:
                continue
            first_chunk, skipped_tokens = divmod(first_token, chunk_tokens)
            size_bytes += (end_chunk - first_chunk) * group.chunk_bytes
            job = LoadJob(
                request_id=request_id,
                group=number,
                hashes=page_chain(chain, group.pages).packed_hashes(0, end_chunk * group.pages),
                token_count=chain.token_count,
                block_ids=page_blocks(blocks, end_chunk, chunk_tokens // group.block_tokens),
                first_chunk=first_chunk,
                end_chunk=end_chunk,
                first_token=first_token,
                end_token=end_token,
                timeout_s=self._timeout_s(plan, compute_ms),
                compute_us_per_token=(compute_ms or 0.0) * 1e3 / token_count,
                from_gpu=plan.from_gpu,
                trace=plan.trace,
            )
            jobs += _jobs_of_pages(job, group.pages, skipped_tokens, chunk_tokens) if group.pages > 1 else [job]
        if not jobs:
            raise InvalidRequest("a load was begun of which no token has a block")
        earlier = self._running.get(request_id)  # of an aborted request of the same name
        if earlier is not None:
            self._queued_bytes -= earlier.size_bytes
        first_hash = plan.chains[0].hashes[plan.first_token // chunk_tokens]
        until_s = self._now_s() + self._timeout_s(plan, compute_ms) + _LATE_S
        self._running[request_id] = _Running(first_hash, end_chunk, plan, size_bytes, self._now_s(), until_s)
        self._queued_bytes += size_bytes
        self.cost.load_begun()
        self._first_chunks[first_hash] = (request_id, until_s)
        return jobs

    def _state_token(self, end_token: int, end_chunk: int, blocks: Sequence[int]) -> int:
        """Return the first token of the chunk whose recurrent state a request resumes from.

        raises: InvalidRequest if that state has no block, or if end_token is not a chunk boundary.
        """
        if end_token != end_chunk * self._settings.chunk_tokens or len(blocks) < end_chunk:
            raise InvalidRequest(f"a load of recurrent state ends at token {end_token}, which is no boundary")
        if blocks[end_chunk - 1] == NULL_BLOCK_ID:
            raise InvalidRequest(f"the engine has no block for the recurrent state after token {end_token}")
        return end_token - self._settings.chunk_tokens

    def failed_load_job(self, request_id: str, block_ids: Sequence[Sequence[int]]) -> LoadJob:
        """Return a load that fails at once, for an engine that waits for one that could not be planned."""
        return LoadJob(
            request_id=request_id,
            hashes=b"",
            token_count=0,
            block_ids=block_id_array(block_ids[0]),
            first_chunk=0,
            end_chunk=0,
            first_token=0,
            end_token=len(block_ids[0]) * self._groups[0].block_tokens,
            timeout_s=0.0,
        )

    def expected_sources(self, request_id: str, token_count: int) -> dict[EngineSource, int]:
        """Return from which sources the first token_count tokens of a load are expected, according to its match."""
        running, counts = self._running.get(request_id), dict[EngineSource, int]()
        for source, tokens in running.plan.sources if running is not None else ():
            count = min(tokens, token_count)
            token_count -= count
            if count > 0:
                counts[source] = counts.get(source, 0) + count
        return counts

    def on_report(self, report: LoadReport) -> tuple[bytes, ...]:
        """Process one worker's report of one job. Returns the hashes of chunks that could not be loaded."""
        running = self._running.get(report.request_id)
        if running is None:
            return ()
        running.worker_s = max(running.worker_s, report.duration_s)
        running.copy_s = max(running.copy_s, report.result.copy_s)
        running.tokens += report.result.tokens
        running.failed |= bool(report.failed_chunks)
        running.late |= report.timed_out
        hashes = running.plan.chains[report.group].hashes
        pages = self._groups[report.group].pages
        return hashes[report.result.end_chunk // pages : running.end_chunk] if report.failed_chunks else ()

    def finished_recving(self, request_id: str) -> None:
        """All workers have ended the request's loads of all groups."""
        running = self._running.pop(request_id, None)
        if running is None:
            return
        self._queued_bytes -= running.size_bytes
        if self._first_chunks.get(running.first_hash, ("", 0.0))[0] == request_id:
            del self._first_chunks[running.first_hash]
        if running.late:
            if self._now_s() >= self._paused_until_s:  # of loads that are late together the first one counts
                self._paused_until_s = self._now_s() + self._pauses.next_s()
        elif not running.failed:
            self._pauses.reset()
            # A step that waits for the layers of its loads ends with its own work: that is no part of the load.
            duration_s = running.worker_s if self._settings.layerwise else self._now_s() - running.begun_at_s
            source = _source_of(running.tokens)
            if source is not None:
                self.cost.note_load(
                    source,
                    running.size_bytes,
                    duration_s,
                    copy_s=running.copy_s,
                    queued_bytes=running.plan.queued_bytes,
                )

    def _timeout_s(self, plan: LoadPlan, compute_ms: float | None) -> float:
        timeout_s = self.cost.timeout_s(plan.load_ms, compute_ms, self._settings.load_timeout_s)
        return max(timeout_s, self._settings.load_timeout_min_s)

    def _runs(self, chain: Prompt, asked_chunks: int, found: MatchResult, held_tokens: int) -> list[LoadRun]:
        """Return the matched runs that the engine lacks, without chunks that have left a window at their end."""
        chunk_tokens = self._settings.chunk_tokens
        end_tokens = chain.usable_tokens(found.matched_chunks)
        needed = [(group.first_chunk(end_tokens, chunk_tokens), group.chunk_bytes) for group in self._groups]
        runs, at = [], asked_chunks
        for run in found.runs:
            first, at = max(at, held_tokens // chunk_tokens), at + run.chunk_count
            count = at - first
            if count > 0:  # the engine may hold more by now than when it asked
                tokens = chain.usable_tokens(at) - max(first * chunk_tokens, held_tokens)
                size_bytes = sum(max(0, at - max(first, needed_from)) * each for needed_from, each in needed)
                runs.append(LoadRun(count, tokens, size_bytes, run.source))
        return runs


def _jobs_of_pages(job: LoadJob, pages: int, skipped_tokens: int, chunk_tokens: int) -> list[LoadJob]:
    """Return the jobs that load the pages of a job's chunks. A job leaves out the first tokens of its first page alone:
    where a chunk's are left out, each of its pages is a job of its own."""
    first, end = job.first_chunk * pages, job.end_chunk * pages
    alone = pages if skipped_tokens else 0
    starts = [*range(first, first + alone), first + alone, end]
    return [
        replace(
            job,
            first_chunk=start,
            end_chunk=stop,
            first_token=start * chunk_tokens + (skipped_tokens if start < first + alone else 0),
            end_token=stop * chunk_tokens,
        )
        for start, stop in itertools.pairwise(starts)
        if start < stop
    ]


def _source_of(tokens: TierTokens) -> EngineSource | None:
    """Return the source of a load if nearly all of it came from one; else None."""
    by_source = {
        EngineSource.STAGING: tokens.staging,
        EngineSource.DISK: tokens.disk,
        EngineSource.REMOTE: tokens.remote,
        EngineSource.GPU: tokens.gpu,
    }
    source, most = max(by_source.items(), key=lambda item: item[1])
    return source if most and most >= _ONE_SOURCE * tokens.total else None
