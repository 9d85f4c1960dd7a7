"""Own chunks before the pool's, and every failure of the pool ends in computing."""

from collections.abc import Sequence

import pytest

from kvpool.connectors.prefix import Prefix
from kvpool.connectors.prefix_cache import PrefixCache
from kvpool.core.chunks import chunk_hashes
from kvpool.core.errors import ServiceUnavailable
from tests.unit.connectors.scripted_pool import HASH_KEY, ScriptedPool

CHUNK = 16


class Engine:
    """An engine whose KV of a chunk is 16 bytes: its token ids."""

    def __init__(self, pool: ScriptedPool | None = None, *, block_count: int = 8, always_load: bool = False) -> None:
        self.memory = bytearray(block_count * CHUNK)
        self.pool = pool
        if pool is not None:
            pool.memory, pool.block_bytes, pool.chunk_tokens = memoryview(self.memory), CHUNK, CHUNK
        self.cache = PrefixCache(
            pool, block_count=block_count, chunk_tokens=CHUNK, chunk_bytes=CHUNK, always_load=always_load
        )

    def run(self, tokens: bytes, *, generated: int = 4) -> Prefix:
        """One request: find, check that what was found is right, compute the rest, keep all."""
        found = self.cache.find(list(tokens))
        for index, block in enumerate(found.blocks):
            assert self.memory[block * CHUNK : (block + 1) * CHUNK] == tokens[index * CHUNK : (index + 1) * CHUNK]
        self.cache.release(found)
        whole = tokens + bytes(generated)
        self.cache.keep(list(whole), lambda first_chunk, blocks: self.fill(whole, first_chunk, blocks))
        return found

    def fill(self, tokens: bytes, first_chunk: int, blocks: Sequence[int]) -> None:
        for index, block in enumerate(blocks, start=first_chunk):
            self.memory[block * CHUNK : (block + 1) * CHUNK] = tokens[index * CHUNK : (index + 1) * CHUNK]


PROMPT = bytes(range(1, 60))  # 3 chunks and 11 tokens


def shared_chunks() -> dict[bytes, bytes]:
    """What a first engine leaves in the pool."""
    pool = ScriptedPool()
    Engine(pool).run(PROMPT)
    return pool.chunks


def test_without_a_pool_an_engine_reuses_its_own_chunks() -> None:
    engine = Engine()
    assert engine.run(PROMPT).own_chunks == 0
    found = engine.run(PROMPT)
    assert (found.own_chunks, found.loaded.loaded_chunks, found.failure) == (3, 0, "")


def test_the_last_token_is_always_computed() -> None:
    engine = Engine()
    engine.run(PROMPT[:32])
    assert engine.run(PROMPT[:32]).own_chunks == 1
    assert engine.run(PROMPT[:33]).own_chunks == 2


def test_another_engine_loads_what_the_first_one_stored() -> None:
    pool = ScriptedPool(chunks=shared_chunks())
    engine = Engine(pool)
    found = engine.run(PROMPT)
    assert (found.own_chunks, found.loaded.loaded_chunks, len(found.blocks)) == (0, 3, 3)
    assert engine.run(PROMPT).own_chunks == 3
    assert pool.stores == [], "loaded chunks are in the pool already"


def test_own_chunks_are_not_asked_for() -> None:
    pool = ScriptedPool(chunks=shared_chunks())
    engine = Engine(pool)
    engine.run(PROMPT[:20], generated=0)
    found = engine.run(PROMPT)
    assert (found.own_chunks, found.loaded.loaded_chunks) == (1, 2)
    assert pool.matches[-1] == (3, 1)
    span = pool.loads[-1]
    chain = chunk_hashes(HASH_KEY, list(PROMPT), CHUNK)
    assert span.hashes == tuple(chain[1:3])
    assert (span.first_index, span.chain) == (1, tuple(chain))


