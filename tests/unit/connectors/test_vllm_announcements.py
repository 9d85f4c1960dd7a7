"""What the vLLM connector announces of its GPU's cache, and when: generations first, then work that writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvpool.client.block_generations import BlockGenerations
from kvpool.client.engine_items import EngineSource
from kvpool.connectors.vllm.announced_chunks import AnnouncedChunks
from kvpool.connectors.vllm.known_chunks import KnownChunks
from kvpool.connectors.vllm.kv_groups import KvCache, KvCacheGroup
from kvpool.connectors.vllm.scheduler import ConnectorScheduler
from kvpool.connectors.vllm.settings import VllmSettings
from kvpool.connectors.vllm.step_events import StepEvents
from kvpool.connectors.vllm.step_jobs import AnnounceJob, StepJobs, block_id_array
from kvpool.connectors.vllm.worker import ConnectorWorker
from kvpool.connectors.vllm.worker_stores import WorkerKvCache, WorkerKvCacheGroup
from kvpool.core.elements import Dtype
from kvpool.core.geometry import KvGroup
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.testing import ManualClock
from tests.fixtures.layout_presets import vllm_nhd_layout
from tests.unit.connectors.vllm_fakes import FakeConnection, FakePool, FakeRequest, a_request

CHUNK, BLOCK = 32, 16
BLOCKS = list(range(100, 200))
SPEC = KeyspaceSpec(model_id="m", model_revision="r", groups=(KvGroup(2, 2, 16),), dtype=Dtype.BF16, chunk_tokens=CHUNK)


class World:
    """A scheduler that shares what its GPU holds."""

    def __init__(self, pool: FakePool | None = None, *, shares: bool = True, volatile_tokens: int = 0) -> None:
        self.connection = FakeConnection(pool or FakePool())
        self.side = ConnectorScheduler(
            VllmSettings(agent="unix:/x", chunk_tokens=CHUNK, min_load_tokens=1, lookup_wait_ms=0.0, store="never"),
            self.connection,  # type: ignore[arg-type]
            KvCache(
                groups=[KvCacheGroup(block_tokens=BLOCK, chunk_bytes=1000)],
                prefix_caching=True,
                shared_from_gpu=shares,
                volatile_tokens=volatile_tokens,
            ),
            worker_count=1,
            clock=ManualClock(),
        )

    def admit(self, request: FakeRequest, held_tokens: int = 0) -> None:
        self.side.on_new_request(request)
        self.side.get_num_new_matched_tokens(request, held_tokens)
        self.admit_without_load(request)

    def admit_without_load(self, request: FakeRequest) -> None:
        self.side.allocated_without_load(request, [BLOCKS[: -(-request.num_tokens // BLOCK)]])

    def load(self, request: FakeRequest) -> int:
        """The request waits for a load of all that the pool has; return the count of its tokens."""
        self.side.on_new_request(request)
        tokens = self.side.get_num_new_matched_tokens(request, 0)
        assert tokens
        self.side.allocated(request, [BLOCKS[: -(-tokens // BLOCK)]], tokens)
        return tokens

    def step(self, request: FakeRequest, tokens: int, new_blocks: list[int] | None = None) -> StepJobs:
        """The output of the step before has been processed."""
        jobs = self.side.build_jobs({request.request_id: tokens}, (), lambda _: [BLOCKS], new_blocks or ())
        request.num_computed_tokens += tokens
        return jobs

    def announced(self, jobs: StepJobs) -> list[tuple[int, list[int]]]:
        return [(len(job.hashes) // 16, job.block_ids.tolist()) for job in jobs.announce]

    def written(self, jobs: StepJobs) -> list[int] | None:
        return None if jobs.written is None else jobs.written.tolist()


def test_chunks_are_announced_when_the_output_of_their_step_was_processed() -> None:
    world, request = World(), a_request(100)
    world.admit(request)
    assert world.announced(world.step(request, 70)) == []
    assert world.announced(world.step(request, 30)) == [(2, BLOCKS[:4])]
    assert world.announced(world.step(request, 1)) == [(1, BLOCKS[4:6])]
    assert world.announced(world.step(request, 1)) == []


def test_what_is_in_flight_is_not_announced() -> None:
    world, request = World(), a_request(100)
    world.admit(request)
    world.step(request, 70)
    request.num_in_flight_tokens = 70
    assert world.announced(world.step(request, 30)) == []
    request.num_in_flight_tokens = 30
    assert world.announced(world.step(request, 1)) == [(2, BLOCKS[:4])]


def test_what_a_drafter_may_write_again_is_not_announced() -> None:
    world, request = World(volatile_tokens=1), a_request(CHUNK)
    world.admit(request)
    world.step(request, CHUNK)
    assert world.announced(world.step(request, 1)) == []


def test_what_a_drafter_writes_is_announced_when_a_later_step_has_ended() -> None:
    """vLLM takes a step for ended before its drafter has written its KV; the next step runs after that."""
    world, request = World(volatile_tokens=1), a_request(2 * CHUNK + 2)
    world.admit(request)
    assert world.announced(world.step(request, CHUNK + 1)) == []
    assert world.announced(world.step(request, CHUNK + 1)) == []
    request.all_token_ids.append(0)
    assert world.announced(world.step(request, 1)) == [(1, BLOCKS[:2])]
    request.num_in_flight_tokens = 1
    assert world.announced(world.step(request, 1)) == []
    request.all_token_ids.append(0)
    assert world.announced(world.step(request, 1)) == [(1, BLOCKS[2:4])]


def test_what_a_drafter_wrote_in_the_last_step_of_a_request_is_not_announced() -> None:
    world, request = World(volatile_tokens=1), a_request(2 * CHUNK + 2)
    world.admit(request)
    world.step(request, CHUNK + 1)
    world.step(request, CHUNK + 1)
    request.all_token_ids.append(0)
    world.side.request_finished(request, [BLOCKS], "FINISHED_STOPPED")
    assert world.announced(world.side.build_jobs({}, (), lambda _: None)) == [(1, BLOCKS[:2])]


def test_what_a_drafter_wrote_before_a_preemption_says_nothing_of_what_is_computed_again() -> None:
    world, request = World(volatile_tokens=1), a_request(2 * CHUNK + 2)
    world.admit(request)
    world.step(request, request.num_tokens)
    request.all_token_ids.append(0)
    world.step(request, 1)
    world.side.build_jobs({}, ["r"], lambda _: None)
    request.num_computed_tokens, request.num_preemptions = 0, 1
    world.side.get_num_new_matched_tokens(request, 0)
    world.admit_without_load(request)
    assert world.announced(world.step(request, request.num_tokens)) == []
    request.all_token_ids.append(0)
    assert world.announced(world.step(request, 1)) == []
    request.all_token_ids.append(0)
    assert world.announced(world.step(request, 1)) == [(2, BLOCKS[:4])]


def test_a_loaded_prefix_is_announced_and_its_blocks_are_not_written_again() -> None:
    world, request = World(FakePool(3)), a_request(100)
    tokens = world.load(request)
    assert world.written(world.side.build_jobs({}, (), lambda _: [BLOCKS])) == BLOCKS[:6]
    request.num_computed_tokens = tokens
    world.admit_without_load(request)
    jobs = world.step(request, 4)
    assert world.announced(jobs) == [(3, BLOCKS[:6])]
    assert world.written(jobs) == BLOCKS[6:7]


def test_blocks_of_a_load_that_failed_are_written_again() -> None:
    world, request = World(FakePool(3)), a_request(100)
    world.load(request)
    world.side.build_jobs({}, (), lambda _: [BLOCKS])
    request.num_computed_tokens = CHUNK + BLOCK  # vLLM goes on from the first block that failed
    world.admit_without_load(request)
    jobs = world.step(request, 52)
    assert world.announced(jobs) == [(1, BLOCKS[:2])]
    assert world.written(jobs) == BLOCKS[3:7]


def test_a_request_that_was_preempted_after_its_load_has_new_blocks() -> None:
    world, request = World(FakePool(3)), a_request(100)
    request.num_computed_tokens = world.load(request)
    world.admit_without_load(request)
    world.step(request, 4)
    request.num_computed_tokens, request.num_preemptions = 0, 1
    world.side.build_jobs({}, ["r"], lambda _: None)
    assert world.side.get_num_new_matched_tokens(request, CHUNK)
    world.admit_without_load(request)  # vLLM may decide so
    jobs = world.step(request, 68)
    assert world.announced(jobs) == []
    assert world.written(jobs) == BLOCKS[2:7]


def test_what_the_step_of_a_request_loads_is_announced_with_the_next_one() -> None:
    """As layerwise loads do, and other connectors beside this one may: the blocks are written in this very step."""
    world, request = World(FakePool(3)), a_request(100)
    tokens = world.load(request)
    request.num_computed_tokens = tokens
    jobs = world.step(request, 4)
    assert world.announced(jobs) == []
    assert world.written(jobs) == BLOCKS[:6]
    assert world.announced(world.step(request, 1)) == [(3, BLOCKS[:6])]


def test_the_last_chunks_go_out_with_the_step_after_the_request() -> None:
    world, request = World(), a_request(CHUNK)
    world.admit(request)
    world.step(request, CHUNK)
    for token in range(CHUNK):
        request.all_token_ids.append(token)
        request.num_computed_tokens += 1
    request.all_token_ids.append(0)  # of which the KV is not computed yet
    world.side.request_finished(request, [BLOCKS], "FINISHED_ABORTED")
    assert world.announced(world.side.build_jobs({}, (), lambda _: None)) == [(2, BLOCKS[:4])]
    assert world.announced(world.side.build_jobs({}, (), lambda _: None)) == []


def test_what_the_engine_found_in_its_own_cache_was_announced_before() -> None:
    world, request = World(), a_request(100)
    world.admit(request, held_tokens=CHUNK)
    world.step(request, 100 - CHUNK)
    request.num_computed_tokens = 100
    assert world.announced(world.step(request, 1)) == [(2, BLOCKS[2:6])]


def test_a_preempted_request_announces_what_it_computes_again() -> None:
    world, request = World(), a_request(64)
    world.admit(request)
    world.step(request, 64)
    request.all_token_ids.append(0)
    world.step(request, 1)
    world.side.build_jobs({}, ["r"], lambda _: None)
    request.num_computed_tokens, request.num_preemptions = 0, 1
    world.side.get_num_new_matched_tokens(request, 0)
    world.side.allocated_without_load(request, [BLOCKS[:4]])
    world.step(request, 64)
    assert world.announced(world.step(request, 1)) == [(2, BLOCKS[:4])]


@pytest.mark.parametrize("scheduled_tokens", [0, 4])
def test_what_another_connector_may_still_be_loading_is_not_announced(scheduled_tokens: int) -> None:
    """vLLM counts it as computed from the start: of a load that goes on beside steps, and of one in the step itself."""
    world, request = World(), a_request(100)
    world.admit(request)
    request.num_computed_tokens = 96
    if scheduled_tokens:
        world.step(request, scheduled_tokens)
        request.num_in_flight_tokens = scheduled_tokens
        assert world.announced(world.step(request, 1)) == []
        request.num_in_flight_tokens += 1
    world.side.request_finished(request, [BLOCKS], "FINISHED_ABORTED")
    assert world.announced(world.side.build_jobs({}, (), lambda _: None)) == []


def test_requests_that_share_nothing_announce_nothing() -> None:
    for values in ({"kv_transfer_params": {"kvpool": {"store": False}}}, {"prompt_embeds": object()}):
        world, request = World(), a_request(64, **values)
        world.admit(request)
        world.step(request, 64)
        assert world.announced(world.step(request, 1)) == []
    world, request = World(shares=False), a_request(64)
    world.admit(request)
    world.step(request, 64)
    assert world.announced(world.step(request, 1)) == []


def test_all_blocks_that_requests_were_given_are_named() -> None:
    world, request = World(), a_request(100)
    world.admit(request, held_tokens=CHUNK)
    assert world.written(world.step(request, 68, new_blocks=[7, 8])) == [*BLOCKS[2:7], 7, 8]
    assert world.written(world.step(request, 1)) == []
    world.side.lose_new_blocks()
    assert world.written(world.step(request, 1)) is None
    assert world.written(world.step(request, 1)) == []


def test_a_step_takes_few_bytes_whatever_it_writes() -> None:
    world, request = World(), a_request(100)
    world.admit(request)
    world.step(request, 1)  # names those of the request
    written = world.step(request, 1, new_blocks=list(range(100_000, 110_000))).written
    assert isinstance(written, np.ndarray) and written.nbytes == 4 * 10_000


def test_chunks_on_other_gpus_are_no_pages_and_are_loaded_from_there(monkeypatch: pytest.MonkeyPatch) -> None:
    known, add = list[bytes](), KnownChunks.add

    def noted(chunks: KnownChunks, hashes: Iterable[bytes]) -> None:
        taken = list(hashes)
        known.extend(taken)
        add(chunks, taken)

    monkeypatch.setattr(KnownChunks, "add", noted)
    pool = FakePool(3)
    pool.source = EngineSource.GPU
    world, request = World(pool), a_request(100)
    world.side.on_new_request(request)
    tokens = world.side.get_num_new_matched_tokens(request, 0)
    assert tokens == 96
    assert not pool.leases
    assert not known
    world.side.allocated(request, [BLOCKS[:7]], tokens)
    (job,) = world.side.build_jobs({}, (), lambda _: [BLOCKS]).loads
    assert job.from_gpu


class Session:
    """Takes announcements."""

    def __init__(self) -> None:
        self.announced: list[tuple[bytes, list[int], list[int]]] = []

    def announce_cached(self, hashes: bytes, blocks: Any, generations: Any) -> None:
        self.announced.append((hashes, blocks.ravel().tolist(), generations.ravel().tolist()))


@pytest.fixture
def generations() -> Iterator[BlockGenerations]:
    table = BlockGenerations(vllm_nhd_layout(SPEC, range(2), range(2), BLOCK, 16))
    yield table
    table.close()


def a_worker(
    generations: BlockGenerations, session: Session | None, split: int = 1, connection: FakeConnection | None = None
) -> ConnectorWorker:
    pool = SimpleNamespace(session=session) if session is not None else None
    group = WorkerKvCacheGroup(block_tokens=BLOCK, page_bytes=1000, step_events=StepEvents(None), split=split)
    return ConnectorWorker(
        VllmSettings(agent="unix:/x", chunk_tokens=CHUNK),
        connection or FakeConnection(pool),  # type: ignore[arg-type]
        WorkerKvCache(groups=[group], generations=generations),
    )


def announce(blocks: list[int], name: bytes = b"a") -> AnnounceJob:
    return AnnounceJob(hashes=name * 16, block_ids=block_id_array(blocks))


def everything(generations: BlockGenerations) -> list[int]:
    found: list[int] = generations.of(np.arange(16)).tolist()
    return found


def test_generations_are_read_before_blocks_are_given_away_in_the_same_step(generations: BlockGenerations) -> None:
    session = Session()
    worker = a_worker(generations, session)
    worker.start_stores(StepJobs(step=0))
    jobs = StepJobs(step=1, announce=[announce([3, 4]), announce([5, 6])], written=block_id_array([4, 9, 9]))
    worker.handle_preemptions(jobs)
    assert everything(generations) == [0, 0, 0, 0, 1, 0, 0, 0, 0, 1, *[0] * 6]
    assert not session.announced  # nothing is sent before the step's work is launched
    worker.start_loads(jobs)
    worker.start_stores(jobs)
    assert session.announced == [(b"a" * 32, [3, 4, 5, 6], [0, 0, 0, 0])]
    worker.start_stores(StepJobs(step=2))
    assert len(session.announced) == 1


def test_blocks_that_kernels_take_in_parts_have_a_generation_for_each(generations: BlockGenerations) -> None:
    session = Session()
    worker = a_worker(generations, session, split=2)
    jobs = StepJobs(step=1, announce=[announce([3, 4])], written=block_id_array([2]))
    worker.handle_preemptions(jobs)
    assert everything(generations) == [0, 0, 0, 0, 1, 1, *[0] * 10]
    worker.start_stores(jobs)
    assert session.announced == [(b"a" * 16, [6, 7, 8, 9], [0] * 4)]


def test_a_step_that_failed_before_the_connector_heard_of_it_ends_all_that_was_announced(
    generations: BlockGenerations,
) -> None:
    worker = a_worker(generations, Session())
    for step, raised in ((1, 0), (2, 0), (4, 1)):
        worker.handle_preemptions(StepJobs(step=step, scheduler="one", written=block_id_array([])))
        assert everything(generations) == [raised] * 16


@pytest.mark.parametrize(
    "jobs",
    [
        StepJobs(step=0),
        StepJobs(step=1),
        StepJobs(step=1, written=block_id_array([16])),
        StepJobs(step=1, written=block_id_array([1]), announce=[announce([99, 1])]),
    ],
)
def test_a_step_of_which_not_all_is_known_ends_all_that_was_announced(
    generations: BlockGenerations, jobs: StepJobs
) -> None:
    worker = a_worker(generations, Session())
    try:
        worker.handle_preemptions(jobs)
    except IndexError:
        assert jobs.step
    assert everything(generations) == [1] * 16


def test_an_agent_that_comes_later_hears_what_still_holds(generations: BlockGenerations) -> None:
    connection, session = FakeConnection(None), Session()
    worker = a_worker(generations, None, connection=connection)
    for step, (job, written) in enumerate(((announce([3, 4]), []), (announce([5, 6], b"b"), [4])), 1):
        jobs = StepJobs(step=step, announce=[job], written=block_id_array(written))
        worker.handle_preemptions(jobs)
        worker.start_stores(jobs)
    connection.pool = SimpleNamespace(session=session)
    worker.start_stores(StepJobs(step=3))
    assert session.announced == [(b"b" * 16, [5, 6], [0, 0])]


def test_an_agent_that_was_started_again_hears_all_that_still_holds_once(generations: BlockGenerations) -> None:
    """Later requests that find the chunks in the engine's cache announce nothing."""
    first, second = Session(), Session()
    connection = FakeConnection(SimpleNamespace(session=first))
    worker = a_worker(generations, None, connection=connection)
    jobs = StepJobs(step=1, announce=[announce([3, 4]), announce([5, 6], b"b")], written=block_id_array([9]))
    worker.handle_preemptions(jobs)
    worker.start_stores(jobs)
    connection.pool = SimpleNamespace(session=second)
    jobs = StepJobs(step=2, announce=[announce([7, 8], b"c")], written=block_id_array([6]))
    worker.handle_preemptions(jobs)
    worker.start_stores(jobs)
    worker.start_stores(StepJobs(step=3))
    assert first.announced == [(b"a" * 16 + b"b" * 16, [3, 4, 5, 6], [0] * 4)]
    assert second.announced == [(b"a" * 16 + b"c" * 16, [3, 4, 7, 8], [0] * 4)]


def test_no_more_chunks_are_kept_than_the_cache_has_room_for(generations: BlockGenerations) -> None:
    chunks = AnnouncedChunks(generations)
    for number in range(12):
        chunks.add(bytes([number]) * 16, np.array([2 * (number % 8), 2 * (number % 8) + 1]))
    sent = chunks.take(object())
    assert sent is not None
    assert sent.hashes == b"".join(bytes([number]) * 16 for number in range(4, 12))


def test_what_is_no_block_has_no_generation(generations: BlockGenerations) -> None:
    with pytest.raises(IndexError):
        generations.raise_blocks([3, -1])
    assert everything(generations) == [0] * 16
