"""vLLM's connector loads prefixes out of another engine's GPU cache, through real agents, on host memory."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

from kvpool.core.elements import Dtype
from kvpool.core.geometry import KvGroup
from kvpool.core.keyspace import KeyspaceSpec
from tests.fixtures.peer_ranks import PeerHost, peer_host
from tests.fixtures.vllm_block_engine import BlockEngine, Ran

CHUNK = 32
SPEC = KeyspaceSpec(model_id="m", model_revision="r", groups=(KvGroup(2, 2, 16),), dtype=Dtype.BF16, chunk_tokens=CHUNK)
T = TypeVar("T")


def prompt(number: int, tokens: int = 4 * CHUNK + 5) -> list[int]:
    return [1000 * number + token for token in range(tokens)]


@contextmanager
def engines(host: PeerHost, **options: Any) -> Iterator[Callable[[int], BlockEngine]]:
    """Makes engines at agents, in the thread that calls."""
    made: list[BlockEngine] = []

    def engine(agent: int) -> BlockEngine:
        values: dict[str, Any] = {"block_count": 40}
        made.append(BlockEngine(host.gpu, host.agents[agent].endpoint, SPEC, **(values | options)))
        return made[-1]

    try:
        yield engine
    finally:
        for one in made:
            one.close()


async def in_thread(host: PeerHost, work: Callable[[Callable[[int], BlockEngine]], T], **options: Any) -> T:
    def run() -> T:
        with engines(host, **options) as engine:
            return work(engine)

    return await asyncio.to_thread(run)


async def test_what_an_idle_engine_has_computed_is_copied_by_another_one() -> None:
    def work(engine: Callable[[int], BlockEngine]) -> tuple[Ran, Ran, dict[str, int | float]]:
        source, other = engine(0), engine(1)
        computed = source.run(prompt(1))
        source.announced()
        copied = other.run(prompt(1))
        return computed, copied, other.scheduler.counters.take()

    async with peer_host(2) as host:
        computed, copied, counters = await in_thread(host, work)
        assert (computed.held, computed.loaded) == (0, 0)
        assert (copied.held, copied.loaded, copied.wrong_blocks) == (0, 4 * CHUNK, [])
        assert counters["gpu_tokens"] == 4 * CHUNK
        assert "failed_load_chunks" not in counters
        assert host.devices[1].launched == 1


async def test_what_was_copied_can_be_copied_on_and_own_blocks_come_first() -> None:
    def work(engine: Callable[[int], BlockEngine]) -> list[Ran]:
        first, second, third = engine(0), engine(1), engine(0)
        first.run(prompt(1))
        second.run(prompt(1))
        second.announced()
        first.scheduler.reset_cache()  # other weights: nothing is found under its hashes, what it announced stays
        first.generations.raise_all()
        longer = prompt(1) + [7] * CHUNK
        return [third.run(prompt(1)[: 2 * CHUNK + 1]), third.run(longer)]

    async with peer_host(2) as host:
        short, long = await in_thread(host, work)
        assert (short.held, short.loaded, short.wrong_blocks) == (0, 2 * CHUNK, [])
        assert (long.held, long.loaded, long.wrong_blocks) == (2 * CHUNK, 2 * CHUNK, [])


async def test_what_the_source_has_given_away_is_computed() -> None:
    def work(engine: Callable[[int], BlockEngine]) -> list[Ran]:
        source, other = engine(0), engine(1)
        source.run(prompt(1))
        for number in range(2, 5):  # 39 blocks: nothing of the first prompt is left
            source.run(prompt(number))
        source.announced()
        return [other.run(prompt(number)) for number in (1, 4)]

    async with peer_host(2) as host:
        gone, there = await in_thread(host, work)
        assert gone.loaded == 0
        assert (there.loaded, there.wrong_blocks) == (4 * CHUNK, [])


async def test_an_aborted_request_leaves_what_it_had_computed() -> None:
    def work(engine: Callable[[int], BlockEngine]) -> Ran:
        source, other = engine(0), engine(1)
        source.run(prompt(1), abort_after=1)
        source.announced()
        return other.run(prompt(1))

    async with peer_host(2) as host:
        copied = await in_thread(host, work)
        assert (copied.loaded, copied.wrong_blocks) == (2 * CHUNK, [])


async def test_a_source_whose_worker_leaves_costs_no_request() -> None:
    def work(engine: Callable[[int], BlockEngine]) -> list[Ran]:
        source, other = engine(0), engine(1)
        source.run(prompt(1))
        source.announced()
        copied = other.run(prompt(1)[: CHUNK + 1])
        source.leave()
        return [copied, other.run(prompt(1))]

    async with peer_host(2) as host:
        copied, alone = await in_thread(host, work)
        assert (copied.loaded, alone.held, alone.loaded) == (CHUNK, CHUNK, 0)


@pytest.mark.parametrize("seed", range(3))
async def test_engines_that_evict_and_copy_at_once_never_use_a_wrong_byte(seed: int) -> None:
    """Two engines with small caches, each on its thread, ask for few prompts in any order."""

    def use(engine: BlockEngine, own_seed: int) -> list[Ran]:
        choose, runs = random.Random(own_seed), list[Ran]()
        for turn in range(25):
            ran = engine.run(
                prompt(choose.randrange(4), choose.choice([2, 3, 4]) * CHUNK + choose.randrange(9)),
                step_tokens=choose.choice([32, 64, 200]),
                abort_after=choose.choice([None, None, 1]),
            )
            runs.append(ran)
            if turn % 5 == 0:
                engine.announced()  # so that the other one finds something, however late announcements are
        return runs

    async with peer_host(2) as host:

        def work(engine: Callable[[int], BlockEngine]) -> list[list[Ran]]:
            pair = [engine(0), engine(1)]
            with ThreadPoolExecutor(2) as threads:
                return list(threads.map(use, pair, (10 * seed, 10 * seed + 1)))

        runs = await in_thread(host, work, block_count=26)
        assert not [ran for each in runs for ran in each if ran.wrong_blocks]
        assert any(ran.loaded for each in runs for ran in each)
