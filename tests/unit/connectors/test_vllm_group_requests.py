"""Requests of a model with several KV cache groups: what is loaded and stored of each, and when that is over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvpool.client.engine_items import MatchResult
from kvpool.client.hashing import Prompt
from kvpool.connectors.vllm.engine_introspection import step_arrives
from kvpool.connectors.vllm.kv_groups import KvCacheGroup
from kvpool.connectors.vllm.settings import VllmSettings
from kvpool.connectors.vllm.step_events import StepEvents
from kvpool.connectors.vllm.step_jobs import LoadJob, LoadReport, StepJobs, StoreJob
from kvpool.connectors.vllm.worker import ConnectorWorker
from kvpool.connectors.vllm.worker_stores import WorkerKvCache, WorkerKvCacheGroup
from tests.fixtures.patience import PATIENCE_S
from tests.unit.connectors.test_vllm_worker import Pool
from tests.unit.connectors.vllm_fakes import FakeConnection, FakePool, FakeRequest, a_request
from tests.unit.connectors.vllm_jobs import BLOCK, CHUNK, CHUNK_BYTES, a_load, a_store
from tests.unit.connectors.vllm_worlds import World, hashes_of

FULL = KvCacheGroup(block_tokens=BLOCK, chunk_bytes=CHUNK_BYTES, members=(1,))
WINDOW = KvCacheGroup(block_tokens=BLOCK, chunk_bytes=CHUNK_BYTES, window_tokens=40)
FULL_BLOCKS, WINDOW_BLOCKS = list(range(100, 140)), list(range(200, 240))


def a_world(full_chunks: int = 0, window_chunks: int = 0, **settings: Any) -> World:
    """Of a model with layers of a window, and of full attention."""
    pools = FakePool(window_chunks, hash_key=b"w" * 32), FakePool(full_chunks)
    return World(*pools, groups=[WINDOW, FULL], **{"store": "prefill", "load": "always", **settings})


def blocks_after(skipped: int) -> list[list[int]]:
    """Of a request whose first window blocks vLLM has taken away."""
    return [[0] * skipped + WINDOW_BLOCKS[skipped:], FULL_BLOCKS]


def computed(world: World, request: FakeRequest, token_count: int, *, skipped: int = 0, **more: Any) -> StepJobs:
    """A step that computes so many tokens more."""
    jobs = world.side.build_jobs({request.request_id: token_count}, (), lambda _: blocks_after(skipped), **more)
    request.num_computed_tokens += token_count
    return jobs


def chunks_of(jobs: Sequence[LoadJob | StoreJob]) -> list[tuple[int, range]]:
    """Group and chunks of each."""
    return [(job.group, range(job.first_chunk, job.end_chunk)) for job in jobs]


def test_a_load_has_an_order_for_each_group_of_what_it_reads() -> None:
    world, request = a_world(4, 4), a_request(4 * CHUNK + 5)
    assert world.match(request) == 4 * CHUNK
    # 128 tokens: token 128 reads from 89 on, in the block at 80.
    world.side.allocated(request, blocks_after(5), 4 * CHUNK)
    window, full = world.build().loads
    assert chunks_of([window, full]) == [(0, range(2, 4)), (1, range(4))]
    assert (window.first_token, full.first_token) == (80, 0)
    assert window.block_ids.tolist() == blocks_after(5)[0][:8]
    assert hashes_of(window) != hashes_of(full)


def test_the_boundary_is_one_that_all_groups_have() -> None:
    assert a_world(4, 3).match(a_request(4 * CHUNK + 5)) == 3 * CHUNK
    assert a_world(2, 4).match(a_request(4 * CHUNK + 5)) == 2 * CHUNK
    assert a_world(4, 0).match(a_request(4 * CHUNK + 5)) == 0
    assert a_world(4, 3).match(a_request(4 * CHUNK + 5), 3 * CHUNK) == 0, "the engine holds as much"


def test_chunks_are_stored_while_their_blocks_are_there() -> None:
    world, request = a_world(), a_request(6 * CHUNK)
    assert world.match(request) == 0
    # What has left the window when the step ends is a job of its own: its blocks may be used again at once.
    assert chunks_of(computed(world, request, 4 * CHUNK).stores) == [(0, range(2)), (0, range(2, 4)), (1, range(4))]
    # A part of chunk 4 is gone when its last token is computed.
    assert chunks_of(computed(world, request, 2 * CHUNK, skipped=9).stores) == [(0, range(5, 6)), (1, range(4, 6))]


def test_chunks_of_a_window_that_the_pool_gave_up_are_stored_again() -> None:
    world, first, again = a_world(), a_request(4 * CHUNK, "first"), a_request(4 * CHUNK, "again")
    world.match(first)
    world.stored(computed(world, first, 4 * CHUNK))
    world.connection.pools[1].chunk_count = 4  # of full attention all are there, of the window none
    assert world.match(again) == 0
    steps = [computed(world, again, CHUNK).stores for _ in range(4)]
    assert sorted(
        at for jobs in steps for job in jobs if job.group == 0 for at in range(job.first_chunk, job.end_chunk)
    ) == [*range(4)]
    assert not [job for jobs in steps for job in jobs if job.group == 1]


def test_generated_chunks_of_a_window_are_stored_before_they_leave_it() -> None:
    world, request = a_world(), a_request(2 * CHUNK)
    world.match(request)
    assert chunks_of(computed(world, request, 2 * CHUNK).stores) == [(0, range(2)), (1, range(2))]
    stores = []
    for token in range(CHUNK + 1):
        request.all_token_ids.append(token)
        stores += computed(world, request, 1, skipped=2).stores
    assert chunks_of(stores) == [(0, range(2, 3))]
    assert world.side.request_finished(request, blocks_after(4), "FINISHED_STOPPED")
    assert chunks_of(world.build().stores) == [(1, range(2, 3))]


def test_windows_are_stored_as_they_are_computed_even_if_the_rest_waits_for_the_end() -> None:
    world, request = a_world(store="finish"), a_request(2 * CHUNK + 1)
    world.match(request)
    assert chunks_of(computed(world, request, 2 * CHUNK + 1).stores) == [(0, range(2))]


def test_a_store_is_not_kept_once_one_of_its_blocks_is_given_out_again() -> None:
    world, request, other = a_world(), a_request(4 * CHUNK), a_request(CHUNK, "other", first_token=900)
    world.match(request)
    gone, kept, full = computed(world, request, 4 * CHUNK).stores
    assert (gone.group, kept.group, full.group) == (0, 0, 1)
    given = computed(world, request, 1, skipped=5, new_blocks=[WINDOW_BLOCKS[3], 300])
    assert given.overwritten == [gone.number]
    # The blocks of a request that vLLM admits, but for those that it found in its own cache.
    world.match(other, BLOCK)
    world.side.allocated_without_load(other, [[WINDOW_BLOCKS[4], 301], [FULL_BLOCKS[0], WINDOW_BLOCKS[6]]])
    assert computed(world, request, 1, skipped=5).overwritten == [kept.number]
    world.stored(StepJobs(step=1, stores=[gone, kept]))
    assert computed(world, request, 1, skipped=5, new_blocks=WINDOW_BLOCKS).overwritten == []


def test_a_block_that_two_stores_read_is_watched_until_both_have_ended() -> None:
    world, requests = a_world(), [a_request(4 * CHUNK, "one"), a_request(4 * CHUNK, "two")]
    for request in requests:
        world.match(request)
    (gone, *others), (also_gone, *more) = (computed(world, request, 4 * CHUNK).stores for request in requests)
    world.stored(StepJobs(step=1, stores=[gone]))
    given = computed(world, requests[0], 1, skipped=5, new_blocks=[WINDOW_BLOCKS[3]])
    assert given.overwritten == [also_gone.number]
    world.stored(StepJobs(step=1, stores=[also_gone, *others, *more]))
    assert computed(world, requests[0], 1, skipped=5, new_blocks=WINDOW_BLOCKS).overwritten == []
    world.side.lose_new_blocks()
    assert computed(world, requests[0], 1, skipped=5).overwritten == [], "nothing is watched any more"


def test_blocks_that_a_load_fills_are_given_out_again_too() -> None:
    world, request, other = a_world(), a_request(4 * CHUNK), a_request(4 * CHUNK + 5, "other", first_token=900)
    world.match(request)
    gone, *_ = computed(world, request, 4 * CHUNK).stores
    for pool in world.connection.pools:
        pool.chunk_count = 4
    tokens = world.match(other)
    assert tokens
    world.side.allocated(other, [[0, 0, 0, 0, 0, 300, 301, WINDOW_BLOCKS[0]], list(range(310, 318))], tokens)
    assert world.build().overwritten == [gone.number]


def test_events_name_a_chunk_once() -> None:
    world, request = a_world(), a_request(2 * CHUNK + 1)
    world.match(request)
    jobs = computed(world, request, 2 * CHUNK)
    world.stored(jobs)
    (change,) = world.side.take_events()
    assert change.hashes == hashes_of(jobs.stores[-1])


STATE = KvCacheGroup(block_tokens=CHUNK, chunk_bytes=CHUNK_BYTES, recurrent=True)
WHOLE = KvCacheGroup(block_tokens=CHUNK, chunk_bytes=CHUNK_BYTES, members=(1,))


class StatesPool(FakePool):
    """Has the states after some chunks alone."""

    def __init__(self, *chunks: int) -> None:
        super().__init__(hash_key=b"s" * 32)
        self.chunks = set(chunks)

    async def match(self, prompt: Prompt, *, held_chunks: int = 0, timeout_s: float | None = None) -> MatchResult:
        self.chunk_count = held_chunks + (held_chunks in self.chunks)
        return await super().match(prompt, held_chunks=held_chunks, timeout_s=timeout_s)


def a_state_world(*states: int, chunks: int = 8, **settings: Any) -> World:
    """Of a model with recurrent layers, and of full attention, with blocks of a chunk."""
    pools = StatesPool(*states), FakePool(chunks)
    return World(*pools, groups=[STATE, WHOLE], **{"store": "prefill", "load": "always", **settings})


def test_a_state_is_loaded_into_the_block_of_its_boundary() -> None:
    world, request = a_state_world(3), a_request(6 * CHUNK + 5)
    assert world.match(request) == 4 * CHUNK
    world.side.allocated(request, [[0, 0, 0, 77], [1, 2, 3, 4]], 4 * CHUNK)
    state, full = world.build().loads
    assert chunks_of([state, full]) == [(0, range(3, 4)), (1, range(4))]
    assert (state.first_token, state.end_token, state.block_ids.tolist()) == (3 * CHUNK, 4 * CHUNK, [0, 0, 0, 77])


def test_a_prompt_that_ends_at_a_boundary_goes_on_from_the_one_before() -> None:
    assert a_state_world(2, 3).match(a_request(4 * CHUNK)) == 3 * CHUNK
    assert a_state_world(2, 3).match(a_request(4 * CHUNK + 1)) == 4 * CHUNK
    assert a_state_world(3).match(a_request(4 * CHUNK)) == 0


@pytest.mark.parametrize(
    ("blocks", "tokens"), [([0, 0, 0, 0], 4 * CHUNK), ([0, 0, 0, 77], 4 * CHUNK - 1), ([0, 0], 4 * CHUNK)]
)
def test_no_state_is_loaded_for_another_boundary_or_into_no_block(blocks: list[int], tokens: int) -> None:
    world, request = a_state_world(3), a_request(6 * CHUNK + 5)
    assert world.match(request) == 4 * CHUNK
    world.side.allocated(request, [blocks, [1, 2, 3, 4]], tokens)
    (failing,) = world.build().loads
    assert not failing.hashes, "it ends at once, and the request is computed"


def test_states_are_stored_of_the_boundaries_that_vllm_names() -> None:
    world, request = a_state_world(chunks=0), a_request(4 * CHUNK + 5)
    world.match(request)
    blocks = [[0, 0, 0, 70, 71], [1, 2, 3, 4, 5]]
    step = {request.request_id: request.num_tokens}
    (full,) = world.side.build_jobs(step, (), lambda _: blocks).stores
    assert (full.group, full.end_chunk) == (1, 4)
    request.num_computed_tokens = request.num_tokens
    entries = [(0, 70, 4 * CHUNK), (0, 71, 4 * CHUNK + 16), (0, 0, 2 * CHUNK), (1, 4, 4 * CHUNK)]
    (state,) = world.side.build_jobs({}, (), lambda _: blocks, checkpoints={request.request_id: entries}).stores
    assert chunks_of([state]) == [(0, range(3, 4))]
    assert state.block_ids.tolist() == [0, 0, 0, 70]
    # vLLM copies the state before the request goes on, and gives its block to another one.
    assert world.side.build_jobs({}, (), lambda _: blocks, new_blocks=[71, 5]).overwritten == []
    assert world.side.build_jobs({}, (), lambda _: blocks, new_blocks=[70]).overwritten == [state.number]
    assert world.side.request_finished(request, blocks, "FINISHED_STOPPED"), (
        "stores that read its blocks have not ended"
    )
    assert world.build().stores == [], "the block of the last state has been overwritten"


def test_stores_whose_blocks_may_be_used_again_are_given_up_where_new_blocks_are_not_known() -> None:
    world, request = a_state_world(chunks=0), a_request(CHUNK + 5)
    world.match(request)
    entries = {request.request_id: [(0, 70, CHUNK)]}
    (state,) = world.side.build_jobs({}, (), lambda _: None, checkpoints=entries).stores
    world.side.lose_new_blocks()
    assert world.build().overwritten == [state.number]
    assert world.build().overwritten == []


@pytest.mark.parametrize(
    ("settings", "stored"),
    [({"store_generated": False}, 0), ({"store": "never"}, 0), ({"store": "finish"}, 1), ({}, 1)],
)
def test_states_of_generated_tokens(settings: dict[str, Any], stored: int) -> None:
    world, request = a_state_world(chunks=0, **settings), a_request(CHUNK + 5)
    world.match(request)
    request.all_token_ids += list(range(CHUNK))
    request.num_computed_tokens = 2 * CHUNK
    entries = {request.request_id: [(0, 70, 2 * CHUNK)], "unknown": [(0, 71, CHUNK)]}
    stores = world.side.build_jobs({}, (), lambda _: None, checkpoints=entries).stores
    assert len(stores) == stored


class GroupsWorld:
    """A worker's side with two groups."""

    def __init__(self, *pools: Pool, held: bool = False) -> None:
        self.connection = FakeConnection(*pools)
        self.connection.held = held
        group = WorkerKvCacheGroup(block_tokens=BLOCK, page_bytes=CHUNK_BYTES, step_events=StepEvents(None))
        self.side = ConnectorWorker(
            VllmSettings(agent="unix:/x", chunk_tokens=CHUNK),
            self.connection,  # type: ignore[arg-type]
            WorkerKvCache(groups=[group] * len(pools), all_or_nothing=True),
        )

    def load(self) -> None:
        loads = [
            a_load("r", blocks[:8], group=group, first_chunk=first_chunk, first_token=first_chunk * CHUNK)
            for group, (blocks, first_chunk) in enumerate(((WINDOW_BLOCKS, 2), (FULL_BLOCKS, 0)))
        ]
        self.side.start_loads(StepJobs(step=1, loads=loads))


