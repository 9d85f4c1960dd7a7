"""The vLLM connector's worker side on CUDA tensors as vLLM allocates them, in engine processes, with a real agent."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from kvpool.testing import eventually_sync
from tests.fixtures.gpu_cluster import EngineChild, GpuHost
from tests.fixtures.vllm_caches import CHUNK, LAYOUTS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(110)]

DEVICE = "cuda:0"
MODULE = "vllm_engine_process"
AGENT = "vllm"
LATE_S = 2.0
MANY = 1500  # loads, which take a GPU a second or more
RECOVERY_S = 60.0
SLACK_BYTES = 8 << 20  # a victim's cache has more
Ranks = dict[str, Any]
# What a backend's kernels may be given: blocks of 16, 32, 128 tokens, whole or as several of their own.
SHAPES: list[Ranks] = [
    *({"layout": layout, "block_tokens": 16} for layout in LAYOUTS),
    *({"layout": "LBNHC", "block_tokens": tokens, "dtype": "float16"} for tokens in (16, 32, 128)),
    *({"layout": "LBHNC", "block_tokens": tokens} for tokens in (32, 128)),
    {"layout": "BLNHC", "block_tokens": 128, "dtype": "float16"},
    {"layout": "LBNHC", "block_tokens": 128, "kernel_block_tokens": 16},
    {"layout": "LBHNC", "block_tokens": 32, "kernel_block_tokens": 16, "dtype": "float16"},
    {"layout": "LBNHC", "block_tokens": 64, "mla": True},
    {"layout": "BLHNC", "block_tokens": 16, "mla": True, "dtype": "float16"},
]


def name_of(shape: Ranks) -> str:
    return "-".join(str(value) for value in shape.values())


class Engines:
    """An agent, and a process with ranks that talk to it."""

    def __init__(self, host: GpuHost, child: EngineChild) -> None:
        self.host, self.cluster, self.child = host, host.cluster, child
        self._seed = 10_000
        self._open: list[str] = []

    def seed(self) -> int:
        """Of a prompt that was never stored."""
        self._seed += 10
        return self._seed

    def opened(self, rank: str, **shape: Any) -> str:
        """A rank that the agent serves."""
        assert self.child.ask("open", rank=rank, endpoint=self.host.endpoint(AGENT), device=DEVICE, **shape)
        self._open.append(rank)
        return rank

    def close(self) -> None:
        """All ranks."""
        while self._open:
            self.child.ask("close", rank=self._open.pop())


@pytest.fixture(scope="module")
def engines(host: GpuHost) -> Iterator[Engines]:
    cluster = host.cluster
    cluster.agent(AGENT, DEVICE.split(":")[0])
    child = cluster.engine("vllm", module=MODULE)
    cluster.agents[AGENT].wait_ready()
    child.wait_event("started")
    yield Engines(host, child)
    child.kill()
    cluster.agents.pop(AGENT).kill()


@pytest.fixture
def worker(engines: Engines) -> Iterator[Engines]:
    yield engines
    engines.close()


def stores(worker: Engines, rank: str, chunks: int, **options: Any) -> int:
    """The seed of a prompt that is in the pool now."""
    seed = worker.seed()
    stored = worker.child.ask("store", rank=rank, seed=seed, chunks=chunks, **options)
    assert (stored["stored"], stored["same"], stored["failed"]) == (chunks, 0, 0), stored
    return seed


def loads(worker: Engines, rank: str, **load: Any) -> dict[str, Any]:
    """How a load ended."""
    worker.child.ask("begin_load", rank=rank, **load)
    ended: dict[str, Any] = worker.child.ask("end_load", rank=rank, times=load.get("times", 1))
    return ended


@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_bits_come_back_into_poisoned_blocks_and_no_other_block_is_touched(worker: Engines, shape: Ranks) -> None:
    rank = worker.opened("one", **shape)
    seed = stores(worker, rank, 4, at=1)
    ended = loads(worker, rank, seed=seed, chunks=4, at=6)
    assert (ended["loaded"], ended["failed"], ended["failed_blocks"]) == (4, 0, [])
    assert worker.child.ask("holds", rank=rank, seed=seed, chunks=4, at=6) == {"loaded": True, "beside": True}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_one_rank_stored_two_ranks_of_another_engine_load(worker: Engines, dtype: str) -> None:
    """And the other way round; with other layouts and block sizes."""
    whole = worker.opened("whole", layout="LBNHC", block_tokens=16, dtype=dtype)
    halves = [
        worker.opened(f"half {number}", layout=layout, block_tokens=tokens, dtype=dtype, tp_rank=number, tp_size=2)
        for number, (layout, tokens) in enumerate([("LBHNC", 32), ("BLNHC", 128)])
    ]
    # Other ranks know only from the index in which shards a chunk was stored, and it hears of that a moment later.
    seed = stores(worker, whole, 3)
    for half in halves:

        def loaded(half: str = half, seed: int = seed) -> bool:
            return bool(loads(worker, half, seed=seed, chunks=3, at=2)["loaded"] == 3)

        eventually_sync(loaded, RECOVERY_S)
        assert worker.child.ask("holds", rank=half, seed=seed, chunks=3, at=2) == {"loaded": True, "beside": True}
    seed = worker.seed()
    for half in halves:
        assert worker.child.ask("store", rank=half, seed=seed, chunks=3)["stored"] == 3
    eventually_sync(lambda: loads(worker, whole, seed=seed, chunks=3, at=5)["loaded"] == 3, RECOVERY_S)
    assert worker.child.ask("holds", rank=whole, seed=seed, chunks=3, at=5) == {"loaded": True, "beside": True}


def test_of_ranks_that_have_the_same_latent_one_stores_and_all_load(worker: Engines) -> None:
    first, second = (
        worker.opened(f"mla {number}", layout="LBNHC", block_tokens=64, mla=True, tp_rank=number, tp_size=2)
        for number in range(2)
    )
    seed = stores(worker, first, 2)
    assert worker.child.ask("store", rank=second, seed=worker.seed(), chunks=2)["stored"] == 0
    assert loads(worker, second, seed=seed, chunks=2, at=3)["loaded"] == 2
    assert worker.child.ask("holds", rank=second, seed=seed, chunks=2, at=3) == {"loaded": True, "beside": True}


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC", "BLNHC"])
def test_a_store_while_the_engine_still_computes_stores_what_it_computes(worker: Engines, layout: str) -> None:
    """The step's kernels are behind a long one when the connector is asked to store; the blocks are NaN until then."""
    rank = worker.opened("late", layout=layout, block_tokens=32)
    seed = worker.seed()
    stored = worker.child.ask("store", rank=rank, seed=seed, chunks=4, late_s=LATE_S)
    assert stored["busy"]  # or nothing was late
    assert stored["stored"] == 4, stored
    assert loads(worker, rank, seed=seed, chunks=4, at=5)["loaded"] == 4
    assert worker.child.ask("holds", rank=rank, seed=seed, chunks=4, at=5) == {"loaded": True, "beside": True}


