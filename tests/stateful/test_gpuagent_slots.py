"""Whatever goes wrong in stores and loads of one session, and whenever: no slot leaks, no copy outlives its request.

Drawn faults hit the steps of the fake pool and cache by their number; what became visible or loaded is compared with
what the outcomes claim.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.core.errors import ArenaFull, KvPoolError, ServiceUnavailable
from tests.unit.gpuagent.runs import SHARDS, Bench, key, true_page

CHUNKS = 6
FAULTS = ("none", "unavailable", "bug", "stop", "corrupt", "evict")


class Storm:
    """Does at the n-th step what was drawn for it."""

    def __init__(self, bench: Bench, faults: dict[int, str]) -> None:
        self._bench, self._faults = bench, faults
        self._number = 0

    def before(self, step: str) -> None:
        self._number += 1
        match self._faults.get(self._number, "none"):
            case "unavailable":
                raise ArenaFull("no room") if step.startswith("reserve ") else ServiceUnavailable("gone")
            case "bug":
                if not step.startswith("reserve "):
                    raise RuntimeError("a bug")
            case "stop":
                self._bench.stop.cancel()
            case "corrupt":
                self._spoil(1)
            case "evict":
                self._spoil(None)

    def _spoil(self, flipped_bit: int | None) -> None:
        """Damage or drop the page that comes first."""
        pages = self._bench.cluster.pages
        for page_key in sorted(pages)[:1]:
            page = bytearray(pages.pop(page_key))
            if flipped_bit is not None:
                page[100] ^= flipped_bit
                pages[page_key] = bytes(page)


async def run(bench: Bench, loads: Sequence[range], stores: Sequence[range]) -> None:
    loading = [asyncio.ensure_future(bench.load(numbers)) for numbers in loads]
    storing = [asyncio.ensure_future(bench.store(numbers)) for numbers in stores]
    all_loaded, all_stored = await asyncio.gather(*loading), await asyncio.gather(*storing)
    bench.nothing_is_out()
    for numbers, loaded in zip(loads, all_loaded, strict=True):
        assert loaded.loaded_chunks == len(numbers) or isinstance(loaded.error, KvPoolError)
        assert all(bench.loaded(number) for number in numbers[: loaded.loaded_chunks])
    for numbers, stored in zip(stores, all_stored, strict=True):
        assert stored.stored_chunks + stored.deduplicated_chunks + len(stored.failed) == len(numbers)


@settings(max_examples=150)
@given(
    faults=st.dictionaries(st.integers(1, 120), st.sampled_from(FAULTS), max_size=6),
    window_pages=st.integers(3, 20),
    loads=st.lists(st.tuples(st.integers(0, CHUNKS - 1), st.integers(1, CHUNKS)), max_size=3),
    stores=st.lists(st.tuples(st.integers(10, 10 + CHUNKS), st.integers(1, CHUNKS)), max_size=3),
    valid_chunks=st.integers(0, CHUNKS + 1),
)
@pytest.mark.slow
def test_no_slot_leaks(
    faults: dict[int, str],
    window_pages: int,
    loads: list[tuple[int, int]],
    stores: list[tuple[int, int]],
    valid_chunks: int,
) -> None:
    bench = Bench(window_pages=window_pages)
    bench.offer(range(2 * CHUNKS - 1))
    bench.compute(range(10, 10 + 2 * CHUNKS))
    bench.still_valid = lambda chunk_count: chunk_count <= valid_chunks or valid_chunks > CHUNKS
    bench.faults.before = Storm(bench, faults).before
    # Loads write distinct blocks, as the agent demands of one request and engines keep across requests.
    lanes = [range(first, first + count) for first, count in loads[:1]]
    asyncio.run(run(bench, lanes, [range(first, first + count) for first, count in stores]))
    for number in range(10, 10 + 2 * CHUNKS):
        for shard in SHARDS:
            page = bench.cluster.pages.get(key(number, shard))
            # Visible is only what the engine had, or what a fault of this test damaged afterwards.
            assert page is None or "corrupt" in faults.values() or page == true_page(number, shard)
