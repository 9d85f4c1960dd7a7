"""An engine behind a pool that has everything: it ends with what is quicker, and pays little to find out."""

import statistics
from collections.abc import Callable, Sequence

import pytest

from kvpool.client.engine_items import EngineMatchRun, EngineSource, LoadResult, MatchResult, StoreResult
from kvpool.client.hashing import Prompt
from kvpool.client.sync import Handle
from kvpool.connectors.prefix_cache import PrefixCache
from kvpool.testing import ManualClock
from tests.unit.connectors.scripted_pool import HASH_KEY, ScriptedHandle

CHUNK, CHUNK_BYTES = 64, 1 << 16
Milliseconds = Callable[[int], float]


class FullPool:
    """Has every chunk. Estimates as an agent does, by the bytes a second of the load before."""

    def __init__(self, load_ms: Milliseconds) -> None:
        self.load_ms, self.ms_per_chunk = load_ms, 0.0

    def hash_key(self) -> bytes | None:
        return HASH_KEY

    def match(self, prompt: Prompt, *, held_chunks: int = 0) -> MatchResult:
        count = prompt.chunk_count - held_chunks
        run = EngineMatchRun(count, EngineSource.REMOTE, count * self.ms_per_chunk)
        return MatchResult(prompt.chunk_count, runs=(run,))

    def start_load(
        self,
        prompt: Prompt,
        block_table: Sequence[int],
        *,
        first_chunk: int,
        end_chunk: int,
        timeout_s: float,
        compute_us_per_token: float = 0.0,
    ) -> Handle[LoadResult]:
        count = end_chunk - first_chunk
        duration_ms = self.load_ms(count)
        self.ms_per_chunk = duration_ms / count
        return ScriptedHandle(LoadResult(loaded_chunks=count, duration_s=duration_ms / 1e3), 1_000)

    def store(
        self, prompt: Prompt, block_table: Sequence[int], *, first_chunk: int, end_chunk: int
    ) -> Handle[StoreResult]:
        return ScriptedHandle(StoreResult())

    def close(self) -> None:
        pass


class TimedEngine:
    """Of known speeds: time passes with its requests only, on a clock of its own."""

    def __init__(self, prefill_ms: Milliseconds, load_ms: Milliseconds) -> None:
        self.prefill_ms, self.pool, self.clock = prefill_ms, FullPool(load_ms), ManualClock()
        self.cache = PrefixCache(
            self.pool, block_count=512, chunk_tokens=CHUNK, chunk_bytes=CHUNK_BYTES, now_s=self.clock.monotonic_s
        )
        self.tokens_so_far = 0

    def first_token_ms(self, token_count: int, *, pause_s: float = 0.0) -> float:
        """Of a new prompt, `pause_s` after the one before."""
        self.clock.advance(pause_s)
        first = self.tokens_so_far
        self.tokens_so_far += token_count
        tokens = list(range(first, first + token_count))
        found = self.cache.find(tokens)
        computed = token_count - len(found.blocks) * CHUNK
        self.cache.release(found)
        duration_ms = self.prefill_ms(computed)
        self.cache.note_prefill(computed, duration_ms)
        whole_ms = duration_ms + found.loaded.duration_s * 1e3
        self.clock.advance(whole_ms / 1e3)
        self.cache.forget()
        return whole_ms


def fast_gpu(token_count: int) -> float:
    return 20.0 + 0.001 * token_count


def computing_fast(load_ms: Milliseconds) -> TimedEngine:
    """An engine that has computed a prompt of its own."""
    engine = TimedEngine(fast_gpu, load_ms)
    engine.cache.note_prefill(2000, fast_gpu(2000))
    return engine