def test_generated_tokens_are_stored_too() -> None:
    pool = ScriptedPool()
    engine = Engine(pool)
    engine.run(PROMPT, generated=5)
    (span,) = pool.stores
    assert span.hashes == tuple(chunk_hashes(HASH_KEY, list(PROMPT + bytes(5)), CHUNK))
    assert (len(span.blocks), span.first_index) == (4, 0)
    engine.run(PROMPT + bytes(5) + PROMPT)
    assert pool.stores[-1].first_index == 4, "what is stored is not stored again"


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_only_the_leading_good_chunks_are_used(limit: int) -> None:
    pool = ScriptedPool(chunks=shared_chunks(), load_limit=limit)
    engine = Engine(pool)
    found = engine.run(PROMPT)
    assert (len(found.blocks), found.loaded.loaded_chunks, found.failure) == (limit, limit, "a page was damaged")
    assert pool.stores[-1].first_index == limit, "what was computed instead is stored"
    pool.load_limit = None
    assert engine.run(PROMPT).own_chunks == 3


def test_a_failed_match_or_load_means_computing() -> None:
    error = ServiceUnavailable("the agent is gone")
    for pool in (ScriptedPool(match_error=error), ScriptedPool(chunks=shared_chunks(), load_error=error)):
        found = Engine(pool).run(PROMPT)
        assert found.blocks == ()
        assert "the agent is gone" in found.failure


def test_a_pool_that_was_never_reached_is_not_asked() -> None:
    pool = ScriptedPool(reachable=False)
    engine = Engine(pool)
    assert engine.run(PROMPT).failure == "the pool cannot be reached"
    assert (pool.matches, pool.stores) == ([], [])
    pool.reachable = True
    assert engine.run(PROMPT).own_chunks == 3, "own chunks do not depend on the pool"
    assert len(pool.stores[0].blocks) == 3, "and are stored once it is there"


def test_failed_stores_are_tried_again_with_the_next_request() -> None:
    pool = ScriptedPool(store_failure="the arena is full")
    engine = Engine(pool)
    engine.run(PROMPT)
    pool.store_failure = ""
    engine.run(PROMPT)
    engine.run(PROMPT)
    assert [len(span.blocks) for span in pool.stores] == [3, 3]


def test_blocks_of_a_load_are_not_reused_before_they_are_released() -> None:
    pool = ScriptedPool(chunks=shared_chunks(), load_error=ServiceUnavailable("too late"), hold=True)
    engine = Engine(pool, block_count=3)
    engine.run(PROMPT)
    (span,) = pool.loads
    assert len(span.blocks) == 3
    pool.load_error, pool.hold = None, False
    assert engine.run(PROMPT).own_chunks == 0, "no block was free to keep anything in"
    pool.let_go()
    engine.run(PROMPT)
    assert engine.run(PROMPT).own_chunks == 3


def test_blocks_of_a_store_are_not_reused_before_they_are_gathered() -> None:
    pool = ScriptedPool(hold=True)
    engine = Engine(pool, block_count=4)
    engine.run(PROMPT)
    other = bytes(reversed(PROMPT))
    engine.run(other)
    assert engine.cache.find(list(other)).own_chunks == 1, "only the fourth block was free"
    pool.let_go()
    engine.run(other)
    assert engine.run(other).own_chunks == 3


def test_a_prompt_longer_than_the_cache_keeps_its_beginning() -> None:
    engine = Engine(block_count=2)
    engine.run(PROMPT)
    assert engine.run(PROMPT).own_chunks == 2
    assert engine.run(PROMPT).own_chunks == 2


def test_forgotten_chunks_come_from_the_pool_again() -> None:
    engine = Engine(ScriptedPool())
    engine.run(PROMPT)
    pinned = engine.cache.find(list(PROMPT))
    engine.cache.forget()
    assert engine.run(PROMPT).own_chunks == 3, "pinned blocks stay"
    engine.cache.release(pinned)
    engine.cache.forget()
    found = engine.run(PROMPT)
    assert (found.own_chunks, found.loaded.loaded_chunks) == (0, 3)