def a_window_store() -> StoreJob:
    return a_store(1, "r", WINDOW_BLOCKS[:8], first_chunk=1)


def test_a_request_goes_on_when_all_groups_are_in() -> None:
    pools = Pool(), Pool()
    world = GroupsWorld(*pools)
    world.load()
    assert [pool.asked[0]["first_chunk"] for pool in pools] == [2, 0]
    assert [pool.asked[0]["blocks"][0] for pool in pools] == [WINDOW_BLOCKS[0], FULL_BLOCKS[0]]
    assert world.side.take_finished_recving() == {"r"}
    assert world.side.take_failed_requests() == set()
    ends = [end for end in world.side.take_reports() if isinstance(end, LoadReport)]
    assert [(end.group, end.result.loaded_chunks) for end in ends] == [(0, 2), (1, 4)]


def test_nothing_is_said_of_a_request_while_a_group_may_still_be_written() -> None:
    world = GroupsWorld(Pool(), Pool(), held=True)
    world.load()
    world.connection.fail_first(RuntimeError("planted"))
    assert (world.side.take_finished_recving(), world.side.take_failed_requests()) == (set(), set())
    world.connection.go()
    assert (world.side.take_finished_recving(), world.side.take_failed_requests()) == ({"r"}, {"r"})


@pytest.mark.parametrize("failing", [0, 1])
def test_a_group_that_fails_fails_the_load(failing: int) -> None:
    pools = Pool(), Pool()
    pools[failing].loaded = 1
    world = GroupsWorld(*pools)
    world.load()
    assert world.side.take_arrived() == ()
    assert (world.side.take_finished_recving(), world.side.take_failed_requests()) == ({"r"}, {"r"})
    assert world.side.take_failed_blocks() == set(), "block ids end an engine with several groups"


