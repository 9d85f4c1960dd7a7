"""Equal KV cache groups of vLLM that are one group of the pool: every token comes to its place, and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvpool.client.engine_items import EngineMatchRun, EngineSource, LoadResult, MatchResult
from kvpool.client.hashing import Prompt
from kvpool.connectors.vllm.identity import KvCacheInfo
from kvpool.connectors.vllm.joined_groups import join_groups
from kvpool.connectors.vllm.kv_groups import KvCache, KvCacheGroup, match_of_chunks, page_chain
from kvpool.connectors.vllm.step_jobs import LoadJob, LoadReport, StoreJob
from kvpool.core.chunks import group_head_index
from kvpool.core.errors import PageMissing
from tests.unit.connectors.vllm_fakes import FakePool, FakeRequest, a_request
from tests.unit.connectors.vllm_jobs import BLOCK, CHUNK, CHUNK_BYTES
from tests.unit.connectors.vllm_worlds import World, hashes_of

WIDTH = CHUNK // BLOCK
FULL = KvCacheGroup(block_tokens=BLOCK, chunk_bytes=CHUNK_BYTES, members=(1,))
STATES = KvCacheGroup(block_tokens=CHUNK, chunk_bytes=3 * CHUNK_BYTES, recurrent=True, members=(0, 2, 3))
WHOLE = KvCacheGroup(block_tokens=CHUNK, chunk_bytes=CHUNK_BYTES, members=(1,))
VLLM_GROUPS = 4
NOTHING = -1

Blocks = list[list[int]]


def windows(window_tokens: int) -> KvCacheGroup:
    """Three of vLLM's groups, around the one with full attention."""
    return KvCacheGroup(block_tokens=BLOCK, chunk_bytes=3 * CHUNK_BYTES, window_tokens=window_tokens, members=(0, 2, 3))


class PagePool(FakePool):
    """Has what was stored, by the hashes of a page and of the first page of its group in the index."""

    def __init__(self, hash_key: bytes) -> None:
        super().__init__(hash_key=hash_key)
        self.pages: dict[tuple[bytes, bytes], npt.NDArray[np.int64]] = {}

    async def match(self, chain: Prompt, *, held_chunks: int = 0, timeout_s: float | None = None) -> MatchResult:
        end = held_chunks
        while end < chain.chunk_count and key(chain.hashes, end) in self.pages:
            end += 1
        runs = (EngineMatchRun(end - held_chunks, EngineSource.STAGING, 0.0),) if end > held_chunks else ()
        return MatchResult(end, runs=runs)


def key(hashes: Sequence[bytes], page: int) -> tuple[bytes, bytes]:
    """Of a page in a pool."""
    return hashes[group_head_index(page)], hashes[page]