@pytest.mark.parametrize("rest", [1, 5, 40, 64])
@pytest.mark.parametrize("chunks", [4, 30, 120])
def test_a_gpu_that_computes_a_small_model_in_no_time_soon_does_so(rest: int, chunks: int) -> None:
    engine = computing_fast(lambda count: 150.0)
    times_ms = [engine.first_token_ms(chunks * CHUNK + rest, pause_s=0.5) for _ in range(40)]
    assert sum(duration_ms > 30 for duration_ms in times_ms[:6]) <= 2, times_ms
    assert sum(duration_ms > 30 for duration_ms in times_ms) <= 4, "a load is tried every ten seconds"
    assert max(times_ms) < 200, "what is tried costs no more than a load"


def test_prompts_of_many_lengths_teach_the_same() -> None:
    engine = computing_fast(lambda count: 150.0)
    lengths = [2000, 90, 130, 1700, 300, 64, 2200, 150, 1900, 100]
    times_ms = [engine.first_token_ms(tokens, pause_s=0.5) for tokens in lengths * 4]
    assert statistics.median(times_ms[:10]) < 30
    assert sum(duration_ms > 30 for duration_ms in times_ms[10:]) <= 2


def test_loads_are_tried_again_but_seldom() -> None:
    engine = computing_fast(lambda count: 150.0)
    times_ms = [engine.first_token_ms(2000, pause_s=1.0) for _ in range(1000)]
    slow = sum(duration_ms > 30 for duration_ms in times_ms)
    assert 50 < slow < 105, "every ten seconds"


def test_loads_that_become_quick_are_found_out() -> None:
    load_ms = 300.0
    engine = TimedEngine(lambda count: 20.0 + 0.05 * count, lambda count: load_ms)
    engine.cache.note_prefill(2000, 120.0)
    before = [engine.first_token_ms(2000, pause_s=1.0) for _ in range(10)]
    assert before[-1] > 100
    load_ms = 10.0
    after = [engine.first_token_ms(2000, pause_s=1.0) for _ in range(100)]
    assert after[-1] < 50


@pytest.mark.parametrize("rest", [1, 40])
@pytest.mark.parametrize(
    ("prefill_ms", "load_ms"),
    [
        (lambda tokens: 25.0 + 0.035 * tokens, lambda chunks: 8.0 + 0.35 * chunks),  # 8B on an H200
        (lambda tokens: 5.0 + 1.2 * tokens, lambda chunks: 20.0 + 9.0 * chunks),  # the demo on two cores
        (lambda tokens: 500.0 + 20.0 * tokens, lambda chunks: 50.0 + 15.0 * chunks),  # 8B on a CPU
    ],
    ids=["h200", "demo", "cpu"],
)
@pytest.mark.slow
def test_where_computing_is_slow_loads_go_on(prefill_ms: Milliseconds, load_ms: Milliseconds, rest: int) -> None:
    engine = TimedEngine(prefill_ms, load_ms)
    loaded_ms = load_ms(120) + prefill_ms(rest)
    times_ms = [engine.first_token_ms(120 * CHUNK + rest, pause_s=3.0) for _ in range(400)]
    assert max(times_ms) <= 1.01 * loaded_ms
    assert sum(times_ms) <= 1.01 * loaded_ms * len(times_ms)
    assert statistics.median(times_ms[:6]) == pytest.approx(loaded_ms, rel=0.02)


def test_an_engine_that_becomes_quick_is_found_out() -> None:
    """It shared its machine with others, say, when it was measured."""
    slowness = 50.0
    engine = TimedEngine(lambda tokens: slowness * fast_gpu(tokens), lambda count: 150.0)
    times_ms: list[float] = []
    for number in range(100):
        slowness = 50.0 if number < 20 else 1.0
        if number % 5 == 0:  # a prompt that the pool does not have
            engine.cache.note_prefill(500, engine.prefill_ms(500))
        times_ms.append(engine.first_token_ms(2000, pause_s=1.0))
    assert min(times_ms[5:20]) > 1000
    assert sum(duration_ms > 30 for duration_ms in times_ms[80:]) < 5
