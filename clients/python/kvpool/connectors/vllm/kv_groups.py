"""KV cache groups of a model, and the deepest boundary of a prompt at which all of them let a request go on.

vLLM groups layers that keep the same tokens; each group is a keyspace of its own, with chunk hashes of its own. Layers
of full attention need all chunks before a boundary, layers of a sliding window only those that the next token reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvpool.client.engine_items import EngineMatchRun, EngineSource, MatchResult
from kvpool.client.hashing import Prompt

NO_BLOCK = 0  # vLLM's null block: stands where a block has left its group's window


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCacheGroup:
    """One of vLLM's KV cache groups, as its scheduler sees it.

    block_tokens: of its blocks. chunk_bytes: of one chunk, of all ranks. window_tokens: a token attends to the last so
    many, its own included; 0: to all.
    """

    block_tokens: int
    chunk_bytes: int
    window_tokens: int = 0

    def first_chunk(self, end_tokens: int, chunk_tokens: int) -> int:
        """Return the first chunk that token `end_tokens` reads: vLLM keeps whole blocks of the window before it."""
        if not self.window_tokens:
            return 0
        skipped_blocks = max(0, end_tokens - self.window_tokens + 1) // self.block_tokens
        return skipped_blocks * self.block_tokens // chunk_tokens


def first_held_chunk(block_ids: Sequence[int], first_chunk: int, end_chunk: int, blocks_per_chunk: int) -> int:
    """Return the first chunk of [first_chunk, end_chunk) from which on a request has all blocks; end_chunk if none."""
    for at in range(min(end_chunk * blocks_per_chunk, len(block_ids)) - 1, first_chunk * blocks_per_chunk - 1, -1):
        if block_ids[at] == NO_BLOCK:
            return at // blocks_per_chunk + 1
    return first_chunk


def first_held_token(block_ids: Sequence[int], first_token: int, block_tokens: int) -> int:
    """Return the first token from first_token (where a block begins) on that has a block."""
    at = first_token // block_tokens
    while at < len(block_ids) and block_ids[at] == NO_BLOCK:
        at += 1
    return max(first_token, at * block_tokens)


class BoundarySearch:
    """Finds the deepest chunk boundary that all groups have, from the answers to "which chunks from this one on?".

    Ask what `asks` returns, say what was `found`, and again, until nothing is asked or time is over: `boundary` is
    right for what is known so far.
    """

    def __init__(self, groups: Sequence[KvCacheGroup], prompt: Prompt, held_chunks: int) -> None:
        """held_chunks: that the engine has; a boundary there is as good as none."""
        self._groups, self._prompt, self._held = groups, prompt, min(held_chunks, prompt.chunk_count)
        self._limit = prompt.chunk_count  # no deeper boundary is possible
        self._matches: list[list[tuple[range, MatchResult]]] = [[] for _ in groups]

    def asks(self) -> list[tuple[int, int]]:
        """(group, first chunk) of what must be known next; empty if `boundary` is the deepest there is."""
        if not any(self._matches):
            return [(number, self._held) for number in range(len(self._groups))]
        while self._limit > self._held:
            firsts = [self._first(number, self._limit) for number in range(len(self._groups))]
            # What follows a run is not there: no boundary whose window reaches over it is possible.
            gaps = [
                run.stop
                for number, first in enumerate(firsts)
                for run, _ in self._matches[number]
                if first <= run.stop < self._limit
            ]
            if not gaps:
                return [(number, first) for number, first in enumerate(firsts) if not self._has(number, self._limit)]
            self._limit = min(gaps)
        return []

    def found(self, group: int, first_chunk: int, match: MatchResult) -> None:
        """The answer to one of `asks`."""
        self._matches[group].append((range(first_chunk, max(first_chunk, match.matched_chunks)), match))

    @property
    def boundary(self) -> int:
        """The deepest one that all groups are known to have; held_chunks if there is none."""
        limit = self._limit
        while limit > self._held:
            lacking = [number for number in range(len(self._groups)) if not self._has(number, limit)]
            if not lacking:
                return limit
            runs = [run for run, _ in self._matches[lacking[0]]]
            limit = max((min(run.stop, limit - 1) for run in runs), default=self._held)
        return self._held

    @property
    def runs(self) -> tuple[tuple[range, ...], ...]:
        """Of each group: chunks that were found, each run up to one that is missing."""
        return tuple(tuple(run for run, _ in matches) for matches in self._matches)

    @property
    def match(self) -> MatchResult:
        """What can be loaded, as of one group: several count as one run, from where the farthest of their chunks is."""
        if len(self._groups) == 1 and not self._groups[0].window_tokens and self._matches[0]:
            return self._matches[0][0][1]
        end = self.boundary
        if end <= self._held:
            return MatchResult(self._held, self._prompt.usable_tokens(self._held))
        runs = [
            run
            for number in range(len(self._groups))
            for run in self._runs_within(number, range(self._first(number, end), end))
        ]
        source = max((run.source for run in runs), default=EngineSource.STAGING)
        return MatchResult(end, self._prompt.usable_tokens(end), (EngineMatchRun(end - self._held, source, 0.0),))

    def _first(self, number: int, end_chunk: int) -> int:
        end_tokens = self._prompt.usable_tokens(end_chunk)
        return max(self._held, self._groups[number].first_chunk(end_tokens, self._prompt.chunk_tokens))

    def _has(self, number: int, end_chunk: int) -> bool:
        first = self._first(number, end_chunk)
        return any(run.start <= first and end_chunk <= run.stop for run, _ in self._matches[number])

    def _runs_within(self, number: int, chunks: range) -> list[EngineMatchRun]:
        """Those of the match that has all of `chunks`, as far as they overlap them."""
        found, match = next(
            (found, match)
            for found, match in self._matches[number]
            if found.start <= chunks.start <= chunks.stop <= found.stop
        )
        within, at = [], found.start
        for run in match.runs:
            at, start = at + run.chunk_count, at
            if start < chunks.stop and chunks.start < at:
                within.append(run)
        return within