def test_blocks_of_a_running_load_are_known_before_it_ends() -> None:
    engine = Engine(ScriptedPool(chunks=shared_chunks(), load_limit=2, layers_before_failure=1))
    running = engine.cache.begin(list(PROMPT))
    assert len(running.blocks) == 3
    assert (running.wait_layers(1), running.wait_layers(2)) == (True, False)
    found = running.finish()
    assert found.blocks == running.blocks[:2]
    assert running.finish() is found
    engine.cache.release(found)
    assert engine.run(PROMPT).own_chunks == 2


def test_flush_waits_for_the_end_of_stores() -> None:
    engine = Engine(ScriptedPool())
    engine.run(PROMPT)
    assert engine.cache.flush_stores(0.0)


def test_a_broken_copy_leaves_no_block_behind() -> None:
    engine = Engine(block_count=3)

    def fail(first_chunk: int, blocks: Sequence[int]) -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        engine.cache.keep(list(PROMPT), fail)
    engine.run(PROMPT)
    assert engine.run(PROMPT).own_chunks == 3


def test_slow_loads_are_left_alone_once_both_speeds_are_known() -> None:
    for always_load, expected in ((False, [3, 3, 0, 0]), (True, [3, 3, 3, 3])):
        pool = ScriptedPool(chunks=shared_chunks(), load_duration_s=1.0)
        engine = Engine(pool, always_load=always_load)
        engine.cache.note_prefill(1600, 1600.0)  # the chunks' 48 tokens take 48 ms
        loaded = []
        for _ in range(4):
            loaded.append(engine.run(PROMPT, generated=0).loaded.loaded_chunks)
            engine.cache.forget()
        assert loaded == expected  # the first one says nothing: it connects and maps


def test_an_agents_estimate_decides_nothing() -> None:
    """It may be of loads that waited for an engine."""
    pool = ScriptedPool(chunks=shared_chunks(), estimated_load_ms=1e6)
    engine = Engine(pool)
    engine.cache.note_prefill(1600, 1600.0)
    assert engine.run(PROMPT).loaded.loaded_chunks == 3


def test_a_prefix_that_needs_what_another_one_loads_begins_after_it() -> None:
    pool = ScriptedPool(chunks=shared_chunks())
    engine = Engine(pool)
    running = engine.cache.begin_beside(list(PROMPT))
    assert running is not None
    assert not running.finished
    assert engine.cache.begin_beside(list(PROMPT)) is None
    found = running.finish()
    again = engine.cache.begin_beside(list(PROMPT))
    assert again is not None
    assert again.finished
    assert (found.loaded.loaded_chunks, again.finish().own_chunks) == (3, 3)
    engine.cache.release(found)
    engine.cache.release(again.finish())
    assert len(pool.loads) == 1


def test_a_load_may_take_twice_as_long_as_computing_would() -> None:
    for token_s, expected_s in ((0.0, 30.0), (0.001, 1.0), (0.1, 9.6), (10.0, 30.0)):
        pool = ScriptedPool(chunks=shared_chunks())
        engine = Engine(pool)
        if token_s:
            engine.cache.note_prefill(1000, 1000 * token_s * 1e3)
        for _ in range(3):
            engine.run(PROMPT, generated=0)
            engine.cache.forget()
        assert pool.timeouts_s == pytest.approx([30.0, 30.0, expected_s])


def test_what_is_available_is_reported_without_loading() -> None:
    pool = ScriptedPool(chunks=shared_chunks())
    engine = Engine(pool)
    assert engine.cache.available_chunks(list(PROMPT)) == 3
    assert pool.loads == []
    engine.run(PROMPT[:20], generated=0)
    pool.chunks = {}
    assert engine.cache.available_chunks(list(PROMPT)) == 1
    pool.match_error = ServiceUnavailable("gone")
    with pytest.raises(ServiceUnavailable):
        engine.cache.available_chunks(list(PROMPT))
    assert Engine().cache.available_chunks(list(PROMPT)) == 0