def test_a_load_while_the_engine_still_writes_into_those_blocks_comes_after_that(worker: Engines) -> None:
    """With a draft model, whose KV vLLM writes after what it takes for the end of a step."""
    rank = worker.opened("late", layout="LBNHC", block_tokens=16, speculation="eagle")
    seed = stores(worker, rank, 4)
    assert worker.child.ask("begin_load", rank=rank, seed=seed, chunks=4, at=5, late_s=LATE_S)
    assert worker.child.ask("end_load", rank=rank)["loaded"] == 4
    assert worker.child.ask("holds", rank=rank, seed=seed, chunks=4, at=5) == {"loaded": True, "beside": True}


def test_what_was_read_of_a_preempted_request_is_thrown_away(worker: Engines) -> None:
    rank, seed = worker.opened("preempted", layout="LBNHC", block_tokens=16), worker.seed()
    stored = worker.child.ask("store", rank=rank, seed=seed, chunks=4, late_s=LATE_S, preempted=True)
    assert (stored["stored"], stored["failed"]) == (0, 4), stored
    ended = loads(worker, rank, seed=seed, chunks=4)
    assert (ended["loaded"], ended["failed"]) == (0, 4)
    assert ended["failed_blocks"] == sorted(worker.child.ask("block_ids", rank=rank, at=0, chunks=4))


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[0], SHAPES[4], SHAPES[14]], ids=name_of)
def test_each_layer_is_in_when_the_forward_pass_comes_to_it(worker: Engines, shape: Ranks) -> None:
    """Its kernels are launched right after the wait, layer by layer, with an event behind each."""
    rank = worker.opened("layers", **shape, layerwise=True)
    seed = stores(worker, rank, 6)
    for _ in range(3):
        ended = worker.child.ask("load_layers", rank=rank, seed=seed, chunks=6, at=6)
        assert all(ended["equal"]), ended
        assert (ended["loaded"], ended["failed_blocks"]) == (6, [])
    assert worker.child.ask("holds", rank=rank, seed=seed, chunks=6, at=6) == {"loaded": True, "beside": True}


def test_what_the_engine_holds_of_a_chunk_is_left_alone(worker: Engines) -> None:
    rank = worker.opened("held", layout="LBNHC", block_tokens=32)
    seed, first = stores(worker, rank, 3), CHUNK + 2 * 32
    assert loads(worker, rank, seed=seed, chunks=3, at=5, first_token=first)["loaded"] == 2
    held = worker.child.ask("holds", rank=rank, seed=seed, chunks=3, at=5, first_token=first)
    assert held == {"loaded": True, "beside": True}


