"""KV cache groups of a model, and the deepest prompt boundary from which all of them can resume a request.

vLLM groups layers that keep the same tokens; each group is a keyspace of its own, with its own chunk hashes. Layers
with full attention need all chunks before a boundary, layers with a sliding window only those that the next token
reads, and recurrent layers only the state after the boundary's last token: that state is their chunk.

vLLM divides layers of one kind into several groups where another kind has fewer layers. Groups with windows or
recurrent state that have as many layers each, at the same places of memory, are one group here: each group costs the
engine's process a lookup and a store of every request. A chunk of such a group has a page for each member. To
the pool these are consecutive chunks of a longer chain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvpool.client.engine_items import EngineMatchRun, EngineSource, MatchResult
from kvpool.client.hashing import Prompt
from kvpool.connectors.vllm.step_jobs import Blocks, block_id_array
from kvpool.core.chunks import chunk_runs, page_hashes
from kvpool.core.errors import InvalidRequest

_ASKS_GROW = 8  # so many times more states or windows are asked about in each round
NULL_BLOCK_ID = 0  # vLLM's null block: stands where a block has left its group's window


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCacheGroup:
    """One of vLLM's KV cache groups, or several equal ones, as its scheduler sees it.

    block_tokens: tokens of a block. chunk_bytes: bytes of a chunk's pages, all ranks together. window_tokens: how many
    tokens a token attends to, itself included; 0: all. recurrent: a page has one block with the state after the chunk's
    last token, at the boundaries where vLLM keeps one. members: their numbers in vLLM's order.
    """

    block_tokens: int
    chunk_bytes: int
    window_tokens: int = 0
    recurrent: bool = False
    members: tuple[int, ...] = (0,)

    @property
    def pages(self) -> int:
        """Pages of a chunk: one for each member."""
        return len(self.members)

    def blocks_of(self, block_ids: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """Return the members' blocks among those of all of vLLM's groups."""
        return [block_ids[number] for number in self.members]

    @property
    def gives_blocks_back(self) -> bool:
        """Whether vLLM frees blocks of requests while they run."""
        return self.recurrent or self.window_tokens > 0

    def first_chunk(self, end_tokens: int, chunk_tokens: int) -> int:
        """Return the first chunk that token `end_tokens` reads: vLLM keeps whole blocks of the window before it."""
        if self.recurrent:
            return max(0, end_tokens // chunk_tokens - 1)
        if not self.window_tokens:
            return 0
        skipped_blocks = max(0, end_tokens - self.window_tokens + 1) // self.block_tokens
        return skipped_blocks * self.block_tokens // chunk_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCache:
    """An engine's KV cache, as its scheduler sees it.

    groups: as the pools of a connection. prefix_caching: whether vLLM finds prefixes in it by itself.
    shared_from_gpu: whether workers announce what the only group holds on GPUs. volatile_tokens: how many of the last
    computed tokens have KV that a drafter may write again. raises: ValueError unless each of vLLM's groups is in one.
    """

    groups: Sequence[KvCacheGroup]
    prefix_caching: bool
    shared_from_gpu: bool = False
    volatile_tokens: int = 0

    def __post_init__(self) -> None:
        members = sorted(number for group in self.groups for number in group.members)
        if members != list(range(len(members))):
            raise ValueError(f"each of vLLM's groups is to be in one group, got {members}")


def first_held_chunk(blocks: Blocks, first_chunk: int, end_chunk: int) -> int:
    """Return the first chunk of [first_chunk, end_chunk) from which on a request has all blocks; end_chunk if none.

    blocks: of the pages of chunks [0, end_chunk), of which there is one at least.
    """
    of_chunks = blocks.reshape(end_chunk, -1)[first_chunk:]
    lacking = np.flatnonzero((of_chunks == NULL_BLOCK_ID).any(axis=1))
    return first_chunk + int(lacking[-1]) + 1 if lacking.size else first_chunk


def page_chain(chain: Prompt, pages: int) -> Prompt:
    """Return the chain of the pages of a chain's chunks. Those of chunk c are [c * pages, (c + 1) * pages)."""
    return chain if pages == 1 else replace(chain, packed=page_hashes(chain.packed, pages))