def test_loads_of_all_groups_arrive_together_in_one_process() -> None:
    world = GroupsWorld(Pool(), Pool())
    assert world.side.take_arrived() == ()
    world.load()
    assert [end.group for end in world.side.take_arrived()] == [0, 1]
    assert world.side.take_finished_recving() == set()


@pytest.mark.parametrize(
    ("jobs", "kept"),
    [
        (StepJobs(step=2, overwritten=[1]), False),
        (StepJobs(step=2, overwritten=[7]), True),
        (StepJobs(step=0), False),  # nothing is known of that step
        (StepJobs(step=2, scheduler="one"), True),
        (StepJobs(step=3, scheduler="one"), False),  # nothing is known of the step before it
    ],
)
def test_what_was_not_read_of_blocks_that_are_used_again_is_not_stored(jobs: StepJobs, kept: bool) -> None:
    pool = Pool()
    world = GroupsWorld(pool, Pool())
    pool.before_kept = lambda: world.side.handle_preemptions(jobs)
    first = StepJobs(step=1, scheduler="one", stores=[a_window_store()])
    world.side.handle_preemptions(first)
    world.side.start_stores(first)
    assert pool.kept == [kept]


@pytest.mark.parametrize("overwritten", [True, False])
def test_blocks_that_are_zeroed_before_the_connector_hears_of_it_are_not_stored(overwritten: bool) -> None:
    """Model runner V2 does so."""
    pool, asked = Pool(), threading.Event()
    pool.before_kept = asked.set
    world = GroupsWorld(pool, Pool(), held=True)
    storing = threading.Thread(target=world.connection.go)

    class ModelRunner:
        def execute_model(self, jobs: StepJobs, zero: Callable[[], object] = lambda: None) -> None:
            step_arrives(jobs)
            zero()
            world.side.handle_preemptions(jobs)

    def zero() -> None:
        """The agent reads the zeroes, and asks."""
        storing.start()
        assert asked.wait(PATIENCE_S)

    runner = ModelRunner()
    first = StepJobs(step=1, scheduler="one", stores=[a_window_store()])
    runner.execute_model(first)
    world.side.start_stores(first)
    runner.execute_model(StepJobs(step=2, scheduler="one", overwritten=[1] if overwritten else []), zero)
    storing.join(PATIENCE_S)
    assert pool.kept == [not overwritten]


def test_jobs_of_a_group_that_a_rank_does_not_have_fail() -> None:
    world = GroupsWorld(Pool())
    load = a_load("r", WINDOW_BLOCKS[:8], group=1)
    store = a_store(1, "s", WINDOW_BLOCKS[:8], group=1)
    jobs = StepJobs(step=1, loads=[load], stores=[store], release=["s"])
    world.side.start_loads(jobs)
    world.side.start_stores(jobs)
    assert (world.side.take_finished_recving(), world.side.take_failed_requests()) == ({"r"}, {"r"})
    assert world.side.take_finished_sending() == {"s"}
    assert len(world.side.take_reports()) == 2
