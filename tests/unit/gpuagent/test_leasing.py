"""What a lease takes, holds and gives back."""

from __future__ import annotations

import asyncio

import pytest

from kvpool.core.errors import KvPoolError, LeaseLost, NotServed, Overloaded
from kvpool.testing import eventually
from kvpool_gpuagent.config import GpuAgentConfig
from kvpool_gpuagent.core.leases import LeaseBudget
from kvpool_gpuagent.engine.leasing import LeaseOutcome, SessionLeases
from kvpool_gpuagent.engine.locations import ChainLocations, SeenChunks
from tests.fixtures.agent_fakes import MemoryIndex
from tests.unit.gpuagent.runs import RANK, SHARDS, Bench, chunk_hash, span

LONG_S = 1e4


class Leased:
    """Leases of a session; chunks have four pages, and leases may hold `pages` of them."""

    def __init__(self, bench: Bench, *, pages: int = 32, **config: int) -> None:
        bench.pool.resize(4 * pages)
        self.bench, self.budget = bench, LeaseBudget(0.5)
        seen = SeenChunks(100)
        for number in range(20):
            seen.remember(chunk_hash(number), ((), RANK.shards))
        locations = ChainLocations(RANK, MemoryIndex(), bench.pool, bench.metrics, seen, host_id="")
        values = {"data_dir": "/unused", "index_endpoints": ("unused:1",), "socket": "/unused/s"}
        made = GpuAgentConfig(**values, **config)  # type: ignore[arg-type]
        self.leases = SessionLeases(RANK, locations, bench.pool, self.budget, made, bench.metrics)

    async def lease(
        self, count: int, number: int = 1, hold_s: float = LONG_S, *, hold_only: bool = False
    ) -> LeaseOutcome:
        return await self.leases.lease(number, span(range(count)), hold_s, hold_only=hold_only)

    async def end(self) -> None:
        self.leases.stop_all()
        await self.leases.wait_ended()
        self.bench.nothing_is_out()
        assert self.budget.page_count == 0


async def test_pages_are_held_until_the_lease_is_cancelled() -> None:
    bench = Bench()
    bench.offer(range(4))
    leased = Leased(bench)
    assert await leased.lease(4) == LeaseOutcome(held_chunks=4, staged_chunks=4)
    assert bench.pool.slots_out == 4 * len(SHARDS)
    assert bench.metric("leased_pages") == 16
    leased.leases.cancel(2)
    leased.leases.cancel(1)
    await eventually(lambda: 1 not in leased.leases)
    bench.nothing_is_out()
    assert bench.metric("leased_pages") == 0
    assert bench.metric("leased_chunks_total", outcome="held") == 4


async def test_chunks_beyond_the_share_are_staged_and_let_go() -> None:
    bench = Bench()
    bench.offer(range(12))
    leased = Leased(bench, pages=16)
    assert await leased.lease(12) == LeaseOutcome(held_chunks=3, staged_chunks=12)
    assert bench.pool.slots_out == 3 * len(SHARDS)
    assert bench.pool.most_reads == 4 * len(SHARDS)
    assert {page.key.chunk_hash for page in bench.pool.asked} == {chunk_hash(number) for number in range(12)}
    await leased.end()


async def test_chunks_beyond_the_share_are_left_alone_if_so_asked() -> None:
    bench = Bench()
    bench.offer(range(12))
    leased = Leased(bench, pages=16)
    assert await leased.lease(12, hold_only=True) == LeaseOutcome(held_chunks=4, staged_chunks=4)
    assert {page.key.chunk_hash for page in bench.pool.asked} == {chunk_hash(number) for number in range(4)}
    await leased.end()


async def test_a_lease_ends_before_the_first_chunk_that_is_not_to_be_had() -> None:
    bench = Bench()
    bench.offer([0, 1])
    bench.offer([2], shards=[0, 1, 3])
    bench.offer([3])
    leased = Leased(bench)
    assert await leased.lease(4) == LeaseOutcome(held_chunks=2, staged_chunks=2)
    assert bench.pool.slots_out == 2 * len(SHARDS)
    assert bench.metric("leased_chunks_total", outcome="left") == 2
    await leased.end()


async def test_a_lease_on_nothing_ends_at_once() -> None:
    leased = Leased(Bench())
    assert await leased.lease(2) == LeaseOutcome(held_chunks=0, staged_chunks=0)
    await eventually(lambda: 1 not in leased.leases)
    await leased.end()


async def test_a_lease_ends_with_its_time_which_the_agent_bounds() -> None:
    bench = Bench()
    bench.offer(range(2))
    leased = Leased(bench, lease_ms_max=1)
    await leased.lease(2)
    await eventually(lambda: 1 not in leased.leases)
    await leased.end()