@pytest.mark.parametrize("layerwise", [False, True])
def test_a_damaged_page_is_named_by_its_blocks_and_those_behind(worker: Engines, layerwise: bool) -> None:
    rank = worker.opened("damaged", layout="LBNHC", block_tokens=32, layerwise=layerwise)
    seed = stores(worker, rank, 4)
    row = bytes.fromhex(worker.child.ask("row", rank=rank, seed=seed, chunk=2, layer=3))
    assert worker.cluster.damage(row) == 1
    blocks = worker.child.ask("block_ids", rank=rank, at=5, chunks=4)
    if layerwise:
        ended = worker.child.ask("load_layers", rank=rank, seed=seed, chunks=4, at=5)
    else:
        ended = loads(worker, rank, seed=seed, chunks=4, at=5)
    assert ended["loaded"] == 2, ended
    assert ended["failed_blocks"] == sorted(blocks[2 * CHUNK // 32 :])
    held = worker.child.ask("holds", rank=rank, seed=seed, chunks=2, at=5)
    assert held["loaded"]
    again = loads(worker, rank, seed=seed, chunks=2, at=8) if not layerwise else {"loaded": 2}
    assert again["loaded"] == 2


@pytest.mark.parametrize("stopped", [False, True], ids=["as it copies", "as it waits for a pagestore"])
def test_an_agent_killed_during_loads_fails_them_by_their_blocks_and_the_engine_goes_on(
    worker: Engines, stopped: bool
) -> None:
    rank = worker.opened("bereaved", layout="LBNHC", block_tokens=16)
    seed, agent, times = stores(worker, rank, 6), worker.cluster.agents[AGENT], 3 if stopped else MANY
    blocks = sorted(worker.child.ask("block_ids", rank=rank, at=6, chunks=6))
    if stopped:
        os.kill(worker.cluster.pagestore.pid, signal.SIGSTOP)
    try:
        worker.child.ask("begin_load", rank=rank, seed=seed, chunks=6, at=6, times=times)
        if not stopped:
            eventually_sync(lambda: worker.child.ask("some_load_ended", rank=rank))
        agent.kill()
        ended = worker.child.ask("end_load", rank=rank, times=times)
    finally:
        os.kill(worker.cluster.pagestore.pid, signal.SIGCONT)
    assert ended["loaded"] + ended["failed"] == 6 * times
    assert ended["failed"] > 0, ended  # or they were over before
    assert set(ended["failed_blocks"]) <= set(blocks)
    assert ended["failed_blocks"] == blocks or not stopped
    assert worker.child.ask("compute", device=DEVICE)
    assert worker.child.ask("holds", rank=rank, seed=seed, chunks=6, at=6)["beside"]
    ended = loads(worker, rank, seed=seed, chunks=6, at=6)
    assert (ended["loaded"], ended["failed_blocks"]) == (0, blocks)

    agent.start()
    agent.wait_ready()
    eventually_sync(lambda: worker.child.ask("connected", rank=rank), RECOVERY_S)
    assert loads(worker, rank, seed=seed, chunks=6, at=6)["loaded"] == 6
    assert worker.child.ask("holds", rank=rank, seed=seed, chunks=6, at=6) == {"loaded": True, "beside": True}
    stores(worker, rank, 3)


def kill_an_engine(worker: Engines, seed: int) -> None:
    """In the middle of the agent's copies into its cache; it has stored the prompt after this one."""
    victim = worker.cluster.engine("vllm victim", module=MODULE)
    victim.wait_event("started")
    endpoint = worker.host.endpoint(AGENT)
    assert victim.ask("open", rank="victim", endpoint=endpoint, device=DEVICE, layout="LBNHC", block_tokens=16)
    assert victim.ask("store", rank="victim", seed=seed + 1, chunks=6)["failed"] == 0
    victim.ask("begin_load", rank="victim", seed=seed, chunks=6, at=6, times=MANY)
    eventually_sync(lambda: victim.ask("some_load_ended", rank="victim"))
    victim.kill()
    eventually_sync(lambda: len(worker.cluster.status(AGENT).sessions) == 1)
    eventually_sync(lambda: not worker.cluster.leases())


def kills_and_leaves_nothing(worker: Engines, seed: int) -> bool:
    """Whether the GPU has as much free memory as before. Once it has not: the agent keeps what it allocates for so many
    loads at once. An engine's cache that somebody maps would be lost each time."""
    free_bytes = worker.child.ask("free_bytes", device=0) if DEVICE != "cpu" else 0
    kill_an_engine(worker, seed)
    if DEVICE == "cpu":
        return True
    with suppress(AssertionError):
        eventually_sync(lambda: worker.child.ask("free_bytes", device=0) >= free_bytes - SLACK_BYTES)
        return True
    return False


def test_an_engine_killed_under_the_agents_copies_leaves_neither_mapping_nor_lease(worker: Engines) -> None:
    rank = worker.opened("survivor", layout="LBNHC", block_tokens=16)
    seed = stores(worker, rank, 6)
    assert any(kills_and_leaves_nothing(worker, seed) for _ in range(3))
    for stored in (seed, seed + 1):
        assert loads(worker, rank, seed=stored, chunks=6, at=6)["loaded"] == 6
        assert worker.child.ask("holds", rank=rank, seed=stored, chunks=6, at=6) == {"loaded": True, "beside": True}