class Engine:
    """A scheduler's side, and a cache whose tokens its jobs are carried out on."""

    def __init__(self, pools: Sequence[PagePool], group: KvCacheGroup, full: KvCacheGroup) -> None:
        self.pools, self.block_tokens = pools, full.block_tokens
        self.world = World(*pools, groups=[group, full], store="prefill", load="always")
        self.cache = np.full((400, self.block_tokens), NOTHING)

    def places(self, job: LoadJob | StoreJob, page: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Of the tokens of a page, as an agent reckons them."""
        tokens, width = np.arange(CHUNK), CHUNK // self.block_tokens
        return job.block_ids[page * width + tokens // self.block_tokens].astype(np.int64), tokens % self.block_tokens

    def store(self, jobs: Sequence[StoreJob]) -> None:
        for job in jobs:
            hashes = hashes_of(job)
            for page in range(job.first_chunk, job.end_chunk):
                self.pools[job.group].pages[key(hashes, page)] = self.cache[self.places(job, page)]

    def load(self, jobs: Sequence[LoadJob]) -> None:
        for job in jobs:
            hashes = hashes_of(job)
            for page in range(job.first_chunk, job.end_chunk):
                skipped = job.first_token - page * CHUNK if page == job.first_chunk else 0
                blocks, offsets = (one[skipped:] for one in self.places(job, page))
                self.cache[blocks, offsets] = self.pools[job.group].pages[key(hashes, page)][skipped:]


def kv(number: int, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """What vLLM's group with this number keeps of tokens."""
    return number * 1_000_000 + tokens


def blocks_of_all(count: int, first: int, missing: int = 0) -> Blocks:
    """So many blocks of each of vLLM's groups; those with windows lack the first ones."""
    return [
        [0 if number != 1 and at < missing else first + number * 50 + at for at in range(count)]
        for number in range(VLLM_GROUPS)
    ]


def computed(engine: Engine, request: FakeRequest, blocks: Blocks) -> None:
    """Compute a whole prompt and store what comes of it."""
    tokens = np.arange(request.num_tokens)
    for number, of_group in enumerate(blocks):
        engine.cache[np.array(of_group)[tokens // BLOCK], tokens % BLOCK] = kv(number, tokens)
    assert engine.world.match(request) == 0
    jobs = engine.world.side.build_jobs({request.request_id: request.num_tokens}, (), lambda _: blocks)
    engine.store(jobs.stores)


@settings(deadline=None, max_examples=60)
@given(
    window_tokens=st.integers(2, 200),
    token_count=st.integers(2 * CHUNK, 12 * CHUNK + 20),
    held_blocks=st.integers(0, 11),
)
@example(window_tokens=40, token_count=4 * CHUNK, held_blocks=1)
@example(window_tokens=CHUNK + 1, token_count=6 * CHUNK + 1, held_blocks=3)
def test_tokens_of_every_member_come_to_their_blocks(window_tokens: int, token_count: int, held_blocks: int) -> None:
    group, pools = windows(window_tokens), (PagePool(b"w" * 32), PagePool(b"k" * 32))
    block_count = -(-token_count // BLOCK)
    computed(Engine(pools, group, FULL), a_request(token_count), blocks_of_all(block_count, 1))

    engine, held_tokens = Engine(pools, group, FULL), min(held_blocks * BLOCK, token_count - 1) // BLOCK * BLOCK
    request = a_request(token_count)
    loaded = engine.world.match(request, held_tokens)
    assert loaded is not None
    end_token = held_tokens + loaded
    assert end_token == max(held_tokens, min(token_count // CHUNK * CHUNK, token_count - 1)), "all of it is there"
    if not loaded:
        return
    missing = max(0, end_token - window_tokens + 1) // BLOCK
    blocks = blocks_of_all(block_count, 1, missing)
    engine.world.side.allocated(request, blocks, loaded)
    engine.load(engine.world.build().loads)

    expected = np.full_like(engine.cache, NOTHING)
    written = np.arange(held_tokens, token_count // CHUNK * CHUNK)
    for number, of_group in enumerate(blocks):
        tokens = written[written >= missing * BLOCK] if number != 1 else written
        expected[np.array(of_group)[tokens // BLOCK], tokens % BLOCK] = kv(number, tokens)
    np.testing.assert_array_equal(engine.cache, expected)


def test_a_chunk_that_lacks_a_page_is_not_there() -> None:
    pools = PagePool(b"w" * 32), PagePool(b"k" * 32)
    computed(Engine(pools, windows(40), FULL), a_request(6 * CHUNK + 1), blocks_of_all(13, 1))
    pages = list(pools[0].pages)
    assert len(pages) == 3 * 6
    del pools[0].pages[pages[3 * 5 + 2]]  # of the sixth chunk the last member's
    engine = Engine(pools, windows(40), FULL)
    assert engine.world.match(a_request(6 * CHUNK + 1)) == 5 * CHUNK


def test_states_of_all_members_are_one_store_and_one_load() -> None:
    pools, block_ids = (PagePool(b"s" * 32), PagePool(b"k" * 32)), [[0, 0, 70], [1, 2, 3], [0, 0, 71], [0, 0, 72]]
    engine, request = Engine(pools, STATES, WHOLE), a_request(3 * CHUNK + 5)
    engine.world.match(request)
    engine.cache[[70, 71, 72]] = np.array([[0], [2], [3]])
    step = {request.request_id: request.num_tokens}
    engine.store(engine.world.side.build_jobs(step, (), lambda _: block_ids).stores)
    request.num_computed_tokens = request.num_tokens
    kept = [(0, 70, 3 * CHUNK), (2, 71, 3 * CHUNK), (3, 72, 3 * CHUNK), (0, 73, 2 * CHUNK), (2, 74, 2 * CHUNK)]
    (state,) = engine.world.side.build_jobs({}, (), lambda _: block_ids, checkpoints={"r": kept}).stores
    assert (state.group, state.first_chunk, state.end_chunk) == (0, 6, 9), "after two chunks a member has no state"
    engine.store([state])
    for block in (70, 71, 72):
        assert engine.world.side.build_jobs({}, (), lambda _: block_ids, new_blocks=[block]).overwritten == [
            state.number
        ]

    reader, again = Engine(pools, STATES, WHOLE), a_request(3 * CHUNK + 5)
    assert reader.world.match(again) == 3 * CHUNK
    reader.world.side.allocated(again, [[0, 0, 80], [1, 2, 3], [0, 0, 81], [0, 0, 82]], 3 * CHUNK)
    loads = reader.world.build().loads
    assert [(job.group, job.first_chunk, job.end_chunk) for job in loads] == [(0, 6, 9), (1, 0, 3)]
    reader.load(loads)
    assert reader.cache[[80, 81, 82], 0].tolist() == [0, 2, 3]
    assert (reader.cache[0] == NOTHING).all()


def test_what_failed_of_pages_is_looked_for_again_by_its_chunks() -> None:
    pools = PagePool(b"w" * 32), PagePool(b"k" * 32)
    computed(Engine(pools, windows(2 * CHUNK), FULL), a_request(6 * CHUNK + 1), blocks_of_all(13, 1))
    engine, request = Engine(pools, windows(2 * CHUNK), FULL), a_request(6 * CHUNK + 1)
    loaded = engine.world.match(request)
    assert loaded == 6 * CHUNK
    engine.world.side.allocated(request, blocks_of_all(13, 1, 7), loaded)
    jobs = engine.world.build()
    assert [(job.group, job.first_chunk, job.end_chunk) for job in jobs.loads] == [
        (0, 9, 10), (0, 10, 11), (0, 11, 12), (0, 12, 18), (1, 0, 6)
    ]  # fmt: skip
    ends = [
        LoadReport(
            request_id="r",
            group=job.group,
            result=LoadResult(
                job.first_chunk, 0, tuple(range(job.first_chunk, job.end_chunk)), error=PageMissing("gone")
            ),
            duration_s=0.01,
            size_bytes=0,
        )
        for job in jobs.loads
    ]
    engine.world.side.on_worker_report(jobs.step, ends)
    engine.world.side.finished_recving(["r"])
    (event,) = engine.world.side.take_events()
    assert event.hashes == hashes_of(jobs.loads[-1])
    again = blocks_of_all(13, 1)
    stores = engine.world.side.build_jobs({"r": request.num_tokens}, (), lambda _: again).stores
    assert {(job.group, job.end_chunk) for job in stores} >= {(0, 18), (1, 6)}


def test_pages_have_hashes_of_their_own() -> None:
    chain = Prompt(CHUNK, 4 * CHUNK, bytes(range(64)))
    pages = page_chain(chain, 9)
    assert pages.chunk_count == len(set(pages.hashes)) == 36
    assert pages.hashes[::9] == chain.hashes
    assert page_chain(chain, 1) is chain
    assert len({one[:8] for one in pages.hashes}) == len({one[8:] for one in pages.hashes}) == 36


@pytest.mark.parametrize(
    ("pages", "runs", "chunks", "matched"),
    [
        (3, [6], [2], 8),
        (3, [4, 5], [1, 2], 9),
        (3, [2, 1], [1], 7),
        (3, [2], [], 6),
        (2, [1, 4], [2], 11),
    ],
)
def test_runs_of_pages_as_runs_of_chunks(pages: int, runs: list[int], chunks: list[int], matched: int) -> None:
    """16 pages are left out of the question, two more held."""
    ends = [EngineMatchRun(count, EngineSource.DISK, 1.0) for count in runs]
    result = match_of_chunks(MatchResult(2 + sum(runs), runs=tuple(ends)), 16, pages)
    assert result.matched_chunks == matched
    assert [run.chunk_count for run in result.runs] == chunks


def test_a_chunk_is_as_far_as_its_farthest_page() -> None:
    sources = [
        (2, EngineSource.DISK),
        (5, EngineSource.STAGING),
        (1, EngineSource.REMOTE),
        (3, EngineSource.GPU),
        (2, EngineSource.DISK),
    ]
    runs = tuple(EngineMatchRun(count, source, 1.0) for count, source in sources)
    found = match_of_chunks(MatchResult(13, runs=runs), 0, 3)
    assert [(run.chunk_count, run.source) for run in found.runs] == [
        (1, EngineSource.DISK),
        (1, EngineSource.STAGING),
        (1, EngineSource.REMOTE),
        (1, EngineSource.DISK),
    ]


def test_each_group_of_vllm_is_in_one_group() -> None:
    with pytest.raises(ValueError, match="each of vLLM's groups"):
        KvCache(groups=[windows(40)], prefix_caching=True)
    with pytest.raises(ValueError, match="each of vLLM's groups"):
        KvCache(groups=[windows(40), FULL, WHOLE], prefix_caching=True)


def test_a_group_with_too_few_blocks_is_computed() -> None:
    pools = PagePool(b"w" * 32), PagePool(b"k" * 32)
    computed(Engine(pools, windows(40), FULL), a_request(4 * CHUNK + 1), blocks_of_all(9, 1))
    engine, request = Engine(pools, windows(40), FULL), a_request(4 * CHUNK + 1)
    loaded = engine.world.match(request)
    blocks = blocks_of_all(9, 1)
    blocks[3] = blocks[3][:5]
    engine.world.side.allocated(request, blocks, loaded or 0)
    (failing,) = engine.world.build().loads
    assert not failing.hashes


def info(number: int, **more: Any) -> KvCacheInfo:
    values = {"block_tokens": 16, "head_count": 4, "row_bytes": 256, "opaque": False, "dtype": "bfloat16"}
    return KvCacheInfo(**{**values, "layer_numbers": (number, number + 4), "members": (number,), **more})


def caches(*offsets: int, older: bool = False) -> Any:
    """vLLM's configuration of groups of two layers each, the first of which begin at these places."""
    names = [[f"layers.{number}.attn", f"layers.{number + 4}.attn"] for number in range(len(offsets))]
    groups = [SimpleNamespace(layer_names=of_group) for of_group in names]
    tensors = [
        SimpleNamespace(layers=of_group, offset=offset, layer_stride=100, block_stride=10)
        for of_group, offset in zip(names, offsets, strict=True)
    ]
    if older:
        tensors = [SimpleNamespace(shared_by=list(shared)) for shared in zip(*names, strict=True)]
    return SimpleNamespace(kv_cache_groups=groups, kv_cache_tensors=tensors)


@pytest.mark.parametrize(
    ("infos", "config", "members"),
    [
        ([info(0), *(info(one, window_tokens=64) for one in (1, 2, 3))], caches(0, 0, 0, 0), [(0,), (1, 2, 3)]),
        ([info(0), *(info(one, window_tokens=64) for one in (1, 2))], caches(0, 0, 0, older=True), [(0,), (1, 2)]),
        ([info(0, window_tokens=64), info(1), info(2, window_tokens=64)], caches(0, 0, 0), [(0, 2), (1,)]),
        ([info(0, window_tokens=64), info(1, window_tokens=32)], caches(0, 0), [(0,), (1,)]),
        ([info(0, state="mamba"), info(1, state="mamba"), info(2)], caches(0, 0, 0), [(0, 1), (2,)]),
        ([info(0, window_tokens=64), info(1, window_tokens=64)], caches(0, 50), [(0,), (1,)]),
        ([info(0), info(1)], caches(0, 0), [(0,), (1,)]),  # what one lacks of a prompt the other may have
        (
            [info(0, window_tokens=64), info(1, window_tokens=64)],
            SimpleNamespace(kv_cache_groups=caches(0, 0).kv_cache_groups),
            [(0,), (1,)],
        ),
    ],
)
def test_equal_groups_at_equal_places_are_joined(
    infos: list[KvCacheInfo], config: Any, members: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpool.connectors.vllm.joined_groups._by_number", sorted)
    joined = join_groups(infos, config)
    assert [one.members for one in joined] == members
    for one in joined:
        assert one.layer_numbers == tuple(number for member in one.members for number in infos[member].layer_numbers)


def test_of_short_block_tables_what_is_there_is_stored() -> None:
    pools = PagePool(b"w" * 32), PagePool(b"k" * 32)
    engine, request = Engine(pools, windows(400), FULL), a_request(4 * CHUNK + 1)
    engine.world.match(request)
    blocks = blocks_of_all(9, 1)
    blocks[3] = blocks[3][:5]
    stores = engine.world.side.build_jobs({"r": request.num_tokens}, (), lambda _: blocks).stores
    assert {(job.group, job.first_chunk, job.end_chunk) for job in stores} == {(0, 0, 6), (1, 0, 4)}