def match_of_chunks(match: MatchResult, left_out: int, pages: int) -> MatchResult:
    """Return what a match of pages says of chunks: one is there if all its pages are.

    left_out: first pages of the chain that were not asked about. A chunk has the farthest source of its pages.
    """
    of_pages = [(run.chunk_count, run) for run in match.runs]  # a match begins with a chunk's first page
    runs = [replace(run, chunk_count=count) for count, run in chunk_runs(of_pages, pages, _farther)]
    return replace(match, matched_chunks=(left_out + match.matched_chunks) // pages, runs=tuple(runs))


def page_blocks(blocks: Sequence[Sequence[int]], end_chunk: int, blocks_per_chunk: int) -> Blocks:
    """Return the blocks of the pages of chunks [0, end_chunk), page after page.

    blocks: of each member, from token 0 on. raises: InvalidRequest if one has too few.
    """
    count = end_chunk * blocks_per_chunk
    if any(len(of_member) < count for of_member in blocks):
        raise InvalidRequest(f"{end_chunk} chunks have {count} blocks, a group has {min(map(len, blocks))}")
    tables = [block_id_array(of_member[:count]).reshape(end_chunk, blocks_per_chunk) for of_member in blocks]
    return np.stack(tables, axis=1).reshape(-1)


def first_held_token(block_ids: Sequence[int], first_token: int, block_tokens: int) -> int:
    """Return the first token that has a block, from first_token (the start of a block) on."""
    at = first_token // block_tokens
    while at < len(block_ids) and block_ids[at] == NULL_BLOCK_ID:
        at += 1
    return max(first_token, at * block_tokens)


def _pooled(found: range, match: MatchResult) -> list[range]:
    """Return the matched chunks that are pages in the pool, not only in GPU caches of other engines."""
    pooled, at = [], found.start
    if not any(run.source == EngineSource.GPU for run in match.runs):
        return [found]
    for run in match.runs:
        at, start = at + run.chunk_count, at
        if run.source != EngineSource.GPU:
            pooled.append(range(start, at))
    return pooled


def _farther(one: EngineMatchRun, later: EngineMatchRun) -> EngineMatchRun:
    return one if _distance(one.source) > _distance(later.source) else later


def _distance(source: EngineSource) -> int:
    return 0 if source == EngineSource.GPU else int(source)


class BoundarySearch:
    """Finds the deepest chunk boundary that all groups have, by asking which chunks exist from a given one on.

    Look up what `asks` returns, pass the results to `found`, and repeat until `asks` is empty or time is up: `boundary`
    is correct for what is known so far. Groups that keep all tokens come first: where they have nothing, the others are
    not asked, and else only from their windows on. For recurrent groups only the chunk asked about counts: their states
    may be anywhere, so that each may be asked about, a few at first and more with each round.
    """

    def __init__(self, groups: Sequence[KvCacheGroup], prompt: Prompt, held_chunks: int) -> None:
        """held_chunks: chunks that the engine has; a boundary there is worth nothing."""
        self._groups, self._prompt, self._held = groups, prompt, min(held_chunks, prompt.chunk_count)
        self._recurrent = [number for number, group in enumerate(groups) if group.recurrent]
        # No deeper boundary is possible. A state goes on from its boundary alone, and one token must be computed.
        self._limit = prompt.chunk_count
        if self._recurrent:
            self._limit = max(self._held, min(self._limit, (prompt.token_count - 1) // prompt.chunk_tokens))
        self._state_asks = self._window_asks = 1
        self._matches: list[list[tuple[range, MatchResult]]] = [[] for _ in groups]

    def asks(self) -> list[tuple[int, int]]:
        """Return (group, first chunk) of the lookups needed next; empty if `boundary` is the deepest one."""
        if not any(self._matches) and self._limit > self._held:
            whole = [number for number, group in enumerate(self._groups) if not group.gives_blocks_back]
            begin = [self._limit - 1 if group.recurrent else self._held for group in self._groups]
            return [(number, begin[number]) for number in whole or range(len(begin))]
        while self._limit > self._held:
            firsts = [self._first(number, self._limit) for number in range(len(self._groups))]
            # What follows a run is not there: no boundary whose window reaches over it is possible.
            gaps = [
                run.stop
                for number, first in enumerate(firsts)
                for run, _ in self._matches[number]
                if number not in self._recurrent and first <= run.stop < self._limit
            ]
            if gaps:
                self._limit = min(gaps)
            elif any(self._lacks_state(number, self._limit) for number in self._recurrent):
                self._limit -= 1
            else:
                asks = [(number, first) for number, first in enumerate(firsts) if not self._has(number, self._limit)]
                others = [ask for ask in asks if ask[0] not in self._recurrent]
                return others + self._asks_of_windows(others) + self._asks_of_states(dict(asks))
        return []

    def _asks_of_states(self, lacking: Mapping[int, int]) -> list[tuple[int, int]]:
        """Return lookups of the state at the limit and, if no group is known to have it, of one group's states below
        it."""
        wanted = [number for number in self._recurrent if number in lacking]
        if len(wanted) < len(self._recurrent) or not wanted or not self._matches[wanted[0]]:
            return [(number, lacking[number]) for number in wanted]
        self._state_asks *= _ASKS_GROW
        chunks = range(self._limit - 1, max(self._held, self._limit - self._state_asks) - 1, -1)
        first = wanted[0]
        unknown = [
            chunk for chunk in chunks if not (self._has(first, chunk + 1) or self._lacks_state(first, chunk + 1))
        ]
        return [(first, chunk) for chunk in unknown]

    def _asks_of_windows(self, lacking: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return lookups of one group's windows below the limit, none at first and more with each round, where no group
        with a window is known to have the one at the limit."""
        windows = [ask for ask in lacking if self._groups[ask[0]].window_tokens]
        if not windows or len(windows) < sum(group.window_tokens > 0 for group in self._groups):
            return []
        number, first = windows[0]
        step, count = max(1, self._limit - first), self._window_asks - 1
        self._window_asks *= _ASKS_GROW
        known = {run.start for run, _ in self._matches[number]}
        return [(number, at) for at in range(first - step, self._held - 1, -step)[:count] if at not in known]

    def found(self, group: int, first_chunk: int, match: MatchResult) -> None:
        """Add the result of one of `asks`."""
        self._matches[group].append((range(first_chunk, max(first_chunk, match.matched_chunks)), match))

    @property
    def limit(self) -> int:
        """No boundary after this chunk is possible."""
        return self._limit

    @property
    def boundary(self) -> int:
        """The deepest boundary that all groups are known to have; held_chunks if there is none."""
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
        """For each group: chunks that the pool has; each run ends before a chunk that it lacks."""
        return tuple(
            tuple(pooled for found, match in matches for pooled in _pooled(found, match)) for matches in self._matches
        )

    @property
    def match(self) -> MatchResult:
        """What can be loaded, as a match of one group: of several groups, one run with the farthest source."""
        if len(self._groups) == 1 and not self._groups[0].gives_blocks_back and self._matches[0]:
            return self._matches[0][0][1]
        end = self.boundary
        if end <= self._held:
            return MatchResult(self._held, self._prompt.usable_tokens(self._held))
        runs = [
            run
            for number in range(len(self._groups))
            for run in self._runs_within(number, range(self._first(number, end), end))
        ]
        source = max((run.source for run in runs), key=_distance, default=EngineSource.STAGING)
        return MatchResult(end, self._prompt.usable_tokens(end), (EngineMatchRun(end - self._held, source, 0.0),))

    def _first(self, number: int, end_chunk: int) -> int:
        end_tokens = self._prompt.usable_tokens(end_chunk)
        return max(self._held, self._groups[number].first_chunk(end_tokens, self._prompt.chunk_tokens))

    def _has(self, number: int, end_chunk: int) -> bool:
        first = self._first(number, end_chunk)
        return any(run.start <= first and end_chunk <= run.stop for run, _ in self._matches[number])

    def _lacks_state(self, number: int, end_chunk: int) -> bool:
        return any(run.start == run.stop == end_chunk - 1 for run, _ in self._matches[number])

    def _runs_within(self, number: int, chunks: range) -> list[EngineMatchRun]:
        """Return the runs of the match that covers `chunks`, restricted to them."""
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