async def test_a_lease_lets_go_of_its_slots_when_the_session_of_its_pool_breaks() -> None:
    """The next session opens only when all slots of the broken one are back: until then the engines go without."""
    bench = Bench()
    bench.offer(range(2))
    leased = Leased(bench, lease_ms_max=10_000_000)
    await leased.lease(2)
    assert bench.pool.slots_out == 2 * len(SHARDS)
    bench.pool.broken.set()
    await eventually(lambda: 1 not in leased.leases)
    bench.nothing_is_out()


async def taking_pages() -> tuple[Leased, asyncio.Future[LeaseOutcome]]:
    """A lease of four chunks that waits for a page of the third one."""
    bench = Bench()
    bench.offer(range(4))
    bench.faults.gates["page 2 1"] = asyncio.Event()
    leased = Leased(bench)
    taking = asyncio.ensure_future(leased.lease(4))
    await eventually(lambda: "page 2 1" in bench.faults.steps)
    return leased, taking


async def test_a_lease_that_is_cancelled_while_it_waits_for_pages_holds_nothing() -> None:
    leased, taking = await taking_pages()
    leased.leases.cancel(1)
    assert (await taking).held_chunks == 2
    await eventually(lambda: 1 not in leased.leases)
    leased.bench.nothing_is_out()
    await leased.end()


async def test_a_session_that_closes_waits_for_leases_that_still_take_pages() -> None:
    leased, taking = await taking_pages()
    await leased.end()
    await taking


async def test_slots_of_a_broken_session_are_given_back_at_once() -> None:
    """Its successor is opened only after that."""
    bench = Bench()
    bench.offer(range(4))
    leased = Leased(bench)
    await leased.lease(4)
    bench.pool.broken.set()
    await eventually(lambda: 1 not in leased.leases)
    await leased.end()


@pytest.mark.parametrize("error", [LeaseLost("the session broke"), ZeroDivisionError()])
async def test_a_failure_leaves_nothing_behind(error: Exception) -> None:
    bench = Bench()
    bench.offer(range(4))

    def before(step: str) -> None:
        if step == "page 1 0":
            raise error

    bench.faults.before = before
    leased = Leased(bench)
    if isinstance(error, KvPoolError):
        assert (await leased.lease(4)).held_chunks == 1
    else:
        with pytest.raises(ZeroDivisionError):
            await leased.lease(4)
    await leased.end()


async def test_without_staging_memory_there_are_no_leases() -> None:
    leased = Leased(Bench())
    leased.bench.pool.arena_bytes = 0
    with pytest.raises(NotServed, match="no local pagestore"):
        await leased.lease(1)
    assert 1 not in leased.leases


async def test_a_session_has_only_so_many_leases() -> None:
    bench = Bench()
    bench.offer(range(1))
    leased = Leased(bench, max_running_leases=1)
    await leased.lease(1)
    with pytest.raises(Overloaded, match="1 leases run"):
        await leased.lease(1, 2)
    await leased.end()


async def test_what_leases_hold_together_is_bounded() -> None:
    bench = Bench()
    bench.offer(range(8))
    leased = Leased(bench, pages=16)
    await leased.lease(4)
    with pytest.raises(Overloaded, match="as they may"):
        await leased.lease(1, 2)
    assert 2 not in leased.leases
    await leased.end()


async def test_a_lease_that_holds_nothing_is_over() -> None:
    bench = Bench()
    bench.offer([0], shards=[0, 1, 3])  # one page of the first chunk is gone
    bench.offer([1, 2, 3])
    leased = Leased(bench)
    assert await leased.lease(4) == LeaseOutcome(held_chunks=0, staged_chunks=0)
    await eventually(lambda: 1 not in leased.leases)
    assert leased.budget.page_count == 0


async def test_a_lease_takes_of_the_budget_what_it_holds() -> None:
    bench = Bench()
    bench.offer([0])
    leased = Leased(bench, pages=64)
    assert await leased.lease(12) == LeaseOutcome(held_chunks=1, staged_chunks=1)
    assert leased.budget.page_count == len(SHARDS)
    await leased.end()


async def test_a_lease_that_only_stages_is_over_when_it_has() -> None:
    bench = Bench()
    bench.offer(range(6))
    leased = Leased(bench, pages=4)  # of one session: one chunk, through which the others pass
    assert await leased.lease(6) == LeaseOutcome(held_chunks=0, staged_chunks=6)
    await eventually(lambda: 1 not in leased.leases)
    assert leased.budget.page_count == 0
