"""Decides which chunks in the engine's GPU cache to announce to other engines of the host, and when."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvpool.client.hashing import Prompt
from kvpool.connectors.vllm.request_chain import Request, final_tokens, scheduled_among
from kvpool.connectors.vllm.step_jobs import AnnounceJob, block_id_array

ChainAndBlocks = tuple[Prompt, Sequence[int]]
ChainLookup = Callable[[str, int], ChainAndBlocks | None]
"""Gets a request and the end of the chunks that are asked for. Returns its chain, of at least those that there are, and
its blocks from token 0 on; None if it is not shared."""


@dataclass(slots=True)
class _Announced:
    """State of one request."""

    request: Request
    chunks: int = 0  # leading ones that were announced, or found in the engine's own cache
    ended_tokens: int = 0  # leading ones whose steps had ended when the last step was built
    settled_tokens: int = 0  # the same before the last of those steps ended


class Announcements:
    """Announcements of one scheduler, for an engine with one KV cache group.

    A chunk is announced once its blocks hold their final bytes: with the first step after vLLM has processed the output
    of the step that computed it, or after its load has ended. The worker repeats to a new agent what still holds.

    With a drafter whose last 5 tokens are volatile and chunks of 16: a step computes tokens 0 to 39, the next one 40 to
    79. When the second is built the first has ended (`ended_tokens` 40), yet its drafter may still write. When the
    third is built the second has ended (80), so the first is over, drafter and all (`settled_tokens` 40): (40 - 5) //
    16 = 2 chunks are announced.
    """

    def __init__(self, *, chunk_tokens: int, block_tokens: int, volatile_tokens: int) -> None:
        """volatile_tokens: see ConnectorScheduler."""
        self._chunk_tokens, self._blocks_per_chunk = chunk_tokens, chunk_tokens // block_tokens
        self._volatile_tokens = volatile_tokens
        self._requests: dict[str, _Announced] = {}
        self._unannounced: set[str] = set()  # requests with chunks of the prompt that are not announced yet
        self._new_from: dict[str, int] = {}  # first token without KV, of requests that this step admits
        self._jobs: list[AnnounceJob] = []  # of finished requests

    def add(self, request: Request) -> None:
        """A request has arrived."""
        self._requests[request.request_id] = _Announced(request)
        self._unannounced.add(request.request_id)

    def found(self, request_id: str, held_tokens: int) -> None:
        """vLLM has found these tokens in its own cache: their chunks were announced when they were computed, unless
        their request was aborted in that step."""
        announced = self._requests.get(request_id)
        if announced is not None:
            announced.chunks = held_tokens // self._chunk_tokens

    def admitted(self, request_id: str, first_token: int) -> None:
        """The blocks from first_token on are written in this step or later, even if vLLM counts them as computed: it
        does so for tokens that the step itself loads, layerwise or by another connector."""
        self._new_from[request_id] = first_token

    def preempted(self, request_id: str) -> None:
        """The request loses its blocks."""
        announced = self._requests.get(request_id)
        if announced is not None:
            announced.ended_tokens = announced.settled_tokens = 0
            self._unannounced.add(request_id)

    def finished(self, request_id: str, lookup: ChainLookup) -> None:
        """Announce what is left of a finished request with the next step."""
        announced = self._requests.get(request_id)
        if announced is not None:
            self._note_ended_step(announced)
            self._announce(self._jobs, announced, self._settled_tokens(announced), lookup)
        self.forget(request_id)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._requests.pop(request_id, None)
        self._unannounced.discard(request_id)

    def take(self, scheduled: Iterable[str], lookup: ChainLookup) -> list[AnnounceJob]:
        """Return the announcements of a step that schedules these requests."""
        jobs, self._jobs = self._jobs, []
        if self._volatile_tokens:
            for announced in filter(None, map(self._requests.get, scheduled)):
                self._note_ended_step(announced)
        for request_id in scheduled_among(scheduled, self._unannounced):
            announced = self._requests[request_id]
            prompt_tokens = announced.request.num_prompt_tokens
            end_tokens = min(self._settled_tokens(announced), self._new_from.get(request_id, prompt_tokens))
            self._announce(jobs, announced, min(end_tokens, prompt_tokens), lookup)
            if announced.chunks >= self._end_chunk(prompt_tokens):
                self._unannounced.discard(request_id)
        self._new_from.clear()
        return jobs

    def _announce(self, jobs: list[AnnounceJob], announced: _Announced, end_tokens: int, lookup: ChainLookup) -> None:
        first_chunk, end_chunk = announced.chunks, self._end_chunk(end_tokens)
        known = lookup(announced.request.request_id, end_chunk) if end_chunk > first_chunk else None
        if known is None:
            return
        chain, block_ids = known
        end_chunk, width = min(end_chunk, chain.chunk_count), self._blocks_per_chunk
        jobs.append(
            AnnounceJob(
                hashes=chain.packed_hashes(first_chunk, end_chunk),
                block_ids=block_id_array(block_ids[first_chunk * width : end_chunk * width]),
            )
        )
        announced.chunks = end_chunk

    def _settled_tokens(self, announced: _Announced) -> int:
        """Return how many leading tokens have all their KV in the cache.

        vLLM processes a step's output as soon as its tokens are sampled, while its drafter may still be writing KV.
        That is over when the request's next step has ended, which runs after it.
        """
        ended = final_tokens(announced.request)
        return min(ended, announced.settled_tokens) if self._volatile_tokens else ended

    def _note_ended_step(self, announced: _Announced) -> None:
        ended = final_tokens(announced.request)
        if ended != announced.ended_tokens:
            announced.settled_tokens, announced.ended_tokens = announced.ended_tokens, ended

    def _end_chunk(self, end_tokens: int) -> int:
        return (end_tokens - self._volatile_tokens) // self._chunk_tokens
