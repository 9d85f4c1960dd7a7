"""What breaks in the middle of a load or store on a GPU: bad pages, cancels, a full GPU, a link or GPU that fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvpool.client.gpuagent import EngineSession
from kvpool.client.hashing import Prompt
from kvpool.core.elements import Codec
from kvpool.core.errors import KvPoolError, PageCorrupt, PageMissing, Stopped
from kvpool.core.page import HEADER_BYTES, PageKey
from tests.fixtures.agent import prompt, run_load, run_store
from tests.fixtures.gpu_agent import GpuEngine
from tests.fixtures.host_agent import SPEC, HostAgent, host_agent
from tests.fixtures.host_gpu import Path
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.standstill import stood_still

PATHS = pytest.mark.parametrize("path", Path)
CHUNKS = 4


async def stored(one: HostAgent, chunk_count: int = CHUNKS) -> tuple[GpuEngine, EngineSession, Prompt]:
    """An engine whose chunks are in the pool and no longer in its own blocks."""
    engine = one.engine()
    session = await engine.open()
    chain = prompt(session, chunk_count)
    engine.compute(chain, range(chunk_count))
    assert (await run_store(session, engine.span(chain, range(chunk_count)))).stored_chunks == chunk_count
    engine.clear()
    return engine, session, chain


def flip(at: int) -> Callable[[HostAgent, PageKey], None]:
    def damage(one: HostAgent, key: PageKey) -> None:
        page = bytearray(one.world.cluster.pages[key])
        page[at] ^= 1
        one.world.cluster.pages[key] = bytes(page)

    return damage


def lose(one: HostAgent, key: PageKey) -> None:
    del one.world.cluster.pages[key]


DAMAGES = {
    "absent": (lose, PageMissing),
    "payload": (flip(HEADER_BYTES + 70), PageCorrupt),
    "header": (flip(20), PageCorrupt),
    "sums": (flip(-3), PageCorrupt),
}


@PATHS
@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_bad_page_in_the_middle_of_a_load_is_never_scattered(path: Path, damage: str) -> None:
    """Chunks before it are usable; it and those after it are reported."""
    spoil, error = DAMAGES[damage]
    async with host_agent(path=path) as one:
        engine, session, chain = await stored(one)
        spoil(one, PageKey(session.keyspace, chain.hashes[2], 0))
        outcome = await run_load(session, engine.span(chain, range(CHUNKS)))
        assert (outcome.loaded_chunks, outcome.failed_chunks) == (2, (2, 3))
        assert isinstance(outcome.error, error)
        assert engine.holds(chain, range(2))
        assert not any(layer[:, engine.blocks[2]].any() for layer in engine.memory())
        one.nothing_is_out()
        # The pool has dropped it, so that it can be stored anew.
        engine.compute(chain, range(CHUNKS))
        assert (await run_store(session, engine.span(chain, range(CHUNKS)))).stored_chunks == 1
        assert await session.close()


@PATHS
async def test_a_cancelled_load_is_over_only_when_its_copies_are(path: Path) -> None:
    async with host_agent(path=path) as one:
        engine, session, chain = await stored(one)
        one.hold_copies()
        handle = await session.load(engine.span(chain, range(CHUNKS)), wait_s=PATIENCE_S)
        await one.copying()
        handle.cancel()
        await session.match(chain.hashes, held_chunks=CHUNKS)  # answered after the cancel has been read
        assert not handle.released
        assert one.world.pools[0].reads  # the copy engine reads them
        one.release_copies()
        outcome = await handle.done(PATIENCE_S)
        one.nothing_is_out()
        after = [layer.copy() for layer in engine.memory()]
        assert outcome.loaded_chunks + len(outcome.failed_chunks) == CHUNKS
        assert engine.holds(chain, range(outcome.loaded_chunks))
        engine.clear()
        again = await run_load(session, engine.span(chain, range(CHUNKS)))
        assert again.loaded_chunks == CHUNKS
        assert engine.holds(chain, range(CHUNKS))
        assert any(layer.any() for layer in after)
        assert await session.close()


@PATHS
async def test_a_cancelled_store_is_over_only_when_its_gather_is_and_leaves_nothing(path: Path) -> None:
    async with host_agent(path=path) as one:
        engine = one.engine()
        session = await engine.open()
        chain = prompt(session, CHUNKS)
        engine.compute(chain, range(CHUNKS))
        one.hold_copies()
        span = engine.span(chain, range(CHUNKS))
        handle = await session.store(span)
        await one.copying()
        handle.cancel()
        await session.match(chain.hashes, held_chunks=CHUNKS)
        assert not handle.released
        assert one.world.cluster.writing
        one.release_copies()
        outcome = await handle.done(PATIENCE_S)
        assert set(outcome.failed_chunks) == set(range(CHUNKS))
        assert isinstance(outcome.failed_chunks[0], Stopped)
        assert not one.world.cluster.pages
        one.nothing_is_out()
        assert (await run_store(session, span)).stored_chunks == CHUNKS
        assert await session.close()


async def test_a_deadline_in_the_middle_of_a_load_does_not_end_its_hold() -> None:
    async with host_agent(path=Path.RUNS) as one:
        engine, session, chain = await stored(one)
        one.hold_copies()
        handle = await session.load(engine.span(chain, range(CHUNKS)), wait_s=PATIENCE_S)
        await one.copying()
        stood_still(2 * PATIENCE_S)
        with pytest.raises(KvPoolError, match="not done within"):
            await handle.done(0.2)
        assert not handle.released
        one.release_copies()
        outcome = await handle.done(PATIENCE_S)
        assert engine.holds(chain, range(outcome.loaded_chunks))
        assert await session.close()


@pytest.mark.parametrize(("memory_bytes", "path"), [(5 << 20, Path.KERNELS), (1 << 20, Path.RUNS), (0, Path.RUNS)])
async def test_a_gpu_without_room_for_all_scratch_is_served_all_the_same(memory_bytes: int, path: Path) -> None:
    async with host_agent(memory_bytes=memory_bytes, scratch_bytes=64 << 20) as one:
        engine, session, chain = await stored(one)
        assert (one.device.caches[0].load.kernels is not None) == (path is Path.KERNELS)
        assert (await run_load(session, engine.span(chain, range(CHUNKS)))).loaded_chunks == CHUNKS
        assert engine.holds(chain, range(CHUNKS))
        assert await session.close()


async def test_a_codec_that_the_gpu_has_no_scratch_for_is_refused_saying_what_to_do() -> None:
    async with host_agent(memory_bytes=1 << 20) as one:
        engine = one.engine(spec=replace(SPEC, codec=Codec.INT8_GROUP8))
        with pytest.raises(
            KvPoolError, match="no room for the scratch that a codec needs; leave the agent more memory"
        ):
            await engine.open()
        plain = one.engine()
        assert await (await plain.open()).close()


@PATHS
@pytest.mark.parametrize("operation", ["store", "load"])
async def test_a_link_that_fails_once_costs_the_chunks_on_it(path: Path, operation: str) -> None:
    async with host_agent(path=path) as one:
        engine, session, chain = await stored(one)
        if operation == "store":
            one.world.cluster.pages.clear()
            engine.compute(chain, range(CHUNKS))
        one.runtime.fail_copies = 1
        run = run_store if operation == "store" else run_load
        outcome = await run(session, engine.span(chain, range(CHUNKS)))
        assert set(outcome.failed_chunks) == set(range(CHUNKS))
        error = outcome.failed_chunks[0] if operation == "store" else outcome.error
        assert "the link failed" in error.message
        one.nothing_is_out()
        assert not one.device.broken
        again = await run(session, engine.span(chain, range(CHUNKS)))
        assert not again.failed_chunks
        assert await session.close()


async def test_a_gpu_that_breaks_fails_every_request_cleanly_and_asks_for_a_new_agent() -> None:
    async with host_agent(path=Path.RUNS) as one:
        engine, session, chain = await stored(one, 3)
        other = prompt(session, 3, seed=9)
        one.hold_copies()
        loads = [await session.load(engine.span(chain, [number], at=number), wait_s=PATIENCE_S) for number in range(3)]
        await one.copying()
        one.runtime.is_broken, one.runtime.fail_copies = True, 1_000_000
        one.release_copies()
        for handle in loads:
            outcome = await handle.done(PATIENCE_S)
            assert outcome.loaded_chunks == 0
            assert outcome.error is not None
            assert handle.released
        assert len(one.device.broken) == 1
        assert "restart the agent" in one.device.broken[0].message
        stored_now = await run_store(session, engine.span(other, range(3)))
        assert set(stored_now.failed_chunks) == {0, 1, 2}
        one.nothing_is_out()
        one.runtime.is_broken, one.runtime.fail_copies = False, 0
        for _ in range(2):  # it stays so, whatever the driver says later
            outcome = await run_load(session, engine.span(chain, range(3)))
            assert "restart the agent" in outcome.error.message
        assert await session.close()
